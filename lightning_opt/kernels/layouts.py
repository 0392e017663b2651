"""Memory layouts of tensors."""

from __future__ import annotations

from torch import Tensor, empty_strided


def laid_out(tensor: Tensor, strides: tuple[int, ...]) -> Tensor:
    """Return a copy of ``tensor`` with ``strides``, or the tensor itself if it has them."""
    if tensor.stride() == strides:
        return tensor
    copy = empty_strided(tensor.size(), strides, dtype=tensor.dtype, device=tensor.device)
    return copy.copy_(tensor.detach())


def same_layout(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors of one shape have the same memory order."""
    if a.stride() == b.stride():
        return True
    steps = zip(a.shape, a.stride(), b.stride(), strict=True)
    return all(size == 1 or one == other for size, one, other in steps)


def is_dense(tensor: Tensor) -> bool:
    """Return whether the values fill their memory without gaps or overlaps, in any order."""
    expected = 1
    steps = zip(tensor.stride(), tensor.shape, strict=True)
    for stride, size in sorted(pair for pair in steps if pair[1] != 1):
        if stride != expected:
            return False
        expected *= size
    return True
