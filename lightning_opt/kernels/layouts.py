"""Memory layouts of tensors."""

from __future__ import annotations

from torch import Tensor, empty_like, empty_strided


def with_strides(tensor: Tensor, strides: tuple[int, ...]) -> Tensor:
    """Return a copy of ``tensor`` with ``strides``, or ``tensor`` itself if it has them."""
    if tensor.stride() == strides:
        return tensor
    copy = empty_strided(tensor.size(), strides, dtype=tensor.dtype, device=tensor.device)
    return copy.copy_(tensor.detach())


def same_layout(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors of the same shape store their values in the same order."""
    if a.stride() == b.stride():
        return True
    axes = zip(a.shape, a.stride(), b.stride(), strict=True)
    return all(size == 1 or stride_a == stride_b for size, stride_a, stride_b in axes)


def is_dense(tensor: Tensor) -> bool:
    """Return whether the values fill their memory without gaps or overlaps, in any order."""
    # `empty_like` keeps the memory order only of such tensors.
    return same_layout(empty_like(tensor.detach(), device="meta"), tensor)
