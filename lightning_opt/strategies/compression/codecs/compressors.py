"""Compressors: from a flat gradient to a message of few bytes, and back.

A :class:`Compressor` is a description that can be written in a YAML file and pickled. Its
:meth:`~Compressor.codec` is what compresses one bucket, step after step, with buffers of its own.
Neither knows of process groups.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from lightning_opt.core.arguments import at_least, one_of, positive, share
from lightning_opt.strategies.compression.codecs import native
from lightning_opt.strategies.compression.codecs.chunks import (
    CHUNK,
    NonFiniteGradientError,
    add_in_chunks,
    chunk_size,
)
from lightning_opt.strategies.compression.codecs.packing import (
    NON_FINITE,
    QuantizedLayout,
    SparseLayout,
    quantize_rows,
    read_header,
    write_header,
)
from lightning_opt.strategies.compression.codecs.selection import Selector


class Codec(ABC):
    """Compresses one flat tensor, step after step, into one message.

    Args:
        nbytes: Length of a message.
        device: Where the tensor and its messages lie.

    Attributes:
        message: The latest message, ``uint8`` of length ``nbytes``.
    """

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self.nbytes = nbytes
        self.message = torch.zeros(nbytes, dtype=torch.uint8, device=device)

    def compress(self, flat: Tensor, increment: Tensor | None = None, alpha: float = 1.0) -> bool:
        """Add ``alpha * increment`` to ``flat``, write the sum's message, and leave the rest.

        ``flat`` ends up holding what the message fails to carry of the sum. With
        ``decompress_add(message, flat)`` it is the whole sum again.

        Args:
            flat: One-dimensional, float32 or float64.
            increment: As long as ``flat``, of any floating dtype; None to compress ``flat`` as it
                is, which must then be finite.
            alpha: What the increment is multiplied with.

        Returns:
            Whether the increment was finite. If not, ``flat`` is as before (but for rounding), and
            the message is empty and flagged.
        """
        try:
            self._compress(flat, increment, alpha)
        except NonFiniteGradientError:
            write_header(self.message, 0, NON_FINITE)
            return False
        return True

    @abstractmethod
    def _compress(self, flat: Tensor, increment: Tensor | None, alpha: float) -> None: ...

    @abstractmethod
    def decompress_add(self, message: Tensor, out: Tensor, alpha: float = 1.0) -> None:
        """Add ``alpha`` times what a message carries to ``out``, in place."""

    def decompress_sum(
        self, messages: Tensor, out: Tensor, alpha: float = 1.0, *, overwrite: bool = True
    ) -> None:
        """Set ``out`` to ``alpha`` times what several messages carry.

        Args:
            messages: Shape ``(n, nbytes)``; they are added in order, one after the other, so that
                all who hold them get the same bits.
            out: Where to put the sum.
            alpha: What it is multiplied with.
            overwrite: Forget what ``out`` holds, instead of adding to it.
        """
        if overwrite:
            out.zero_()
        for message in messages:
            self.decompress_add(message, out, alpha)

    def clear_sent(self, flat: Tensor) -> None:
        """Set to zero the elements of ``flat`` that the latest message selected.

        Where every element is sent there is no selection, and nothing changes.
        """


class Compressor(ABC):
    """Describes how gradients are compressed."""

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
        values: ``"int8"`` with a scale for every 128 values (2.4 bytes an element at 1%), or
            ``"bf16"`` (3.4 bytes).

    Raises:
        ValueError: For a ratio outside (0, 1], a ``k`` below 1 or other values; from
            :meth:`codec` for a ``k`` above the bucket.

    References:
        Aji and Heafield (2017), *Sparse Communication for Distributed Gradient Descent*.
    """

    def __init__(
        self, ratio: float = 0.01, k: int | None = None, values: Literal["int8", "bf16"] = "int8"
    ) -> None:
        self.ratio = share("ratio", ratio)
        self.k = None if k is None else at_least("k", k, 1)
        self.values = one_of("values", values, ("int8", "bf16"))

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
        return SparseCodec(SparseLayout(numel, self.capacity(numel), self.values), device)


class Threshold(Compressor):
    """Sends the elements whose magnitude reaches a bound, so that quiet layers send little.

    A hard threshold minimises the total error of a whole run, where Top-K minimises that of each
    step. If more elements reach the bound than a message can carry, the largest are sent.

    Args:
        value: The bound on a gradient summed with its residual; ``"auto"`` takes the magnitude that
            1% of the bucket's elements reach at the first compressed step, and keeps it.
        max_ratio: Share of a bucket's elements that a message can carry. Messages have the length
            for that many, since ranks with shorter ones would first have to tell each other.
        values: As for :class:`TopK`.

    Raises:
        ValueError: For a value that is not above 0, or a ratio outside (0, 1].

    References:
        Sahu, Dutta, Abdelmoniem, Banerjee, Canini and Kalnis (2021), *Rethinking Gradient
        Sparsification as Total Error Minimization*.
    """

    def __init__(
        self,
        value: float | Literal["auto"] = "auto",
        max_ratio: float = 0.02,
        values: Literal["int8", "bf16"] = "int8",
    ) -> None:
        self.value = value if value == "auto" else positive("value", value)
        self.max_ratio = share("max_ratio", max_ratio)
        self.values = one_of("values", values, ("int8", "bf16"))

    def codec(self, numel: int, device: torch.device) -> Codec:
        """Return a codec for tensors of ``numel`` elements on ``device``."""
        layout = SparseLayout(numel, max(round(self.max_ratio * numel), 1), self.values)
        return ThresholdCodec(layout, device, None if self.value == "auto" else self.value)


class Quantize(Compressor):
    """Sends every element in few bits, with one float32 scale for each block.

    Args:
        bits: 8 or 4.
        block: Elements that share a scale, even.
        stochastic: Round up or down at random, right on average, instead of to the nearest. Error
            feedback makes it unnecessary.

    Raises:
        ValueError: For other bits, or a block that is odd or below 2.
    """

    def __init__(
        self, bits: Literal[4, 8] = 8, block: int = 1024, stochastic: bool = False
    ) -> None:
        self.bits = one_of("bits", bits, (8, 4))
        self.block = at_least("block", block, 2)
        if block % 2:
            raise ValueError(f"block must be even, got {block}.")
        self.stochastic = stochastic

    def codec(self, numel: int, device: torch.device) -> Codec:
        """Return a codec for tensors of ``numel`` elements on ``device``."""
        return QuantizedCodec(
            QuantizedLayout(numel, self.bits, self.block), device, self.stochastic
        )


class SparseCodec(Codec):
    """The codec of :class:`TopK`."""

    def __init__(self, layout: SparseLayout, device: torch.device) -> None:
        super().__init__(layout.nbytes, device)
        self.layout = layout
        self._selector = Selector(layout.numel, device)
        self._kernels = native.kernels(device)

    def _select(
        self, flat: Tensor, increment: Tensor | None, alpha: float
    ) -> tuple[Tensor, Tensor]:
        return self._selector.top(flat, self.layout.capacity, increment, alpha)

    def _compress(self, flat: Tensor, increment: Tensor | None, alpha: float) -> None:
        indices, values = self._select(flat, increment, alpha)
        if self._kernels is not None and native.fits(flat):
            self._kernels.sparse_write(self.layout, self.message, indices, values, flat)
        else:
            flat[indices] = values - self.layout.write(self.message, indices, values)

    def decompress_add(self, message: Tensor, out: Tensor, alpha: float = 1.0) -> None:
        """Add ``alpha`` times what a message carries to ``out``, in place."""
        if self._kernels is not None and native.fits(out):
            self._kernels.sparse_add(self.layout, message.unsqueeze(0), out, alpha, overwrite=False)
        else:
            indices, values = self.layout.read(message, alpha)
            out.index_add_(0, indices, values.to(out.dtype))

    def decompress_sum(
        self, messages: Tensor, out: Tensor, alpha: float = 1.0, *, overwrite: bool = True
    ) -> None:
        """Set ``out`` to ``alpha`` times what several messages carry; see :class:`Codec`."""
        if self._kernels is not None and native.fits(out):
            self._kernels.sparse_add(self.layout, messages, out, alpha, overwrite=overwrite)
        else:
            super().decompress_sum(messages, out, alpha, overwrite=overwrite)

    def clear_sent(self, flat: Tensor) -> None:
        """Set to zero the elements of ``flat`` that the latest message selected."""
        flat[self.layout.read(self.message)[0]] = 0.0


class ThresholdCodec(SparseCodec):
    """The codec of :class:`Threshold`.

    Args:
        layout: How messages are packed.
        device: Where the tensor lies.
        bound: The threshold; None to learn it.
    """

    AUTO_RATIO = 0.01

    def __init__(self, layout: SparseLayout, device: torch.device, bound: float | None) -> None:
        super().__init__(layout, device)
        self.bound = bound
        self._crowded = False

    def _select(
        self, flat: Tensor, increment: Tensor | None, alpha: float
    ) -> tuple[Tensor, Tensor]:
        capacity = self.layout.capacity
        if self.bound is None:
            k = min(max(round(self.AUTO_RATIO * self.layout.numel), 1), capacity)
            indices, values = self._selector.top(flat, k, increment, alpha)
            if len(indices):
                # Waits for the device, once in a run: from then on the bound is known.
                self.bound = values.abs().min().item()
            return indices, values
        if not self._crowded:
            indices, values = self._selector.at_least(flat, self.bound, increment, alpha)
            if len(indices) <= capacity:
                return indices, values
            self._crowded, increment = True, None
        # More elements reach the bound than fit: the largest, until the bound is the higher again.
        indices, values = self._selector.top(flat, capacity, increment, alpha)
        above = values.abs() >= self.bound
        # Waits for the device: what the next step does depends on it.
        self._crowded = bool(above.all())
        return indices[above], values[above]


class QuantizedCodec(Codec):
    """The codec of :class:`Quantize`."""

    def __init__(self, layout: QuantizedLayout, device: torch.device, stochastic: bool) -> None:
        super().__init__(layout.nbytes, device)
        self.layout = layout
        self.stochastic = stochastic
        self._kernels = native.kernels(device)
        # Of its own, since other threads draw from torch's at the same time.
        self._generator = torch.Generator(device)
        if stochastic:
            self._generator.manual_seed(int(torch.randint(2**62, ())))

        # Pieces end where a block does.
        self._piece = max(CHUNK // layout.block, 1) * layout.block

    def _compress(self, flat: Tensor, increment: Tensor | None, alpha: float) -> None:
        write_header(self.message, self.layout.numel)
        done = 0
        try:
            if self._kernels is not None and not self.stochastic and native.fits(flat, increment):
                done = self._kernels.quantize(self.layout, self.message, flat, increment, alpha)
                if done < 0:
                    assert increment is not None
                    done = -1 - done
                    flat[:done].sub_(increment[:done], alpha=alpha)
                    raise NonFiniteGradientError
            else:
                scratch = self._scratch(flat.numel(), flat.device)
                for start, piece in add_in_chunks(flat, increment, alpha, self._piece):
                    self._quantize(start, piece, scratch)
                    done = start + piece.numel()
        except NonFiniteGradientError:
            self.decompress_add(self.message, flat[:done])
            raise

    def _scratch(self, numel: int, device: torch.device) -> Tensor:
        """Return room for one piece. It is not kept, since there may be many codecs."""
        blocks = -(-chunk_size(numel, device, self._piece) // self.layout.block)
        return torch.empty(blocks * self.layout.block, device=device)

    def _quantize(self, start: int, piece: Tensor, scratch: Tensor) -> None:
        """Write the part of the message for a piece, and take off the piece what it carries."""
        block = self.layout.block
        scales, codes = self.layout.sections(self.message)
        rows = functional.pad(piece.float(), (0, -piece.numel() % block)).view(-1, block)
        uniform = None
        if self.stochastic:
            uniform = torch.rand(rows.shape, generator=self._generator, device=rows.device)
        room = scratch[: rows.numel()].view(-1, block)
        coded, scale = quantize_rows(rows, self.layout.levels, uniform, out=room)
        part = slice(start // block, start // block + len(rows))
        scales[part].copy_(scale)
        if self.layout.bits == 4:
            # 16 * high + low, both moved from [-7, 7] to [1, 15]
            low, high = coded[:, : block // 2], coded[:, block // 2 :]
            codes[part].copy_(low.add(high, alpha=16).add_(136))
        else:
            codes[part].copy_(coded)
        piece.sub_(coded.mul_(scale.unsqueeze(1)).view(-1)[: piece.numel()])

    def decompress_add(self, message: Tensor, out: Tensor, alpha: float = 1.0) -> None:
        """Add ``alpha`` times what a message carries to ``out``, in place.

        ``out`` may be shorter than the message tells of; the rest is then left out.
        """
        if self._kernels is not None and native.fits(out):
            rows = message.unsqueeze(0)
            self._kernels.quantized_add(self.layout, rows, out, alpha, overwrite=False)
            return
        if read_header(message)[0] == 0:
            return
        block = self.layout.block
        scratch = self._scratch(out.numel(), out.device)
        scales, codes = self.layout.sections(message)
        for start in range(0, out.numel(), self._piece):
            piece = out[start : start + self._piece]
            first, last = start // block, -(-(start + piece.numel()) // block)
            part = codes[first:last]
            if self.layout.bits == 4:
                part = torch.cat([part & 15, part >> 4], dim=1).to(torch.int8).sub_(8)
            room = scratch[: part.numel()].view(-1, block)
            # Not `add_(room, alpha=alpha)`, which may or may not round the product.
            room.copy_(part).mul_(scales[first:last].mul(alpha).unsqueeze(1))
            piece.add_(room.view(-1)[: piece.numel()])

    def decompress_sum(
        self, messages: Tensor, out: Tensor, alpha: float = 1.0, *, overwrite: bool = True
    ) -> None:
        """Set ``out`` to ``alpha`` times what several messages carry; see :class:`Codec`."""
        if self._kernels is not None and native.fits(out):
            self._kernels.quantized_add(self.layout, messages, out, alpha, overwrite=overwrite)
        else:
            super().decompress_sum(messages, out, alpha, overwrite=overwrite)
