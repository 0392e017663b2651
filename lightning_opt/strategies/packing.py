"""Splits tensors into pieces, checks them, and packs them into messages of bytes.

A message is one ``uint8`` tensor of fixed length, whatever was selected, so that a collective can
be launched without exchanging sizes. It begins with a header of 16 bytes: the number of elements
(int32), a flag (int32) and 8 bytes for alignment. On a device a sparse message is always full,
padded with zeros, so that it can be decoded without reading the number of elements.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lightning_opt.core.modules.sharding import reads_are_free
from lightning_opt.core.numerics.scalars import Scalar

CHUNK_SIZE = 2**17
"""Elements per piece on a CPU: 0.5 MB of float32, which fit the cache of a core with the results of
a few calls."""

HEADER_BYTES = 16

NARROW_BLOCK, WIDE_BLOCK = 255, 32_767
"""Elements per index block, whose count and offsets fit a uint8 or an int16."""

GROUP_SIZE = 128
"""Selected values that share one scale when they are sent as int8."""


def chunks_of(flat: Tensor, multiple: int = 1, *, whole: bool = False) -> list[slice]:
    """Return slices that fit a CPU's cache, at least one; on an accelerator, one slice.

    Args:
        flat: One-dimensional.
        multiple: All slices but the last have a multiple of this length.
        whole: Return as few slices as this allows, one or two.
    """
    if not reads_are_free(flat.device):
        return [slice(0, len(flat))]
    size = max((len(flat) if whole else CHUNK_SIZE) // multiple, 1) * multiple
    return [
        slice(start, min(start + size, len(flat))) for start in range(0, max(len(flat), 1), size)
    ]


def is_finite(values: Tensor) -> Tensor:
    """Return whether all elements of a one-dimensional tensor are finite, as a tensor."""
    # `aminmax` is the cheapest pass on a CPU. A NaN makes both results NaN.
    low, high = (values if len(values) else values.new_zeros(1)).aminmax()
    return low.isfinite() & high.isfinite()


def read_count(message: Tensor) -> int:
    """Return the number of elements in a message. Waits for the device."""
    return int(message[:4].view(torch.int32))


def write_count(message: Tensor, count: int | Tensor) -> None:
    message[:4].view(torch.int32).fill_(count)


def write_flag(messages: Tensor, flag: bool | Tensor) -> None:
    """Write the flag of a message, or of several in rows: whether a gradient is not finite."""
    messages[..., 4:8].view(torch.int32).fill_(flag)


def any_flag(messages: Tensor) -> Tensor:
    """Return whether the flag of a message, or of any of several in rows, is set."""
    return messages[..., 4:8].any()


def scales_of(largest: Tensor, levels: int) -> tuple[Tensor, Tensor]:
    """Return the scales that turn codes into values, and the factors that turn values into codes.

    Args:
        largest: The largest magnitude of each row, float32.
        levels: The largest code.

    Returns:
        Two tensors of the same shape. A row whose scale would be subnormal has the factor 0.
    """
    scales = largest / levels
    normal = scales >= torch.finfo(torch.float32).tiny
    return scales, torch.where(normal, scales.reciprocal(), 0.0)


class Layout:
    """Offsets of the sections of a message: one after the other, each aligned for its dtype.

    Args:
        *parts: The dtype and the shape of each section.

    Attributes:
        nbytes: Length of a message, a multiple of 8, so that the next message is aligned too.
    """

    def __init__(self, *parts: tuple[torch.dtype, tuple[int, ...]]) -> None:
        self._parts: list[tuple[torch.dtype, tuple[int, ...], slice]] = []
        end = HEADER_BYTES
        for dtype, shape in parts:
            start = -(-end // 4) * 4  # the widest dtype has 4 bytes
            end = start + math.prod(shape) * dtype.itemsize
            self._parts.append((dtype, shape, slice(start, end)))
        self.nbytes = -(-end // 8) * 8

    def sections(self, message: Tensor) -> list[Tensor]:
        return [message[where].view(dtype).view(shape) for dtype, shape, where in self._parts]


class SparseLayout(Layout):
    """Layout of a sparse message: scales, values, counts and offsets.

    Indices are encoded in blocks: the number of sent elements per block of the tensor, then each
    element's offset within its block. At 1% that takes 1.4 bytes per element. With its int8 value
    and its share of a float32 scale for every 128 values, an element takes 2.4 bytes.

    Args:
        numel: Elements of the tensor.
        capacity: Maximum elements of a message.
    """

    def __init__(self, numel: int, capacity: int) -> None:
        self.numel, self.capacity = numel, capacity
        narrow = -(-numel // NARROW_BLOCK) + capacity
        wide = 2 * (-(-numel // WIDE_BLOCK) + capacity)
        # Use the block size that takes fewer bytes.
        self.block, index = NARROW_BLOCK, torch.uint8
        if wide < narrow:
            self.block, index = WIDE_BLOCK, torch.int16
        self.blocks = -(-numel // self.block)
        super().__init__(
            (torch.float32, (-(-capacity // GROUP_SIZE),)),
            (torch.int8, (capacity,)),
            (index, (self.blocks,)),
            (index, (capacity,)),
        )

    def write(self, message: Tensor, indices: Tensor, values: Tensor) -> Tensor:
        """Write a message.

        Args:
            message: ``uint8`` of length ``nbytes``.
            indices: int64 in ascending order, at most ``capacity``; exactly as many on a device.
            values: The elements at these indices.

        Returns:
            The decoded values of these elements, float32.
        """
        count = indices.numel()
        scales, codes, counts, offsets = self.sections(message)
        blocks = indices.div(self.block, rounding_mode="floor")
        # Not bincount, which reads the largest index from the device.
        ones = torch.ones_like(blocks, dtype=torch.int32)
        counts.copy_(ones.new_zeros(self.blocks).index_add_(0, blocks, ones))
        offsets[:count].copy_(indices - blocks * self.block)
        write_count(message, values.count_nonzero())
        groups = -(-count // GROUP_SIZE)
        rows = values.new_zeros(groups * GROUP_SIZE, dtype=torch.float32)
        rows[:count].copy_(values)
        rows = rows.view(groups, GROUP_SIZE)
        scale, factor = scales_of(rows.abs().amax(dim=1, keepdim=True), 127)
        coded = rows.mul_(factor).round_()
        codes[:count].copy_(coded.view(-1)[:count])
        scales[:groups].copy_(scale.view(-1))
        return coded.mul_(scale).view(-1)[:count]

    def read(self, message: Tensor, alpha: Scalar = 1.0) -> tuple[Tensor, Tensor]:
        """Return the indices (int64, ascending) and ``alpha`` times the values (float32)."""
        count = read_count(message) if reads_are_free(message.device) else self.capacity
        if count == 0:  # the other sections are from an earlier message
            nothing = torch.empty(0, dtype=torch.int64, device=message.device)
            return nothing, nothing.float()
        scales, codes, counts, offsets = self.sections(message)
        starts = torch.arange(0, self.blocks * self.block, self.block, device=message.device)
        indices = starts.repeat_interleave(counts.to(torch.int64), output_size=count)
        indices += offsets[:count]
        values = codes[:count].float()
        values *= (scales * alpha).unsqueeze(1).expand(-1, GROUP_SIZE).reshape(-1)[:count]
        return indices, values
