"""``offload=True``: what autograd saves waits in the host's memory until the backward pass.

Autograd hands every tensor that it saves to a pair of hooks, and asks for it back in the backward
pass. What belongs to the model or to the batch is there anyway and stays where it is.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import wraps
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from lightning_opt.core.measure.memory import MB
from lightning_opt.core.modules.batches import tensors_of

AHEAD = 2
"""So many tensors are on their way back from the host before they are asked for."""


IN_FLIGHT = 256 * MB
"""So much may be on its way to the host: until it is there, it fills the device as well."""


class OnHost:
    """A tensor of a CUDA device in pinned memory of the host.

    It is copied on a stream of its own, both ways, and fetched before it is asked for: the backward
    pass wants tensors in about the opposite order.

    Args:
        tensor: The tensor.
        stream: That of the copies.
        order: Of what was put onto the host.
    """

    def __init__(self, tensor: Tensor, stream: torch.cuda.Stream, order: list[ref[OnHost]]) -> None:
        self._device, self._stream, self._order = tensor.device, stream, order
        stream.wait_stream(torch.cuda.current_stream(tensor.device))
        with torch.cuda.stream(stream):
            self._host = torch.empty_like(tensor, device="cpu", pin_memory=True)
            self._host.copy_(tensor.detach(), non_blocking=True)
        self.copied = stream.record_event()
        tensor.record_stream(stream)  # its memory is not given away before it is copied
        self._back: Tensor | None = None
        self._place = len(order)
        order.append(ref(self))

    def fetch(self) -> Tensor:
        """Start to copy it back, unless that is done already."""
        if self._back is None:
            with torch.cuda.stream(self._stream):
                self._back = self._host.to(self._device, non_blocking=True)
        return self._back

    def get(self) -> Tensor:
        """Return it on the device, and have those before it fetched."""
        tensor, self._back = self.fetch(), None
        current = torch.cuda.current_stream(self._device)
        current.wait_stream(self._stream)
        tensor.record_stream(current)
        for before in self._order[max(0, self._place - AHEAD) : self._place][::-1]:
            waiting = before()
            if waiting is not None:
                waiting.fetch()
        return tensor


class Offload:
    """Keeps on the host what a training step saves.

    Args:
        device: A CUDA device.

    Attributes:
        nbytes: Of what the latest step has put there.
    """

    def __init__(self, device: torch.device) -> None:
        self.nbytes = 0
        self._stream = torch.cuda.Stream(device)
        self._owned: set[int] = set()
        self._copies: deque[tuple[torch.cuda.Event, int]] = deque()
        self._order: list[ref[OnHost]] = []
        self._known: dict[Any, tuple[ref[Any], ref[OnHost]]] = {}

    def around(self, model: nn.Module, step: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``step``, which offloads what it saves of the activations of ``model``."""

        @wraps(step)
        def offloading(*args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled():
                return step(*args, **kwargs)
            kept = [*model.parameters(), *model.buffers(), *tensors_of((args, kwargs))]
            self._owned = {t.untyped_storage().data_ptr() for t in kept}
            self._known, self._order, self.nbytes = {}, [], 0
            _ACTIVE.append(self)
            try:
                with saved_tensors_hooks(self.pack, fetched):
                    return step(*args, **kwargs)
            finally:
                _ACTIVE.remove(self)
                self._known = {}

        return offloading

    def pack(self, tensor: Tensor) -> Tensor | OnHost:
        """Return what to hold of ``tensor``: itself where nothing is gained."""
        storage = tensor.untyped_storage()
        here = not tensor.is_cuda or type(tensor) is not Tensor
        # A broadcast one has more elements than memory.
        if here or storage.data_ptr() in self._owned or tensor.nbytes > storage.nbytes():
            return tensor
        # The same tensor is often saved by its maker and by each of its users.
        key = id(storage), tensor.storage_offset(), tensor.shape, tensor.stride(), tensor._version
        if key in self._known:
            same_storage, known = self._known[key][0]() is storage, self._known[key][1]()
            if same_storage and known is not None:
                return known
        moved = OnHost(tensor, self._stream, self._order)
        self._known[key] = ref(storage), ref(moved)
        self.nbytes += tensor.nbytes
        self._copies.append((moved.copied, tensor.nbytes))
        while len(self._copies) > 1 and sum(nbytes for _, nbytes in self._copies) > IN_FLIGHT:
            # The host itself must wait: the device's memory is given out in its time, so that
            # computation faster than the link would leave all of its tensors there.
            self._copies.popleft()[0].synchronize()
        return moved


_ACTIVE: list[Offload] = []


def put_away(tensor: Tensor) -> Tensor | OnHost:
    """Return what to hold of ``tensor`` outside of autograd, as the step that runs wants it."""
    tensor = tensor.detach()
    return _ACTIVE[-1].pack(tensor) if _ACTIVE else tensor


def fetched(held: Tensor | OnHost) -> Tensor:
    """Return what :func:`put_away` was given."""
    return held.get() if isinstance(held, OnHost) else held
