"""Measures the memory that operators allocate, and the memory that stays between steps."""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from typing import Any, TypeAlias
from weakref import ref

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_opt.core.measure.memory import PeakMeter
from lightning_opt.core.modules.batches import tensors_of
from lightning_opt.core.modules.sharding import local_part
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
"""Measures bytes allocated since its start: ``live`` returns the current bytes, ``mark`` the peak
since the last ``mark``."""


def measuring(device: torch.device) -> AbstractContextManager[Meter]:
    return nullcontext(AllocatorMeter(device)) if device.type == "cuda" else StorageMeter()


def storage_bytes(tensors: Iterable[Tensor], device: torch.device | None = None) -> int:
    """Return the bytes of tensors on this rank and device type; shared storages count once."""
    storages = {
        storage
        for tensor in tensors
        if device is None or tensor.device.type == device.type
        for storage in storages_of(tensor)
    }
    return sum(storage.nbytes() for storage in storages)


def state_tensors(optimizers: Iterable[Any]) -> list[Tensor]:
    states = [state for o in optimizers for state in getattr(o, "state", {}).values()]
    values = (value for state in states if isinstance(state, dict) for value in state.values())
    return [value for value in values if isinstance(value, Tensor)]


def optimizer_state_bytes(optimizer: Optimizer) -> int:
    """Return the bytes of the optimizer's state, predicted before its first step.

    The prediction steps a copy of the optimizer on meta tensors of the parameters' shapes.
    """
    wrapped = [value for value in vars(optimizer).values() if isinstance(value, Optimizer)]
    if wrapped:  # such as Lookahead
        return sum(map(optimizer_state_bytes, wrapped))
    present = state_tensors([optimizer])
    if present:
        return storage_bytes(present)
    return sum(
        _state_bytes(optimizer, group, local_part(parameter))
        for group in optimizer.param_groups
        for parameter in group["params"]
    )


def _state_bytes(optimizer: Optimizer, group: dict[str, Any], parameter: Tensor) -> int:
    sample = nn.Parameter(torch.empty_like(parameter, device="meta"))
    sample.grad = torch.empty_like(sample)
    # Not `copy.copy`, which shares attributes that a step may change.
    trial: Any = object.__new__(type(optimizer))
    trial.__dict__ |= {
        "defaults": optimizer.defaults,
        "param_groups": [{**group, "params": [sample]}],
        "state": defaultdict(dict),
    }
    # Many optimizers read a value after creating their state, which fails on the meta device.
    with torch.no_grad(), suppress(RuntimeError, TypeError, ValueError, AttributeError, KeyError):
        inspect.unwrap(type(trial).step)(trial)  # without hooks and schedulers' wrappers
    # Step counters do not grow with the parameter.
    return sum(value.nbytes for value in state_tensors([trial]) if value.numel() > 1)


def persistent_bytes(module: nn.Module, optimizers: Iterable[Optimizer]) -> int:
    """Return the bytes of parameters, buffers, gradients and optimizer states once all exist."""
    parameters = list(module.parameters())
    gradients = storage_bytes(p for p in parameters if p.requires_grad)
    states = sum(optimizer_state_bytes(optimizer) for optimizer in optimizers)
    return storage_bytes([*parameters, *module.buffers()]) + gradients + states


def allocated_bytes(module: nn.Module, optimizers: Iterable[Optimizer]) -> int:
    """Return the part of :func:`persistent_bytes` that is allocated now."""
    gradients = [p.grad for p in module.parameters() if p.grad is not None]
    tensors = [*module.parameters(), *module.buffers(), *gradients]
    return storage_bytes([*tensors, *state_tensors(optimizers)])


def bucket_bytes(model: Any) -> int:
    """Return the bytes of DDP's buckets, unless gradients are views of them."""
    if not isinstance(model, DistributedDataParallel) or model.gradient_as_bucket_view:
        return 0
    return storage_bytes(p for p in model.parameters() if p.requires_grad)
