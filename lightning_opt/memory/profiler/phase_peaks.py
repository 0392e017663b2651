"""What a training step holds, phase by phase: its peak, and by what the memory is taken."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack, suppress
from typing import Any

import torch
from torch import Tensor, nn

from lightning_opt.core.measure.memory import live_bytes
from lightning_opt.core.modules.compiling import has_compiled_parts
from lightning_opt.memory.meters import StorageMeter, measuring, state_tensors, storage_bytes

CATEGORIES = ("parameters", "gradients", "optimizer", "activations", "other")
"""What the memory of a step is taken by; the last is whatever was there before and none of it."""


class PhaseMeter:
    """The peak of live memory from one mark to the next.

    CUDA's allocator keeps it. A CPU's does not: there every operator's result is counted, which
    makes the step that is measured some 20% slower, and what kernels use within themselves is not
    seen. Where operators cannot be counted (compiled parts, DTensors) the peak is that of the two
    ends, and :attr:`exact` is False.

    Args:
        device: The device.
        module: What runs, to see whether its operators can be counted.
        held: Tensors that are there and may be freed within, such as gradients.

    Attributes:
        exact: Whether a peak between two marks is seen.
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
        """Return the peak since the last mark, in bytes, of all that is live."""
        before, self._last = self._last, live_bytes(self._device)
        seen = before if self._meter is None else self._base + self._meter.mark()
        return max(seen, self._last)

    def stop(self) -> None:
        """Count no more."""
        with suppress(RuntimeError):  # of a mode that an exception has already taken away
            self._measurement.close()


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
        self._optimizers = list(optimizers)
        self._device = device
        self._other = live_bytes(device) - sum(self._known().values())

    def tensors(self) -> list[Tensor]:
        """Return what may be freed and made anew within a step: gradients and optimizer state."""
        gradients = [p.grad for p in self._parameters if p.grad is not None]
        return [*gradients, *state_tensors(self._optimizers)]

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
            "optimizer": storage_bytes(state_tensors(self._optimizers), self._device),
        }
