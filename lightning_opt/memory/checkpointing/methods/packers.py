"""What is kept for the backward pass, kept in fewer bits or in the host's memory.

Autograd hands every tensor that it saves to a pair of hooks, and asks for it back in the backward
pass. A :class:`Packer` holds something smaller, or something elsewhere, in between. What belongs to
the model or to the batch is there anyway and stays what it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol
from weakref import ref

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_flatten

SMALLEST_SHARE = 1 / 16
"""Of the largest tensor seen: below it there is little to gain. The statistics of norms and of
attention, one number a row, are below it, and they are what must not be rounded."""
CHANGED = "A tensor that the backward pass needs was changed in place"
AHEAD = 2
"""So many tensors are on their way back from the host before they are asked for."""


class Packed(Protocol):
    """Stands for a tensor."""

    def get(self) -> Tensor:
        """Return the tensor, or one that is like it."""
        ...


class AsItIs:
    """A tensor that is simply held. Autograd checks no versions of what went through hooks.

    Args:
        tensor: What to hold.
        error: What to say if it was changed in place meanwhile.
    """

    def __init__(self, tensor: Tensor, error: str = CHANGED) -> None:
        self._tensor, self._version, self._error = tensor, tensor._version, error

    def get(self) -> Tensor:
        """Return the tensor.

        Raises:
            RuntimeError: If it has been changed in place.
        """
        if self._tensor._version != self._version:
            raise RuntimeError(
                f"{self._error} (shape {tuple(self._tensor.shape)}, version "
                f"{self._tensor._version}, expected {self._version})."
            )
        return self._tensor


class Rounded:
    """A float32 tensor in bfloat16: half the bytes, a relative error of up to 0.4%.

    Args:
        tensor: The tensor.
    """

    takes = (torch.float32,)
    devices: tuple[str, ...] = ()

    def __init__(self, tensor: Tensor, _: Packer) -> None:
        self._tensor = tensor.detach().to(torch.bfloat16)
        self.nbytes = self._tensor.numel() * self._tensor.element_size()

    def get(self) -> Tensor:
        """Return it in float32 again."""
        return self._tensor.float()


class OnHost:
    """A tensor of a CUDA device in pinned memory of the host.

    It is copied on a stream of its own, both ways, and fetched before it is asked for: the backward
    pass wants tensors in about the opposite order.

    Args:
        tensor: The tensor.
        packer: Whose stream and order it belongs to.
    """

    takes = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
    devices = ("cuda",)

    def __init__(self, tensor: Tensor, packer: Packer) -> None:
        self._device, self._packer, self.nbytes = tensor.device, packer, 0
        stream = packer.stream(tensor.device)
        stream.wait_stream(torch.cuda.current_stream(tensor.device))
        with torch.cuda.stream(stream):
            self._host = torch.empty_like(tensor, device="cpu", pin_memory=True)
            self._host.copy_(tensor.detach(), non_blocking=True)
        tensor.record_stream(stream)  # its memory is not given away before it is copied
        self._back: Tensor | None = None
        self._place = len(packer.order)
        packer.order.append(ref(self))

    def fetch(self) -> Tensor:
        """Start to copy it back, unless that is done already."""
        if self._back is None:
            with torch.cuda.stream(self._packer.stream(self._device)):
                self._back = self._host.to(self._device, non_blocking=True)
        return self._back

    def get(self) -> Tensor:
        """Return it on the device, and have those before it fetched."""
        tensor, self._back = self.fetch(), None
        current = torch.cuda.current_stream(self._device)
        current.wait_stream(self._packer.stream(self._device))
        tensor.record_stream(current)
        order = self._packer.order
        for place in range(self._place - 1, max(-1, self._place - 1 - AHEAD), -1):
            before = order[place]() if place < len(order) else None
            if before is not None:
                before.fetch()
        return tensor


class Packer:
    """Packs what a step saves.

    Args:
        kind: What a tensor becomes: :class:`Rounded` or :class:`OnHost`.

    Attributes:
        enabled: Whether it does anything.
        original_bytes: Of the tensors packed in the latest step.
        packed_bytes: What the same take on the device now.
        order: Of what was put onto the host.
    """

    def __init__(self, kind: type[Rounded] | type[OnHost]) -> None:
        self.kind, self.enabled = kind, True
        self.original_bytes = self.packed_bytes = 0
        self.order: list[ref[OnHost]] = []
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._owned: set[int] = set()
        self._known: dict[Any, tuple[ref[Any], ref[Rounded | OnHost]]] = {}
        self._largest = 0

    def stream(self, device: torch.device) -> torch.cuda.Stream:
        """Return the stream of the copies."""
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        return self._streams[device]

    @contextmanager
    def packing(self, model: nn.Module, batch: Any) -> Iterator[None]:
        """Pack what is saved inside; what belongs to ``model`` and ``batch`` excepted."""
        if not self.enabled or not torch.is_grad_enabled():
            yield
            return
        self._owned = _storages([*model.parameters(), *model.buffers(), *tree_flatten(batch)[0]])
        self._known, self._largest, self.order = {}, 0, []
        self.original_bytes = self.packed_bytes = 0
        _ACTIVE.append(self)
        try:
            with saved_tensors_hooks(self.pack, _unpack):
                yield
        finally:
            _ACTIVE.remove(self)
            self._known = {}

    def pack(self, tensor: Tensor, error: str = CHANGED) -> Packed:
        """Return what to hold of ``tensor``, which is the tensor itself where nothing is gained."""
        if not self._takes(tensor):
            return AsItIs(tensor, error)
        storage = tensor.untyped_storage()
        # The same tensor is often saved by its maker and by each of its users.
        key = (
            id(storage), tensor.storage_offset(), tensor.shape, tensor.stride(), tensor._version
        )  # fmt: skip
        if key in self._known:
            same_storage, known = self._known[key][0]() is storage, self._known[key][1]()
            if same_storage and known is not None:
                return known
        packed: Rounded | OnHost = self.kind(tensor, self)
        self._known[key] = ref(storage), ref(packed)
        self.original_bytes += tensor.numel() * tensor.element_size()
        self.packed_bytes += packed.nbytes
        return packed

    def _takes(self, tensor: Tensor) -> bool:
        if tensor.dtype not in self.kind.takes or type(tensor) is not Tensor:
            return False
        if self.kind.devices and tensor.device.type not in self.kind.devices:
            return False
        storage = tensor.untyped_storage()
        if storage.data_ptr() in self._owned:
            return False
        self._largest = max(self._largest, tensor.numel())
        # A broadcast one has more elements than memory.
        return (
            tensor.numel() > SMALLEST_SHARE * self._largest
            and tensor.numel() * tensor.element_size() <= storage.nbytes()
        )


_ACTIVE: list[Packer] = []


def held(tensor: Tensor, error: str) -> Packed:
    """Return what to hold of ``tensor``, outside of autograd: as the active packer wants it."""
    tensor = tensor.detach()
    return _ACTIVE[-1].pack(tensor, error) if _ACTIVE else AsItIs(tensor, error)


def _unpack(packed: Packed) -> Tensor:
    return packed.get()


def _storages(values: Iterable[Any]) -> set[int]:
    return {v.untyped_storage().data_ptr() for v in values if isinstance(v, Tensor)}


def gradient_error(
    run: Callable[[Callable[[Any], None]], Any],
    model: nn.Module,
    packer: Packer,
) -> float:
    """Return how far the gradients are off because of ``packer``: a share of their norm.

    Args:
        run: Runs one and the same step; what it is given is called when the gradients are there.
        model: Whose gradients.
        packer: What is switched off for the comparison.
    """
    found: list[list[Tensor | None]] = []

    def remember(_: Any = None) -> None:
        gradients = (parameter.grad for parameter in model.parameters())
        # On the host: two copies of all gradients might not fit beside the step.
        found.append([None if g is None else g.detach().double().cpu() for g in gradients])

    for packer.enabled in (False, True):
        run(remember)
    square = difference = 0.0
    for exact, rough in zip(*found, strict=True):
        if exact is not None and rough is not None:
            square += float(exact.square().sum())
            difference += float((rough - exact).square().sum())
    return float((difference / square) ** 0.5) if square else 0.0
