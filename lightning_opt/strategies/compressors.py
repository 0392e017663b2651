"""Compressors encode a flat gradient as a short message, and decode it.

A :class:`Compressor` is a description that can be written in a YAML file and pickled. Its
:meth:`~Compressor.codec` compresses one bucket, step after step, with its own buffers. Neither uses
process groups.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from lightning_opt.core.arguments import check_at_least, check_one_of, check_positive, check_share
from lightning_opt.core.modules.sharding import reads_are_free
from lightning_opt.core.numerics.scalars import Scalar
from lightning_opt.strategies.packing import (
    CHUNK_SIZE,
    Layout,
    SparseLayout,
    chunks_of,
    is_finite,
    write_count,
)
from lightning_opt.strategies.quantization import Quantizer, quantizer

MIN_SAMPLE_SIZE = 16_384
EXPECTED_IN_SAMPLE = 64
"""Expected number of sampled elements above the threshold: 64 are exact to about 1/8."""

TINY = torch.finfo(torch.float32).tiny


class Codec(ABC):
    """Compresses one flat tensor, step after step, into one message.

    Args:
        nbytes: Length of a message.
        device: The device of the tensor and its messages.

    Attributes:
        message: The latest message, ``uint8`` of length ``nbytes``. It may be replaced by another
            buffer of this length.
        bound: The learned threshold, saved in checkpoints: a tensor on a GPU, else a float or None.
    """

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self.nbytes = nbytes
        self.message = torch.zeros(nbytes, dtype=torch.uint8, device=device)
        self.bound: Scalar | None = None

    @abstractmethod
    def compress(self, residual: Tensor, gradient: Tensor, rest: Tensor, alpha: Tensor) -> Tensor:
        """Write the message of ``residual + alpha * gradient``, and the unsent rest into ``rest``.

        ``decompress_add(message, rest)`` restores the sum. On a GPU the host does not wait.

        Args:
            residual: One-dimensional, float32 or float64.
            gradient: Of any floating dtype.
            rest: Of the residual's dtype. It may be one of the other two.
            alpha: Factor of the gradient, 0-dimensional.

        Returns:
            Whether the sum is finite, 0-dimensional. If it is not, message and rest are undefined.
        """

    @abstractmethod
    def decompress_add(self, message: Tensor, out: Tensor, alpha: Scalar = 1.0) -> None:
        """Add ``alpha`` times the values of a message to ``out``, in place."""


class Compressor(ABC):
    """Describes how gradients are compressed.

    Attributes:
        late: Whether most elements wait for many steps before they are sent. Clipping then acts on
            gradients before they enter the residual.
    """

    late = False

    @abstractmethod
    def codec(self, numel: int, device: torch.device) -> Codec:
        """Return a codec for tensors of ``numel`` elements on ``device``."""

    def __repr__(self) -> str:
        arguments = ", ".join(f"{name}={value!r}" for name, value in vars(self).items())
        return f"{type(self).__name__}({arguments})"


class TopK(Compressor):
    """Sends the elements of largest magnitude.

    Args:
        ratio: Share of a bucket's elements to send, above 0 and at most 1.

    Raises:
        ValueError: For a ratio outside (0, 1].

    References:
        Aji and Heafield (2017), *Sparse Communication for Distributed Gradient Descent*.
    """

    late = True

    def __init__(self, ratio: float = 0.01) -> None:
        self.ratio = check_share("ratio", ratio)

    def codec(self, numel: int, device: torch.device) -> Codec:
        """Return a codec for tensors of ``numel`` elements on ``device``."""
        return SparseCodec(SparseLayout(numel, share_of(numel, self.ratio)), device)


class Threshold(Compressor):
    """Sends the elements whose magnitude reaches a threshold; layers with small gradients send few.

    A hard threshold minimizes the total error of a whole run, while Top-K minimizes the error of
    each step. If more elements reach the threshold than a message can hold, the largest are sent.

    Args:
        value: The threshold for the sum of gradient and residual. ``"auto"`` takes the magnitude
            that 1% of the bucket's elements reach at the first compressed step, and keeps it.
        max_ratio: Maximum share of a bucket's elements in a message. All messages have this
            length, because variable lengths would need another exchange.

    Raises:
        ValueError: For a value that is not above 0, or a ratio outside (0, 1].

    References:
        Sahu, Dutta, Abdelmoniem, Banerjee, Canini and Kalnis (2021), *Rethinking Gradient
        Sparsification as Total Error Minimization*.
    """

    late = True

    def __init__(self, value: float | Literal["auto"] = "auto", max_ratio: float = 0.02) -> None:
        self.value = value if value == "auto" else check_positive("value", value)
        self.max_ratio = check_share("max_ratio", max_ratio)

    def codec(self, numel: int, device: torch.device) -> Codec:
        """Return a codec for tensors of ``numel`` elements on ``device``."""
        layout = SparseLayout(numel, share_of(numel, self.max_ratio))
        return ThresholdCodec(layout, device, None if self.value == "auto" else self.value)


class Quantize(Compressor):
    """Sends every element in few bits, with one float32 scale for each block.

    Args:
        bits: 8 or 4.
        block: Elements that share a scale, even.

    Raises:
        ValueError: For other bits, or a block that is odd or below 2.
    """

    def __init__(self, bits: Literal[4, 8] = 8, block: int = 1024) -> None:
        self.bits = check_one_of("bits", bits, (8, 4))
        self.block = check_at_least("block", block, 2)
        if block % 2:
            raise ValueError(f"block must be even, got {block}.")

    def codec(self, numel: int, device: torch.device) -> Codec:
        """Return a codec for tensors of ``numel`` elements on ``device``."""
        return QuantizedCodec(numel, quantizer(self.bits, self.block), device)


def share_of(numel: int, ratio: float) -> int:
    """Return the number of elements in a share, at least 1 if ``numel`` is."""
    return min(max(round(ratio * numel), 1), numel)


class SparseCodec(Codec):
    def __init__(self, layout: SparseLayout, device: torch.device) -> None:
        super().__init__(layout.nbytes, device)
        self.layout = layout
        self._selector = Selector(layout.numel)

    def _select(self, flat: Tensor) -> tuple[Tensor, Tensor]:
        if reads_are_free(flat.device):
            return self._selector.top(flat, self.layout.capacity)
        # Always fill the message, if necessary with zeros, so that the host need not wait.
        indices = flat.abs().topk(self.layout.capacity, sorted=False).indices.sort().values
        return indices, flat.index_select(0, indices)

    def compress(self, residual: Tensor, gradient: Tensor, rest: Tensor, alpha: Tensor) -> Tensor:
        torch.addcmul(residual, gradient, alpha, out=rest)
        indices, values = self._select(rest)
        finite = is_finite(values)  # if the largest elements are finite, all are
        sent = self.layout.write(self.message, indices, values)
        rest.index_add_(0, indices, sent.to(rest.dtype), alpha=-1)
        return finite

    def decompress_add(self, message: Tensor, out: Tensor, alpha: Scalar = 1.0) -> None:
        indices, values = self.layout.read(message, alpha)
        out.index_add_(0, indices, values.to(out.dtype))


class ThresholdCodec(SparseCodec):
    AUTO_RATIO = 0.01

    def __init__(self, layout: SparseLayout, device: torch.device, value: float | None) -> None:
        super().__init__(layout, device)
        self._value = value

    def _select(self, flat: Tensor) -> tuple[Tensor, Tensor]:
        capacity = self.layout.capacity
        bound = self.bound if self._value is None else self._value
        k = min(share_of(self.layout.numel, self.AUTO_RATIO), capacity)
        if not reads_are_free(flat.device):
            indices, values = super()._select(flat)
            if bound is None:
                bound = torch.zeros((), device=flat.device)
            if isinstance(bound, Tensor):  # learned again if 0, NaN or infinite
                learned, valid = values.abs().topk(k).values[-1], (bound > 0) & (bound < math.inf)
                bound = self.bound = torch.where(valid, bound, learned)
            return indices, torch.where(values.abs() < bound, 0.0, values)
        if bound is None or not bound < math.inf:
            indices, values = self._selector.top(flat, k)
            if len(indices):
                self.bound = values.abs().min().item()  # CPU only
            return indices, values
        return keep_largest(*self._selector.at_least(flat, float(bound)), capacity)


class QuantizedCodec(Codec):
    def __init__(self, numel: int, quantizer: Quantizer, device: torch.device) -> None:
        self._quantizer = quantizer
        blocks = -(-numel // quantizer.block)  # the last block is padded
        # One float32 scale and one row of codes per block; two 4-bit codes share a byte.
        code = torch.int8 if quantizer.bits == 8 else torch.uint8
        row = quantizer.block * quantizer.bits // 8
        self._layout = Layout((torch.float32, (blocks, 1)), (code, (blocks, row)))
        super().__init__(self._layout.nbytes, device)

    def compress(self, residual: Tensor, gradient: Tensor, rest: Tensor, alpha: Tensor) -> Tensor:
        write_count(self.message, len(rest))
        scales, codes = self._layout.sections(self.message)
        self._quantizer.encode((residual, gradient, rest), alpha, codes, scales)
        return scales.isfinite().all()

    def decompress_add(self, message: Tensor, out: Tensor, alpha: Scalar = 1.0) -> None:
        """Add ``alpha`` times the values of a message to ``out``, in place.

        ``out`` may be shorter than the encoded tensor; the other values are then ignored.
        """
        scales, codes = self._layout.sections(message)
        self._quantizer.decode(out, codes, scales * alpha)


# --- selection ------------------------------------------------------------------------------------


def sampled_threshold(flat: Tensor, k: int) -> float:
    """Estimate the magnitude that ``k`` elements of ``flat`` reach, from a strided sample."""
    sample_size = max(MIN_SAMPLE_SIZE, EXPECTED_IN_SAMPLE * flat.numel() // k)
    # An odd stride, so that the sample covers all columns of a matrix of even width.
    stride = max(flat.numel() // sample_size, 1) | 1
    sample = flat[::stride].abs()
    rank = max(round(k * sample.numel() / flat.numel()), 1)
    return sample.topk(rank, sorted=False).values.min().item()  # CPU only


def keep_largest(indices: Tensor, values: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return at most ``k`` values, those of largest magnitude, and their indices in order."""
    if len(values) <= k:
        return indices, values
    array = values.abs().numpy()
    is_largest = np.zeros(len(array), dtype=bool)
    is_largest[np.argpartition(array, len(array) - k)[len(array) - k :]] = True
    top = torch.from_numpy(np.flatnonzero(is_largest))
    return indices[top], values[top]


class Selector:
    """Finds the elements of largest magnitude of one bucket on a CPU, step after step.

    ``torch.topk`` on a whole bucket takes tens of times as long as copying it. Here a threshold is
    estimated once from a strided sample, and then taken from the previous step: gradients change
    slowly, and their sum with the residual even more slowly. All elements above it are candidates,
    and the largest candidates are the exact result, as long as there are enough.

    Args:
        numel: Elements of the bucket.
    """

    def __init__(self, numel: int) -> None:
        self.threshold = math.inf  # estimated in the first step, and again after a step with NaN
        self._last_kth = 0.0  # the k-th magnitude of the previous step
        self._margin = 0.97
        self._magnitude = np.empty(min(CHUNK_SIZE, numel), dtype=np.float32)
        self._mask = np.empty(min(CHUNK_SIZE, numel), dtype=bool)

    def top(self, flat: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """Return the ``k`` largest elements of ``flat``.

        Zeros are never returned. NaN counts as the largest value. If the threshold of the previous
        step was too high, fewer than ``k`` elements are returned: still the largest, and at least
        half of ``k``.

        Args:
            flat: One-dimensional, float32 or float64.
            k: Number of elements, at least 1.

        Returns:
            int64 indices in ascending order, and the values there.
        """
        if k >= flat.numel():
            return self.at_least(flat, TINY)
        if not self.threshold < math.inf:
            self.threshold = sampled_threshold(flat, k) * self._margin
        indices, values = self.at_least(flat, self.threshold)
        if len(indices) < k // 2:
            # The gradient has shrunk since the last step, or has few nonzero elements: make all
            # nonzero elements candidates.
            indices, values = self.at_least(flat, TINY)
        surplus = len(indices) / k - 1.0
        indices, values = keep_largest(indices, values, k)
        kth = values.abs().min().item() if len(indices) else TINY
        self._set_next_threshold(kth, surplus)
        return indices, values

    def _set_next_threshold(self, kth: float, surplus: float) -> None:
        """Set the next step's threshold for a surplus of about one candidate in ten.

        With this surplus there are rarely too few candidates, and few to sort. The growth of the
        residual and of the k-th magnitude slows down, so only its square root is extrapolated.
        """
        self._margin = min(max(self._margin * (1.005 if surplus > 0.1 else 0.99), 0.8), 0.995)
        growth = kth / self._last_kth if self._last_kth > 0 else 1.0
        trend = min(max(math.sqrt(growth), 0.95), 1.25)
        self._last_kth = kth
        self.threshold = max(kth * self._margin * trend, TINY)

    def at_least(self, flat: Tensor, threshold: float) -> tuple[Tensor, Tensor]:
        """Return the ascending int64 indices and values of magnitudes >= ``threshold`` or NaN."""
        found, minimum = [], np.float32(max(threshold, TINY))
        for chunk in chunks_of(flat):
            piece = flat[chunk].numpy()
            magnitude, mask = self._magnitude[: len(piece)], self._mask[: len(piece)]
            # numpy takes less than half of torch's time here.
            np.abs(piece, out=magnitude, casting="same_kind")
            np.less(magnitude, minimum, out=mask)
            found.append(np.flatnonzero(~mask) + chunk.start)
        indices = torch.from_numpy(np.concatenate(found))
        return indices, flat.index_select(0, indices)
