"""CUDA tensors without a GPU or values, for code that must neither read nor move them."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten


class NoCopies(TorchDispatchMode):
    """Raises where a tensor goes from the host to a device or back, which both wait."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        operation = func.overloadpacket
        if operation in (aten._to_copy, aten.copy_):
            source = args[1] if operation is aten.copy_ else args[0]
            if source.device != result.device:
                raise AssertionError(f"{func} from {source.device} to {result.device}")
        return result


@contextmanager
def pretended_cuda(*, copies: bool = False) -> Iterator[None]:
    """Let ``device="cuda"`` give fake tensors that raise when they are read or mixed with others.

    Args:
        copies: Whether tensors may go from the host to the device and back.
    """
    shims: dict[str, Any] = {}
    if not torch.backends.cuda.is_built():
        # The CPU build's own ask for a device before they get to the dispatcher.
        shims = {
            "__getitem__": _getitem,
            "copy_": lambda own, new: aten.copy_(own, new),
            "to": lambda own, to: torch.empty(own.shape, device=to, dtype=own.dtype),
        }
        if not copies:
            del shims["to"]
    with FakeTensorMode(), mock.patch.multiple(Tensor, **shims):
        if copies:
            yield
        else:
            with NoCopies():
                yield


def _getitem(tensor: Tensor, key: Any) -> Tensor:
    dim = 0
    for part in key if isinstance(key, tuple) else (key,):
        if isinstance(part, slice):
            tensor = aten.slice(tensor, dim, part.start, part.stop, part.step or 1)
            dim += 1
        else:
            tensor = tensor.select(dim, part)
    return tensor
