"""Finds the largest elements of a tensor without sorting it.

``torch.topk`` on a whole bucket takes tens of times as long as copying it. Here a threshold is
estimated once from a strided sample, and then taken from the previous step: gradients change
slowly, and their sum with the residual even more slowly. All elements above it are candidates, and
the largest candidates are the exact result, as long as there are enough.

On a CPU, counting is free. A device uses ``torch.topk``, which does not wait.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from lightning_opt.strategies.packing import CHUNK_SIZE, chunks_of

MIN_SAMPLE_SIZE = 16_384
EXPECTED_IN_SAMPLE = 64
"""Expected elements above the threshold in a sample: its count then has an error of 1 in 8."""

TINY = torch.finfo(torch.float32).tiny


def sampled_threshold(flat: Tensor, k: int) -> float:
    """Estimate the magnitude that ``k`` elements of ``flat`` reach, from a strided sample."""
    sample_size = max(MIN_SAMPLE_SIZE, EXPECTED_IN_SAMPLE * flat.numel() // k)
    # An odd stride, so that the sample covers all columns of a matrix of even width.
    stride = max(flat.numel() // sample_size, 1) | 1
    sample = flat[::stride].abs()
    rank = max(round(k * sample.numel() / flat.numel()), 1)
    return sample.topk(rank, sorted=False).values.min().item()  # on a CPU


def largest(magnitudes: Tensor, k: int) -> tuple[Tensor, float]:
    """Return the ascending indices of the ``k`` largest ``magnitudes``, and the k-th magnitude."""
    array = magnitudes.numpy()
    is_largest = np.zeros(len(array), dtype=bool)
    is_largest[np.argpartition(array, len(array) - k)[len(array) - k :]] = True
    indices = np.flatnonzero(is_largest)
    return torch.from_numpy(indices), float(array[indices].min())


class Selector:
    """Finds the elements of largest magnitude of one bucket on a CPU, step after step.

    Args:
        numel: Elements of the bucket.
    """

    def __init__(self, numel: int) -> None:
        self.threshold: float | None = None
        self._last_kth = 0.0  # the k-th magnitude of the previous step
        self._margin = 0.97
        self._magnitude = np.empty(min(CHUNK_SIZE, numel), dtype=np.float32)
        self._mask = np.empty(min(CHUNK_SIZE, numel), dtype=bool)

    def top(self, flat: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """Return the ``k`` largest elements of ``flat``.

        Zeros are never returned, and no other element is larger than a returned one. If the
        threshold of the previous step proves too high, fewer are returned, at least half of ``k``.

        Args:
            flat: One-dimensional, finite, float32 or float64.
            k: Number of elements, at least 1.

        Returns:
            int64 indices in ascending order, and the values there.
        """
        if k >= flat.numel():
            return self.at_least(flat, TINY)
        if self.threshold is None:
            self.threshold = sampled_threshold(flat, k) * self._margin
        indices, values = self.at_least(flat, self.threshold)
        if len(indices) < k // 2:
            # The gradient has shrunk since the last step, or has few nonzero elements: all of them
            # are candidates.
            indices, values = self.at_least(flat, TINY)
        surplus = len(indices) / k - 1.0
        if len(indices) <= k:
            kth = values.abs().min().item() if len(indices) else TINY
        else:
            top, kth = largest(values.abs(), k)
            indices, values = indices[top], values[top]
        self._set_next_threshold(kth, surplus)
        return indices, values

    def _set_next_threshold(self, kth: float, surplus: float) -> None:
        """Set the next step's threshold for a surplus of about one candidate in ten.

        Then there are rarely too few candidates, and the surplus is cheap to sort out. The residual
        and the k-th magnitude grow ever more slowly, so half of the growth is extrapolated.
        """
        self._margin = min(max(self._margin * (1.005 if surplus > 0.1 else 0.99), 0.8), 0.995)
        growth = kth / self._last_kth if self._last_kth > 0 else 1.0
        trend = min(max(math.sqrt(growth), 0.95), 1.25)
        self._last_kth = kth
        self.threshold = max(kth * self._margin * trend, TINY)

    def at_least(self, flat: Tensor, threshold: float) -> tuple[Tensor, Tensor]:
        """Return the ascending int64 indices and the values of magnitudes >= ``threshold``."""
        found, least = [], np.float32(max(threshold, TINY))
        for chunk in chunks_of(flat):
            piece = flat[chunk].numpy()
            magnitude, mask = self._magnitude[: len(piece)], self._mask[: len(piece)]
            # numpy takes less than half of torch's time here.
            np.abs(piece, out=magnitude, casting="same_kind")
            np.greater_equal(magnitude, least, out=mask)
            found.append(np.flatnonzero(mask) + chunk.start)
        indices = torch.from_numpy(np.concatenate(found))
        return indices, flat.index_select(0, indices)
