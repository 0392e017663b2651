"""What a training step holds, phase by phase: its peak, and by what the memory is taken."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_opt.core.compiling import has_compiled_parts
from lightning_opt.core.memory import live_bytes
from lightning_opt.memory.meters import StorageMeter

CATEGORIES = ("parameters", "gradients", "optimizer", "activations", "other")
"""What the memory of a step is taken by; the last is whatever was there before and none of it."""


class _StepMeter(StorageMeter):
    """Counts tensors made within the step, and those adopted when they are freed."""

    def adopt(self, tensors: Iterable[Tensor]) -> int:
        """Count tensors that are there already, and return their bytes."""
        before = self._live
        for tensor in tensors:
            self._count(tensor, set())
        return self._live - before


class PeakMeter:
    """The peak of live memory from one mark to the next.

    CUDA's allocator keeps it. A CPU's does not: there every operator's result is counted, which
    makes the step that is measured some 20% slower, and what kernels use within themselves is not
    seen. Where operators cannot be counted (compiled parts, DTensors) the peak is that of the two
    ends, and :attr:`exact` is False.

    Args:
        device: The device.
        module: What runs, to see whether its operators can be counted.
        held: Tensors that are there and may be freed within, such as gradients.
    """

    def __init__(
        self, device: torch.device, module: nn.Module | None = None, held: Iterable[Tensor] = ()
    ) -> None:
        self._device = device
        self._meter: _StepMeter | None = None
        self._base = live_bytes(device)
        self._last = self._base
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        elif module is None or countable(module):
            self._meter = _StepMeter()
            self._base -= self._meter.adopt(held)
            self._meter.mark()
            self._meter.__enter__()  # type: ignore[no-untyped-call]

    @property
    def exact(self) -> bool:
        """Whether a peak between two marks is seen."""
        return self._meter is not None or self._device.type == "cuda"

    def mark(self) -> int:
        """Return the peak since the last mark, in bytes, of all that is live."""
        live = live_bytes(self._device)
        before, self._last = self._last, live
        if self._device.type == "cuda":
            peak = torch.cuda.max_memory_allocated(self._device)
            torch.cuda.reset_peak_memory_stats(self._device)
            return peak
        if self._meter is not None:
            return max(self._base + self._meter.mark(), live)
        return max(before, live)

    def stop(self) -> None:
        """Count no more."""
        meter, self._meter = self._meter, None
        if meter is not None:
            with suppress(RuntimeError):  # of a mode that an exception has already taken away
                meter.__exit__(None, None, None)  # type: ignore[no-untyped-call]


def countable(module: nn.Module) -> bool:
    """Return whether all operators of a module are there to be counted."""
    return not has_compiled_parts(module) and all(
        type(p) in (Tensor, nn.Parameter) for p in module.parameters()
    )


class Holdings:
    """Tells what live memory is taken by, as seen from the start of a step.

    Args:
        module: Its parameters and gradients count.
        optimizers: Their state counts.
        device: The device.
    """

    def __init__(self, module: nn.Module, optimizers: Iterable[Any], device: torch.device) -> None:
        self._parameters = list(module.parameters())
        self._optimizers = [opt for opt in optimizers if isinstance(opt, Optimizer)]
        self._device = device
        self._other = live_bytes(device) - sum(self._known().values())

    def tensors(self) -> list[Tensor]:
        """Return what may be freed and made anew within a step: gradients and optimizer state."""
        gradients = [p.grad for p in self._parameters if p.grad is not None]
        return [*gradients, *self._state()]

    def read(self, live: int) -> dict[str, int]:
        """Return the bytes of each of :data:`CATEGORIES`."""
        known = self._known()
        rest = live - sum(known.values())
        other = min(max(0, self._other), max(0, rest))
        return {**known, "activations": max(0, rest - other), "other": other}

    def _known(self) -> dict[str, int]:
        gradients = [p.grad for p in self._parameters if p.grad is not None]
        return {
            "parameters": storage_bytes(self._parameters, self._device),
            "gradients": storage_bytes(gradients, self._device),
            "optimizer": storage_bytes(self._state(), self._device),
        }

    def _state(self) -> list[Tensor]:
        return [
            value
            for optimizer in self._optimizers
            for state in optimizer.state.values()
            if isinstance(state, dict)
            for value in state.values()
            if isinstance(value, Tensor)
        ]


def storage_bytes(tensors: Iterable[Tensor], device: torch.device | None = None) -> int:
    """Return the bytes of the storages of tensors on a device, each storage once."""
    sizes = {}
    for tensor in tensors:
        local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        if device is None or local.device.type == device.type:
            storage = local.untyped_storage()
            sizes[storage.data_ptr()] = storage.nbytes()
    return sum(sizes.values())
