"""Large flat tensors in pieces that stay in the processor's cache."""

from __future__ import annotations

from torch import Tensor

from lightning_opt.core.modules.sharding import reads_are_free

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
    size = max(CHUNK // multiple, 1) * multiple if reads_are_free(flat.device) else flat.numel()
    return cut(flat.numel(), size)


def is_finite(values: Tensor) -> Tensor:
    """Return whether no element of a one-dimensional tensor is NaN or infinite, without a read."""
    # On a CPU the cheapest pass; a NaN is in both.
    low, high = (values if len(values) else values.new_zeros(1)).aminmax()
    return low.isfinite() & high.isfinite()
