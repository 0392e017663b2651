"""Compressors: from a flat gradient to a message of few bytes, and back.

A :class:`Compressor` is a description that can be written in a YAML file and pickled. Its
:meth:`~Compressor.codec` is what compresses one bucket, step after step, with buffers of its own.
Neither knows of process groups.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from lightning_opt.core.arguments import at_least, one_of, positive, share
from lightning_opt.core.modules.sharding import reads_are_free
from lightning_opt.core.numerics.scalars import Scalar
from lightning_opt.strategies.chunks import chunks_of
from lightning_opt.strategies.packing import (
    QuantizedLayout,
    SparseLayout,
    quantize_rows,
    write_count,
)
from lightning_opt.strategies.selection import Selector, largest_places


class Codec(ABC):
    """Compresses one flat tensor, step after step, into one message.

    Args:
        nbytes: Length of a message.
        device: Where the tensor and its messages lie.

    Attributes:
        message: The latest message, ``uint8`` of length ``nbytes``; whoever puts a longer one in
            its place gets the message at its beginning.
        bound: What was learned and a resumed run should know, on a device a tensor; None for
            nothing.
    """

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self.nbytes = nbytes
        self.message = torch.zeros(nbytes, dtype=torch.uint8, device=device)
        self.bound: Scalar | None = None

    @abstractmethod
    def compress(self, flat: Tensor) -> None:
        """Write the message of a tensor, and leave in it what the message fails to carry.

        With ``decompress_add(message, flat)`` it is whole again. On a device nothing is read.

        Args:
            flat: One-dimensional, float32 or float64; changed in place. Finite, or on a device
                also garbage that makes a message of garbage.
        """

    @abstractmethod
    def decompress_add(self, message: Tensor, out: Tensor, alpha: Scalar = 1.0) -> None:
        """Add ``alpha`` times what a message carries to ``out``, in place."""


class Compressor(ABC):
    """Describes how gradients are compressed.

    Attributes:
        late: Whether most elements wait for many steps until they are sent. What enters the
            residual is then clipped, and not what is sent.
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
        k: Number of elements to send of each bucket, instead of a ratio.

    Raises:
        ValueError: For a ratio outside (0, 1] or a ``k`` below 1; from :meth:`codec` for a ``k``
            above the bucket.

    References:
        Aji and Heafield (2017), *Sparse Communication for Distributed Gradient Descent*.
    """

    late = True

    def __init__(self, ratio: float = 0.01, k: int | None = None) -> None:
        self.ratio = share("ratio", ratio)
        self.k = None if k is None else at_least("k", k, 1)

    def capacity(self, numel: int) -> int:
        """Return how many of ``numel`` elements are sent."""
        if self.k is None:
            return max(round(self.ratio * numel), 1)
        if self.k > numel:
            raise ValueError(
                f"TopK(k={self.k}) asks for more elements than a bucket of {numel} has. Use a "
                "ratio, which fits buckets of every size."
            )
        return self.k

    def codec(self, numel: int, device: torch.device) -> Codec:
        """Return a codec for tensors of ``numel`` elements on ``device``."""
        return SparseCodec(SparseLayout(numel, min(self.capacity(numel), numel)), device)


class Threshold(Compressor):
    """Sends the elements whose magnitude reaches a bound, so that quiet layers send little.

    A hard threshold minimises the total error of a whole run, where Top-K minimises that of each
    step. If more elements reach the bound than a message can carry, the largest are sent.

    Args:
        value: The bound on a gradient summed with its residual; ``"auto"`` takes the magnitude that
            1% of the bucket's elements reach at the first compressed step, and keeps it.
        max_ratio: Share of a bucket's elements that a message can carry. Messages have the length
            for that many, since ranks with shorter ones would first have to tell each other.

    Raises:
        ValueError: For a value that is not above 0, or a ratio outside (0, 1].

    References:
        Sahu, Dutta, Abdelmoniem, Banerjee, Canini and Kalnis (2021), *Rethinking Gradient
        Sparsification as Total Error Minimization*.
    """

    late = True

    def __init__(self, value: float | Literal["auto"] = "auto", max_ratio: float = 0.02) -> None:
        self.value = value if value == "auto" else positive("value", value)
        self.max_ratio = share("max_ratio", max_ratio)

    def codec(self, numel: int, device: torch.device) -> Codec:
        """Return a codec for tensors of ``numel`` elements on ``device``."""
        layout = SparseLayout(numel, max(round(self.max_ratio * numel), 1))
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
        self.bits = one_of("bits", bits, (8, 4))
        self.block = at_least("block", block, 2)
        if block % 2:
            raise ValueError(f"block must be even, got {block}.")

    def codec(self, numel: int, device: torch.device) -> Codec:
        """Return a codec for tensors of ``numel`` elements on ``device``."""
        return QuantizedCodec(QuantizedLayout(numel, self.bits, self.block), device)


class PowerSGD(Compressor):
    """Sends low-rank factors of each matrix. Its exchange is torch's, so that it has no codec.

    Args:
        rank: Of the factors.

    Raises:
        ValueError: For a rank below 1.

    References:
        Vogels, Karimireddy and Jaggi (2019), *PowerSGD: Practical Low-Rank Gradient Compression for
        Distributed Optimization*.
    """

    def __init__(self, rank: int = 1) -> None:
        self.rank = at_least("rank", rank, 1)

    def codec(self, numel: int, device: torch.device) -> Codec:
        """Raise an error: there is none."""
        raise NotImplementedError("PowerSGD works on matrices, and exchanges them by itself.")


class SparseCodec(Codec):
    """The codec of :class:`TopK`."""

    def __init__(self, layout: SparseLayout, device: torch.device) -> None:
        super().__init__(layout.nbytes, device)
        self.layout = layout
        self._selector = Selector(layout.numel)

    def _select(self, flat: Tensor) -> tuple[Tensor, Tensor]:
        if reads_are_free(flat.device):
            return self._selector.top(flat, self.layout.capacity)
        indices = largest_places(flat, self.layout.capacity)
        return indices, flat.index_select(0, indices)

    def compress(self, flat: Tensor) -> None:
        """Write the message of a tensor, and leave in it what the message fails to carry."""
        indices, values = self._select(flat)
        sent = self.layout.write(self.message, indices, values)
        flat.index_add_(0, indices, sent.to(flat.dtype), alpha=-1)

    def decompress_add(self, message: Tensor, out: Tensor, alpha: Scalar = 1.0) -> None:
        """Add ``alpha`` times what a message carries to ``out``, in place."""
        indices, values = self.layout.read(message, alpha)
        out.index_add_(0, indices, values.to(out.dtype))


class ThresholdCodec(SparseCodec):
    """The codec of :class:`Threshold`.

    Args:
        layout: How messages are packed.
        device: Where the tensor lies.
        value: The threshold; None to learn it.
    """

    AUTO_RATIO = 0.01

    def __init__(self, layout: SparseLayout, device: torch.device, value: float | None) -> None:
        super().__init__(layout, device)
        self._value = value
        self._crowded = False

    def _select(self, flat: Tensor) -> tuple[Tensor, Tensor]:
        capacity = self.layout.capacity
        bound = self.bound if self._value is None else self._value
        k = min(max(round(self.AUTO_RATIO * self.layout.numel), 1), capacity)
        if not reads_are_free(flat.device):
            indices, values = super()._select(flat)
            if bound is None:
                bound = self.bound = values.abs().topk(k).values[-1]
            return indices, torch.where(values.abs() >= bound, values, 0.0)
        if bound is None:
            indices, values = self._selector.top(flat, k)
            if len(indices):
                self.bound = values.abs().min().item()  # on a CPU
            return indices, values
        bound = float(bound)
        if not self._crowded:
            indices, values = self._selector.at_least(flat, bound)
            if len(indices) <= capacity:
                return indices, values
        # More elements reach the bound than fit: the largest, until the bound is the higher again.
        indices, values = self._selector.top(flat, capacity)
        above = values.abs() >= bound
        self._crowded = bool(above.all())  # on a CPU
        return indices[above], values[above]


class QuantizedCodec(Codec):
    """The codec of :class:`Quantize`."""

    def __init__(self, layout: QuantizedLayout, device: torch.device) -> None:
        super().__init__(layout.nbytes, device)
        self.layout = layout

    def _blocks(self, flat: Tensor) -> Iterator[tuple[Tensor, slice]]:
        """Yield pieces of a tensor that end where a block does, and the blocks of each."""
        block = self.layout.block
        for chunk in chunks_of(flat, block):
            yield flat[chunk], slice(chunk.start // block, -(-chunk.stop // block))

    def compress(self, flat: Tensor) -> None:
        """Write the message of a tensor, and leave in it what the message fails to carry."""
        block = self.layout.block
        write_count(self.message, self.layout.numel)
        scales, codes = self.layout.sections(self.message)
        for piece, part in self._blocks(flat):
            rows = piece.float()
            if len(rows) % block:
                rows = functional.pad(rows, (0, -len(rows) % block))
            coded, scale = quantize_rows(rows.view(-1, block), self.layout.levels)
            scales[part].copy_(scale)
            if self.layout.bits == 4:
                # 16 * high + low, both moved from [-7, 7] to [1, 15]
                low, high = coded[:, : block // 2], coded[:, block // 2 :]
                codes[part].copy_(low.add(high, alpha=16).add_(136))
            else:
                codes[part].copy_(coded)
            piece.sub_(coded.mul_(scale.unsqueeze(1)).view(-1)[: len(piece)])

    def decompress_add(self, message: Tensor, out: Tensor, alpha: Scalar = 1.0) -> None:
        """Add ``alpha`` times what a message carries to ``out``, in place.

        ``out`` may be shorter than the message tells of; the rest is then left out.
        """
        scales, codes = self.layout.sections(message)
        for piece, part in self._blocks(out):
            coded = codes[part]
            if self.layout.bits == 4:
                coded = torch.cat([coded & 15, coded >> 4], dim=1).to(torch.int8).sub_(8)
            # Not `add_(..., alpha=alpha)`, which may or may not round the product.
            values = coded.float().mul_(scales[part].mul(alpha).unsqueeze(1))
            piece.add_(values.view(-1)[: len(piece)])
