"""Measure a step: peaks by phase, memory by category, saved activations by module, gc pauses."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from lightning_opt.core.measure.memory import live_bytes
from lightning_opt.core.modules.compiling import has_compiled_parts
from lightning_opt.memory.meters import StorageMeter, measuring, state_tensors, storage_bytes

CATEGORIES = ("parameters", "gradients", "optimizer", "activations", "other")
"""The last is memory that was allocated before the step and is in no other category."""


class PhaseMeter:
    """Measures the peak of live memory between marks.

    On CUDA the allocator records it. On a CPU every operator's result is counted, which makes the
    step some 20% slower and misses the internal buffers of kernels. If operators cannot be counted
    (compiled parts, DTensors), the peak is the larger of the two ends, and :attr:`exact` is False.

    Args:
        device: The device.
        module: The module that runs, to check whether its operators can be counted.
        held: Existing tensors that may be freed between marks, such as gradients.

    Attributes:
        exact: Whether peaks between two marks are measured.
    """

    def __init__(
        self, device: torch.device, module: nn.Module | None = None, held: Iterable[Tensor] = ()
    ) -> None:
        self._device = device
        self._base = self._last = live_bytes(device)
        self._measurement = ExitStack()
        self.exact = device.type == "cuda" or module is None or countable(module)
        self._meter = self._measurement.enter_context(measuring(device)) if self.exact else None
        if isinstance(self._meter, StorageMeter):
            self._base -= self._meter.adopt(held)
            self._meter.mark()

    def mark(self) -> int:
        """Return the peak of all live memory since the last mark, in bytes."""
        before, self._last = self._last, live_bytes(self._device)
        peak = before if self._meter is None else self._base + self._meter.mark()
        return max(peak, self._last)

    def stop(self) -> None:
        """Stop counting."""
        with suppress(RuntimeError):  # an exception may have removed the dispatch mode already
            self._measurement.close()


def countable(module: nn.Module) -> bool:
    """Return whether all operators of a module can be counted."""
    return not has_compiled_parts(module) and all(
        type(p) in (Tensor, nn.Parameter) for p in module.parameters()
    )


class MemoryCategories:
    """Divides live memory into :data:`CATEGORIES`, relative to the start of a step.

    Args:
        module: Its parameters and gradients count.
        optimizers: Their states count.
        device: The device.
    """

    def __init__(self, module: nn.Module, optimizers: Iterable[Any], device: torch.device) -> None:
        self._parameters = list(module.parameters())
        self._optimizers = list(optimizers)
        self._device = device
        self._other = live_bytes(device) - sum(self._known().values())

    def replaceable(self) -> list[Tensor]:
        """Return gradients and optimizer state, which a step may free and allocate again."""
        return [*self._gradients(), *state_tensors(self._optimizers)]

    def divide(self, live: int) -> dict[str, int]:
        """Return the bytes of each category, given all live bytes."""
        known = self._known()
        rest = live - sum(known.values())
        other = min(max(0, self._other), max(0, rest))
        return {**known, "activations": max(0, rest - other), "other": other}

    def _gradients(self) -> list[Tensor]:
        return [p.grad for p in self._parameters if p.grad is not None]

    def _known(self) -> dict[str, int]:
        return {
            "parameters": storage_bytes(self._parameters, self._device),
            "gradients": storage_bytes(self._gradients(), self._device),
            "optimizer": storage_bytes(state_tensors(self._optimizers), self._device),
        }


@dataclass
class SavedBytes:
    """Tensors that autograd has saved in one module.

    Attributes:
        module: Its name.
        kind: Its class.
        bytes: Of storages that were first saved in it and are neither parameters nor buffers.
        tensors: Number of saved tensors.
    """

    module: str
    kind: str
    bytes: int = 0
    tensors: int = 0


class SavedTensorCounter:
    """Counts the tensors that autograd saves inside :meth:`counting`, by the innermost module.

    Checkpointed regions save nothing and are not counted.
    """

    def __init__(self, model: nn.Module) -> None:
        self._entries = {
            module: SavedBytes(name, type(module).__name__)
            for name, module in model.named_modules()
        }
        tensors = (*model.parameters(), *model.buffers())
        self._own = {tensor.untyped_storage().data_ptr() for tensor in tensors}
        self._outside = SavedBytes("(outside of modules)", "")
        self._stack: list[nn.Module] = []
        self._seen: set[int] = set()

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count the tensors saved inside."""
        with ExitStack() as stack:
            for module in self._entries:
                entering = module.register_forward_pre_hook(self._enter)
                leaving = module.register_forward_hook(self._leave, always_call=True)
                stack.callback(entering.remove)
                stack.callback(leaving.remove)
            stack.enter_context(saved_tensors_hooks(self._pack, lambda tensor: tensor))
            yield

    def found(self) -> list[SavedBytes]:
        """Return the modules with saved tensors, the largest first."""
        entries = [entry for entry in (*self._entries.values(), self._outside) if entry.tensors]
        return sorted(entries, key=lambda entry: -entry.bytes)

    def _enter(self, module: nn.Module, args: Any) -> None:
        self._stack.append(module)

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        while self._stack and self._stack.pop() is not module:
            pass  # modules that an exception has left

    def _pack(self, tensor: Tensor) -> Tensor:
        entry = self._entries[self._stack[-1]] if self._stack else self._outside
        storage = tensor.untyped_storage()
        place = storage.data_ptr()
        if place not in self._own:
            entry.tensors += 1
            if place not in self._seen:
                self._seen.add(place)
                entry.bytes += storage.nbytes()
        return tensor


@contextmanager
def timing_collections(seconds: list[float]) -> Iterator[None]:
    """Append the duration of every garbage collection of this process to ``seconds``."""
    start = 0.0

    def record(phase: str, info: dict[str, Any]) -> None:
        nonlocal start
        if phase == "start":
            start = perf_counter()
        elif start:
            seconds.append(perf_counter() - start)

    gc.callbacks.append(record)
    try:
        yield
    finally:
        gc.callbacks.remove(record)
