"""Finding the largest elements of a tensor without sorting it.

``torch.topk`` on a whole bucket takes tens of times as long as copying it. Here a threshold is
estimated from a strided sample once, and from then on taken from the step before: gradients change
slowly, and their sum with what was left over more slowly still. All elements above it are
candidates, and the largest of these are the answer, exactly, as long as enough passed.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from lightning_opt.strategies.compression.codecs.chunks import CHUNK, chunks_of

SAMPLE = 16_384
EXPECTED_IN_SAMPLE = 64
"""Elements above the threshold that a sample should hold: its count is then good to 1 in 8."""

TINY = torch.finfo(torch.float32).tiny


def sampled_threshold(flat: Tensor, k: int) -> float:
    """Return a magnitude that about ``k`` elements of ``flat`` reach, from a strided sample."""
    wanted = max(SAMPLE, EXPECTED_IN_SAMPLE * flat.numel() // k)
    # An odd stride, so that the sample runs through all columns of a matrix of even width.
    stride = max(flat.numel() // wanted, 1) | 1
    sample = flat[::stride].abs()
    place = max(round(k * sample.numel() / flat.numel()), 1)
    # Waits for the device, at the first step and where a threshold proves wrong: the candidates
    # must be counted on the host, since a message has room for so many.
    return sample.topk(place, sorted=False).values.min().item()


def nonzero(mask: Tensor) -> Tensor:
    """Return where a one-dimensional mask is true, as int64 in ascending order."""
    if mask.device.type == "cpu":
        return torch.from_numpy(np.flatnonzero(mask.numpy()))  # a third of torch.nonzero's time
    return mask.nonzero().view(-1)  # waits for the device, to learn how long the result is


def reaches(piece: Tensor, threshold: float, magnitude: Tensor, mask: Tensor) -> Tensor:
    """Return where a tensor is at least ``threshold`` in size, in ``mask``.

    Args:
        piece: One-dimensional, float32 or float64.
        threshold: Compared as float32.
        magnitude: Room for the magnitudes, float32.
        mask: Room for the result.
    """
    if piece.dtype is torch.float32 and piece.device.type == "cpu":
        np.abs(piece.numpy(), out=magnitude.numpy())
        np.greater_equal(magnitude.numpy(), np.float32(threshold), out=mask.numpy())
        return mask  # in less than half of the time that torch takes to write bools
    return torch.ge(magnitude.copy_(piece.abs()), threshold, out=mask)


def largest(magnitudes: Tensor, k: int) -> tuple[Tensor, float]:
    """Return the places of the ``k`` largest of ``magnitudes`` in ascending order, and the k-th."""
    if magnitudes.device.type == "cpu":
        array = magnitudes.numpy()
        kth = float(np.partition(array, len(array) - k)[len(array) - k])  # faster than kthvalue
    else:
        # Waits for the device, which has just been waited for to list the candidates.
        kth = magnitudes.topk(k, sorted=False).values.min().item()
    places = nonzero(magnitudes >= kth)
    if places.numel() > k:  # equal magnitudes at the edge: some of these must stay behind
        above = magnitudes > kth
        level = nonzero(magnitudes == kth)
        above[level[: k - int(above.sum())]] = True
        places = nonzero(above)
    return places, kth


class Selector:
    """Finds the elements of largest magnitude of one bucket, step after step.

    Args:
        numel: Elements of the bucket.
        device: Where it lies.
    """

    def __init__(self, numel: int, device: torch.device) -> None:
        self.threshold: float | None = None
        self._last = 0.0  # the k-th magnitude of the step before
        self._margin = 0.97
        size = min(CHUNK, numel) if device.type == "cpu" else numel
        self._magnitude = torch.empty(size, device=device)
        self._mask = torch.empty(size, dtype=torch.bool, device=device)

    def top(self, flat: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """Return the ``k`` largest elements of ``flat``.

        Zeros are never returned, and nothing that is left out is larger than what is returned.
        Where the threshold taken from the last step proves too high, fewer are returned, but at
        least half of ``k``.

        Args:
            flat: One-dimensional, finite, float32 or float64.
            k: How many to return, at least 1.

        Returns:
            int64 indices in ascending order, and the values there.
        """
        if k >= flat.numel():
            return self.at_least(flat, TINY)
        if self.threshold is None:
            self.threshold = sampled_threshold(flat, k) * self._margin
        indices, values = self.at_least(flat, self.threshold)
        if len(indices) < k // 2:
            # The gradient has shrunk since the last step. Should a sample miss too, as it may in a
            # tensor with few elements that are not zero, all of these are candidates.
            indices, values = self.at_least(flat, sampled_threshold(flat, k) * self._margin)
            if len(indices) < k // 2:
                indices, values = self.at_least(flat, TINY)
        surplus = len(indices) / k - 1.0
        if len(indices) <= k:
            # Waits for the device, whose list is short and done; the next step aims by this.
            kth = values.abs().min().item() if len(indices) else TINY
        else:
            places, kth = largest(values.abs(), k)
            indices, values = indices[places], values[places]
        self._aim(kth, surplus)
        return indices, values

    def _aim(self, kth: float, surplus: float) -> None:
        """Set the next step's threshold for about one candidate in ten too many.

        That is enough to fall short rarely, and little to sort out. What is left over grows from
        step to step at first, and the k-th magnitude with it ever more slowly, so half of its
        course is carried on.
        """
        self._margin = min(max(self._margin * (1.005 if surplus > 0.1 else 0.99), 0.8), 0.995)
        growth = kth / self._last if self._last > 0 else 1.0
        trend = min(max(math.sqrt(growth), 0.95), 1.25)
        self._last = kth
        self.threshold = max(kth * self._margin * trend, TINY)

    def at_least(self, flat: Tensor, threshold: float) -> tuple[Tensor, Tensor]:
        """Return what is at least ``threshold`` in size: ascending int64 indices, and values."""
        found = []
        for chunk in chunks_of(flat):
            piece = flat[chunk]
            magnitude, mask = self._magnitude[: len(piece)], self._mask[: len(piece)]
            places = nonzero(reaches(piece, max(threshold, TINY), magnitude, mask))
            found.append(places.add_(chunk.start))
        indices = torch.cat(found)
        return indices, flat.index_select(0, indices)
