"""Passes over a large flat tensor in pieces that stay in the processor's cache."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

CHUNK = 131_072
"""Elements a piece on a CPU: half a megabyte of float32, which an L2 cache holds with its mask."""


PIECE = 2_097_152
"""Elements that travel together on a CPU: while one piece is on its way, the next is coded."""

LEAST_PIECE = 262_144
"""Elements of a shard's piece, at least: the more ranks there are, the smaller are messages."""


class NonFiniteGradientError(ArithmeticError):
    """A gradient holds a NaN or an infinity, so that it must not be kept for later."""


def chunk_size(numel: int, device: torch.device, size: int = CHUNK) -> int:
    """Return how many elements to treat at a time: all of them on an accelerator."""
    return min(size, numel) if device.type == "cpu" else numel


def cut(numel: int, size: int) -> list[slice]:
    """Return where pieces of ``size`` elements begin and end; one of nothing, for no elements."""
    return [
        slice(start, min(start + size, numel)) for start in range(0, max(numel, 1), max(size, 1))
    ]


def add_in_chunks(
    flat: Tensor, increment: Tensor | None, alpha: float = 1.0, size: int = CHUNK
) -> Iterator[tuple[int, Tensor]]:
    """Add ``alpha * increment`` to ``flat`` in place, and yield it piece by piece while it is hot.

    Args:
        flat: One-dimensional, float32 or float64.
        increment: As long as ``flat``, of any floating dtype; None to add nothing.
        alpha: What the increment is multiplied with.
        size: Elements a piece on a CPU; an accelerator takes all at once.

    Yields:
        Where a piece begins, and the piece, a view of ``flat``.

    Raises:
        NonFiniteGradientError: If the increment holds a NaN or an infinity. What has been added is
            taken back, so that ``flat`` is as before, but for rounding.
    """
    numel = flat.numel()
    size = max(chunk_size(numel, flat.device, size), 1)
    for start in range(0, numel, size):
        piece = flat[start : start + size]
        if increment is not None:
            part = increment[start : start + size]
            if not is_finite(part):
                flat[:start].sub_(increment[:start], alpha=alpha)
                raise NonFiniteGradientError
            piece.add_(part, alpha=alpha)
        yield start, piece


def is_finite(values: Tensor) -> bool:
    """Return whether no element of a one-dimensional tensor is NaN or infinite.

    Waits for the device: what is not finite must not be added, nor sent.
    """
    # The sum of squares is the cheapest pass that a NaN or an infinity cannot leave finite. It may
    # overflow on its own, which is then looked at closely.
    if values.dtype is torch.float32:
        squares = torch.dot(values, values).item()
    else:
        wide = torch.promote_types(values.dtype, torch.float32)
        squares = torch.linalg.vector_norm(values, dtype=wide).item()
    return math.isfinite(squares) or bool(values.isfinite().all())
