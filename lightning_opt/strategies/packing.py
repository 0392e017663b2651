"""How a compressed gradient lies in bytes: pure functions and the two layouts.

A message is one ``uint8`` tensor of a fixed length, whatever was selected, so that a collective can
be launched without asking the other ranks for sizes. It begins with a header of 16 bytes: the
number of elements it carries (int32), a flag (int32) and 8 bytes that are kept for alignment.
Nothing here reads from a device: there a sparse message is always full, of zeros if need be.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from lightning_opt.core.scalars import Scalar
from lightning_opt.core.sharding import wants_host

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
    """Return whether one of several messages, in rows, is flagged."""
    return messages[:, 4:8].any()


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


@dataclass(frozen=True)
class SparseLayout:
    """Where the parts of a sparse message lie.

    Indices are coded in blocks: for each block of the tensor how many of its elements are sent,
    then each element's offset within its block. At 1% that takes 1.4 bytes an element; beside its
    int8 value and its share of a float32 scale for every 128 values, an element takes 2.4 bytes.

    Args:
        numel: Elements of the tensor.
        capacity: Elements that a message can carry.
    """

    numel: int
    capacity: int

    @cached_property
    def block(self) -> int:
        """Elements an index block, whichever size takes fewer bytes."""
        narrow = -(-self.numel // NARROW) + self.capacity
        wide = 2 * (-(-self.numel // WIDE) + self.capacity)
        return NARROW if narrow <= wide else WIDE

    @cached_property
    def blocks(self) -> int:
        """How many index blocks there are."""
        return -(-self.numel // self.block)

    @cached_property
    def _parts(self) -> list[tuple[torch.dtype, int, int]]:
        """Dtype, first byte and end of scales, values, counts and offsets."""
        index = torch.uint8 if self.block == NARROW else torch.int16
        parts, start = [], HEADER
        for dtype, length in (
            (torch.float32, -(-self.capacity // GROUP)),
            (torch.int8, self.capacity),
            (index, self.blocks),
            (index, self.capacity),
        ):
            end = start + length * dtype.itemsize
            parts.append((dtype, start, end))
            start = -(-end // 8) * 8  # so that every part is aligned for its dtype
        return parts

    @cached_property
    def nbytes(self) -> int:
        """Length of a message."""
        return -(-self._parts[-1][2] // 8) * 8

    def _sections(self, message: Tensor) -> list[Tensor]:
        """Return scales, values, counts and offsets as typed views of a message."""
        return [message[start:end].view(dtype) for dtype, start, end in self._parts]

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
        scales, codes, counts, offsets = self._sections(message)
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
        count = read_count(message) if wants_host(message.device) else self.capacity
        if count == 0:  # the rest is whatever was there before
            nothing = torch.empty(0, dtype=torch.int64, device=message.device)
            return nothing, nothing.float()
        scales, codes, counts, offsets = self._sections(message)
        starts = torch.arange(0, self.blocks * self.block, self.block, device=message.device)
        indices = starts.repeat_interleave(counts.to(torch.int64), output_size=count)
        indices += offsets[:count]
        values = codes[:count].float()
        values *= (scales * alpha).unsqueeze(1).expand(-1, GROUP).reshape(-1)[:count]
        return indices, values


@dataclass(frozen=True)
class QuantizedLayout:
    """Where the parts of a quantised message lie: one float32 scale a block, and every code.

    Args:
        numel: Elements of the tensor.
        bits: 8 or 4; of 4 bits, two codes share a byte.
        block: Elements that share a scale; even.
    """

    numel: int
    bits: int
    block: int

    @property
    def levels(self) -> int:
        """The largest code."""
        return 127 if self.bits == 8 else 7

    @property
    def blocks(self) -> int:
        """How many scales there are."""
        return -(-self.numel // self.block)

    @property
    def nbytes(self) -> int:
        """Length of a message; the last block is sent whole, and the next message is aligned."""
        return -(-self._end // 8) * 8

    @property
    def _end(self) -> int:
        return HEADER + 4 * self.blocks + self.blocks * self.block * self.bits // 8

    def sections(self, message: Tensor) -> tuple[Tensor, Tensor]:
        """Return the scales, and the codes with one row a block: int8, or uint8 with two codes."""
        middle = HEADER + 4 * self.blocks
        codes = message[middle : self._end].view(self.blocks, self.block * self.bits // 8)
        return message[HEADER:middle].view(torch.float32), (
            codes.view(torch.int8) if self.bits == 8 else codes
        )
