"""How a compressed gradient lies in bytes: pure functions and the layouts.

A message is one ``uint8`` tensor of a fixed length, whatever was selected, so that a collective can
be launched without asking the other ranks for sizes. It begins with a header of 16 bytes: the
number of elements it carries (int32), a flag (int32) and 8 bytes that are kept for alignment.
Nothing here reads from a device: there a sparse message is always full, of zeros if need be.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lightning_opt.core.modules.sharding import reads_are_free
from lightning_opt.core.numerics.scalars import Scalar

HEADER = 16

NARROW, WIDE = 255, 32_767
"""Elements an index block: its count and the offsets within fit a uint8, or an int16."""

GROUP = 128
"""Selected values that share one scale when they are sent as int8."""


def read_count(message: Tensor) -> int:
    """Return how many elements a message carries. Waits for the device."""
    return int(message[:4].view(torch.int32))


def write_count(message: Tensor, count: int | Tensor) -> None:
    """Write how many elements a message carries."""
    message[:4].view(torch.int32).fill_(count)


def write_flag(message: Tensor, flag: bool | Tensor) -> None:
    """Write whether the rank's gradient is not finite."""
    message[4:8].view(torch.int32).fill_(flag)


def any_flag(messages: Tensor) -> Tensor:
    """Return whether a message, or one of several in rows, is flagged."""
    return messages[..., 4:8].any()


def quantize_rows(rows: Tensor, levels: int) -> tuple[Tensor, Tensor]:
    """Round each row to whole multiples of a scale of its own.

    Args:
        rows: Shape ``(r, c)``, float32.
        levels: The largest code; the scale is the row's largest magnitude divided by it.

    Returns:
        Codes as float32 of shape ``(r, c)``, from ``-levels`` to ``levels``, and the float32 scales
        of shape ``(r,)``. A row so small that its scale would be subnormal gets codes of 0.
    """
    scales = rows.abs().amax(dim=1).div_(levels)
    normal = scales >= torch.finfo(torch.float32).tiny
    inverse = torch.where(normal, scales.reciprocal(), 0.0).unsqueeze(1)
    return rows.mul(inverse).round_(), scales


class Layout:
    """Where the parts of a message lie: one after the other, each aligned for its dtype.

    Args:
        *parts: The dtype and the shape of each.

    Attributes:
        nbytes: Length of a message, such that the next one is aligned too.
    """

    def __init__(self, *parts: tuple[torch.dtype, tuple[int, ...]]) -> None:
        self._parts: list[tuple[torch.dtype, tuple[int, ...], slice]] = []
        end = HEADER
        for dtype, shape in parts:
            start = -(-end // 4) * 4  # no dtype here is wider
            end = start + math.prod(shape) * dtype.itemsize
            self._parts.append((dtype, shape, slice(start, end)))
        self.nbytes = -(-end // 8) * 8

    def sections(self, message: Tensor) -> list[Tensor]:
        """Return the parts as typed views of a message."""
        return [message[where].view(dtype).view(shape) for dtype, shape, where in self._parts]


class SparseLayout(Layout):
    """Scales, values, counts and offsets of a sparse message.

    Indices are coded in blocks: for each block of the tensor how many of its elements are sent,
    then each element's offset within its block. At 1% that takes 1.4 bytes an element; beside its
    int8 value and its share of a float32 scale for every 128 values, an element takes 2.4 bytes.

    Args:
        numel: Elements of the tensor.
        capacity: Elements that a message can carry.
    """

    def __init__(self, numel: int, capacity: int) -> None:
        self.numel, self.capacity = numel, capacity
        narrow = -(-numel // NARROW) + capacity
        wide = 2 * (-(-numel // WIDE) + capacity)
        # Whichever takes fewer bytes.
        self.block, index = (NARROW, torch.uint8) if narrow <= wide else (WIDE, torch.int16)
        self.blocks = -(-numel // self.block)
        super().__init__(
            (torch.float32, (-(-capacity // GROUP),)),
            (torch.int8, (capacity,)),
            (index, (self.blocks,)),
            (index, (capacity,)),
        )

    def write(self, message: Tensor, indices: Tensor, values: Tensor) -> Tensor:
        """Write a message.

        Args:
            message: ``uint8`` of length ``nbytes``.
            indices: int64 in ascending order, at most ``capacity`` of them; as many on a device.
            values: The elements at these places.

        Returns:
            What the message gives for these elements, as float32.
        """
        count = indices.numel()
        scales, codes, counts, offsets = self.sections(message)
        blocks = indices.div(self.block, rounding_mode="floor")
        # Not bincount, which asks the device for the largest of them.
        ones = torch.ones_like(blocks, dtype=torch.int32)
        counts.copy_(ones.new_zeros(self.blocks).index_add_(0, blocks, ones))
        offsets[:count].copy_(indices - blocks * self.block)
        write_count(message, values.count_nonzero())
        groups = -(-count // GROUP)
        rows = values.new_zeros(groups * GROUP, dtype=torch.float32)
        rows[:count].copy_(values)
        coded, scale = quantize_rows(rows.view(groups, GROUP), 127)
        codes[:count].copy_(coded.view(-1)[:count])
        scales[:groups].copy_(scale)
        return coded.mul_(scale.unsqueeze(1)).view(-1)[:count]

    def read(self, message: Tensor, alpha: Scalar = 1.0) -> tuple[Tensor, Tensor]:
        """Return the indices (int64, ascending) and ``alpha`` times the values (float32)."""
        count = read_count(message) if reads_are_free(message.device) else self.capacity
        if count == 0:  # the rest is whatever was there before
            nothing = torch.empty(0, dtype=torch.int64, device=message.device)
            return nothing, nothing.float()
        scales, codes, counts, offsets = self.sections(message)
        starts = torch.arange(0, self.blocks * self.block, self.block, device=message.device)
        indices = starts.repeat_interleave(counts.to(torch.int64), output_size=count)
        indices += offsets[:count]
        values = codes[:count].float()
        values *= (scales * alpha).unsqueeze(1).expand(-1, GROUP).reshape(-1)[:count]
        return indices, values


class QuantizedLayout(Layout):
    """One float32 scale a block, and the codes with one row a block: int8, or uint8 with two codes.

    The last block is sent whole.

    Args:
        numel: Elements of the tensor.
        bits: 8 or 4; of 4 bits, two codes share a byte.
        block: Elements that share a scale; even.

    Attributes:
        levels: The largest code.
    """

    def __init__(self, numel: int, bits: int, block: int) -> None:
        self.numel, self.bits, self.block = numel, bits, block
        self.levels, code = (127, torch.int8) if bits == 8 else (7, torch.uint8)
        blocks = -(-numel // block)
        super().__init__((torch.float32, (blocks,)), (code, (blocks, block * bits // 8)))
