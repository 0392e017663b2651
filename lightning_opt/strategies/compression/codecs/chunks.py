"""Large flat tensors in pieces that stay in the processor's cache."""

from __future__ import annotations

import math

import torch
from torch import Tensor

CHUNK = 131_072
"""Elements a piece on a CPU: half a megabyte of float32, which an L2 cache holds with its mask."""


def cut(numel: int, size: int) -> list[slice]:
    """Return where pieces of ``size`` elements begin and end; one of nothing, for no elements."""
    return [
        slice(start, min(start + size, numel)) for start in range(0, max(numel, 1), max(size, 1))
    ]


def chunks_of(flat: Tensor, multiple: int = 1) -> list[slice]:
    """Return the pieces in which to treat a tensor; an accelerator takes all at once.

    Args:
        flat: One-dimensional.
        multiple: What the length of a piece is a multiple of.
    """
    size = max(CHUNK // multiple, 1) * multiple if flat.device.type == "cpu" else flat.numel()
    return cut(flat.numel(), size)


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
