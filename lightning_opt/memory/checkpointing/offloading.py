"""``offload=True``: keeps tensors that autograd saves in host memory until the backward pass."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from lightning_opt.core.modules.batches import tensors_of


class HostCopy:
    """A CUDA tensor in pinned host memory.

    The copies to the host and back are queued on the stream of the computation, so the host does
    not wait, and device memory is not reused too early.
    """

    def __init__(self, tensor: Tensor) -> None:
        self._device = tensor.device
        self._host = torch.empty_like(tensor, device="cpu", pin_memory=True)
        self._host.copy_(tensor.detach(), non_blocking=True)

    def to_device(self) -> Tensor:
        return self._host.to(self._device, non_blocking=True)


class _CachedCopy(NamedTuple):
    storage: ref[Any]
    copy: ref[HostCopy]


class Offload:
    """Moves tensors that a training step saves to the host.

    torch's ``save_on_cpu`` would also move parameters, and would move a tensor again for each
    operator that saves it.

    Attributes:
        nbytes: Bytes that the latest step moved.
    """

    def __init__(self) -> None:
        self.nbytes = 0
        self._resident: set[int] = set()
        self._copies: dict[Any, _CachedCopy] = {}

    def around(self, model: nn.Module, step: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``step`` with offloading. Parameters, buffers and the batch stay on the device."""

        @wraps(step)
        def offloading(*args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled():
                return step(*args, **kwargs)
            resident = [*model.parameters(), *model.buffers(), *tensors_of((args, kwargs))]
            self._resident = {tensor.untyped_storage().data_ptr() for tensor in resident}
            self.nbytes = 0
            _ACTIVE.append(self)
            try:
                with saved_tensors_hooks(self.pack, unpack):
                    return step(*args, **kwargs)
            finally:
                _ACTIVE.remove(self)
                self._copies = {}

        return offloading

    def pack(self, tensor: Tensor) -> Tensor | HostCopy:
        """Return a copy on the host, or ``tensor`` itself if moving it frees no memory."""
        storage = tensor.untyped_storage()
        on_device = tensor.is_cuda and type(tensor) is Tensor
        # A broadcast tensor has more elements than its storage.
        if (
            not on_device
            or storage.data_ptr() in self._resident
            or tensor.nbytes > storage.nbytes()
        ):
            return tensor
        # Several operators often save the same tensor.
        key = id(storage), tensor.storage_offset(), tensor.shape, tensor.stride(), tensor._version
        cached = self._copies.get(key)
        if cached is not None and cached.storage() is storage:
            copy = cached.copy()
            if copy is not None:
                return copy
        copy = HostCopy(tensor)
        self._copies[key] = _CachedCopy(ref(storage), ref(copy))
        self.nbytes += tensor.nbytes
        return copy


_ACTIVE: list[Offload] = []


def pack(tensor: Tensor) -> Tensor | HostCopy:
    """Pack a tensor that is held outside of autograd, if the running step offloads."""
    tensor = tensor.detach()
    return _ACTIVE[-1].pack(tensor) if _ACTIVE else tensor


def unpack(packed: Tensor | HostCopy) -> Tensor:
    return packed.to_device() if isinstance(packed, HostCopy) else packed
