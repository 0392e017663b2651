"""Measure the memory that operators allocate."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, TypeAlias
from weakref import ref

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_opt.core.measure.memory import PeakMeter
from lightning_opt.core.modules.batches import tensors_of
from lightning_opt.core.modules.trial import returns_views, storages_of


class StorageMeter(TorchDispatchMode):
    """Counts the memory of every operator's result until it is freed.

    For devices without allocator statistics, such as the CPU. Internal buffers of kernels are not
    counted.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._held: dict[int, tuple[int, Any]] = {}  # bytes, and a weak reference
        self._live = self._peak = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        output = func(*args, **(kwargs or {}))
        if not returns_views(func):
            inputs = {id(s) for leaf in tensors_of((args, kwargs)) for s in storages_of(leaf)}
            for leaf in tensors_of(output):
                self._count(leaf, inputs)
        return output

    def _count(self, tensor: Tensor, inputs: set[int]) -> None:
        for storage in storages_of(tensor):
            key = id(storage)  # all tensors of a live storage share this object
            if key not in self._held and key not in inputs:
                self._held[key] = storage.nbytes(), ref(storage, partial(self._remove, key))
                self._live += storage.nbytes()
        self._peak = max(self._peak, self._live)

    def adopt(self, tensors: Iterable[Tensor]) -> int:
        """Count existing tensors, and return their bytes."""
        before = self._live
        for tensor in tensors:
            self._count(tensor, set())
        return self._live - before

    def _remove(self, key: int, _: Any) -> None:
        nbytes, _ = self._held.pop(key)
        self._live -= nbytes

    def live(self) -> int:
        return self._live

    def mark(self) -> int:
        peak, self._peak = self._peak, self._live
        return peak


class AllocatorMeter:
    """Reads the CUDA allocator."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._start = torch.cuda.memory_allocated(device)
        self._peak = PeakMeter(device)

    def live(self) -> int:
        return torch.cuda.memory_allocated(self._device) - self._start

    def mark(self) -> int:
        return self._peak.mark() - self._start


Meter: TypeAlias = StorageMeter | AllocatorMeter
"""Measures bytes allocated since its start: now by ``live``, the peak since the last ``mark``."""


def measuring(device: torch.device) -> AbstractContextManager[Meter]:
    return nullcontext(AllocatorMeter(device)) if device.type == "cuda" else StorageMeter()


def storage_bytes(tensors: Iterable[Tensor], device: torch.device | None = None) -> int:
    """Return the bytes of tensors on this rank and device type; shared storages count once."""
    sizes = {
        storage.data_ptr(): storage.nbytes()
        for tensor in tensors
        if device is None or tensor.device.type == device.type
        for storage in storages_of(tensor)
    }
    return sum(sizes.values())


def state_tensors(optimizers: Iterable[Any]) -> list[Tensor]:
    states = [state for o in optimizers for state in getattr(o, "state", {}).values()]
    values = (value for state in states if isinstance(state, dict) for value in state.values())
    return [value for value in values if isinstance(value, Tensor)]
