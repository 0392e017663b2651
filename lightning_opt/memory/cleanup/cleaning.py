"""When a cleanup runs, and its actions: each reports the memory freed and the time taken."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from time import perf_counter
from typing import Any, Literal

import torch
from torch import nn

from lightning_opt.core.measure.malloc import malloc_trim
from lightning_opt.core.measure.memory import MB, Usage, live_bytes, resident_memory
from lightning_opt.memory.meters import state_tensors, storage_bytes

Action = Literal["gc", "cuda_cache", "malloc_trim"]

GAIN = 0.25
"""A cleanup succeeds if it frees this share of the gap between threshold and release."""

MAX_FAILURES = 3
"""Failed cleanups in a row after which there are no more."""


@dataclass
class Pressure:
    """Decides for one limit when to clean.

    After a failed cleanup, the next level is halfway between the current use and full; after three
    failures in a row there are no more cleanups. Use below ``release`` resets all.

    Args:
        threshold: Share of the limit from which to clean.
        release: Share of the limit below which the rule is reset.
        cooldown: Steps after a cleanup in which the next one waits until half of the room above
            the threshold is gone.
    """

    threshold: float
    release: float
    cooldown: int

    def __post_init__(self) -> None:
        self._reset()
        self._last = -math.inf

    def _reset(self) -> None:
        self._level = self.threshold
        self._failures = 0

    def level(self, step: int) -> float:
        """Return the share from which to clean at this step."""
        rested = step - self._last >= self.cooldown
        return self._level if rested else max(self._level, (1 + self.threshold) / 2)

    def is_high(self, step: int, fraction: float) -> bool:
        """Return whether to clean at this step, with this share of the limit used."""
        if fraction < self.release:
            self._reset()
        return fraction >= self.level(step)

    def record_cleanup(self, step: int, fraction: float, freed: float) -> bool:
        """Record a cleanup, and return whether it succeeded.

        Args:
            step: The step of the cleanup.
            fraction: Share of the limit that is used after it.
            freed: Share of the limit that it freed.
        """
        self._last = step
        if freed >= GAIN * (self.threshold - self.release) or fraction < self.release:
            self._reset()
            return True
        self._failures += 1
        self._level = fraction + (1 - fraction) / 2 if self._failures < MAX_FAILURES else math.inf
        return False


@dataclass(frozen=True)
class Effect:
    """The result of one action.

    Attributes:
        action: Its name.
        freed: Bytes, by the counter that the action should lower.
        seconds: Its duration.
    """

    action: Action
    freed: int
    seconds: float


def _tensor_bytes(device: torch.device) -> int:
    """Return the bytes in tensors, on the device and in the heap."""
    host = live_bytes(torch.device("cpu"))
    return host + (torch.cuda.memory_allocated(device) if device.type == "cuda" else 0)


_ACTIONS: Mapping[Action, tuple[Callable[[], object], Callable[[torch.device], int]]] = {
    "gc": (gc.collect, _tensor_bytes),
    "cuda_cache": (torch.cuda.empty_cache, lambda device: torch.cuda.memory_reserved(device)),
    "malloc_trim": (malloc_trim, lambda device: resident_memory()),
}

ACTIONS = tuple(_ACTIONS)
"""In the order of execution: each returns memory that the one before has freed."""


def clean(actions: Collection[Action], device: torch.device) -> list[Effect]:
    """Run the actions that apply to ``device``, in the order of :data:`ACTIONS`."""
    effects = []
    for action, (perform, counter) in _ACTIONS.items():
        if action in actions and (action != "cuda_cache" or device.type == "cuda"):
            start, before = perf_counter(), counter(device)
            perform()
            freed = before - counter(device)
            effects.append(Effect(action, freed, perf_counter() - start))
    return effects


def advise(usage: Usage, module: nn.Module, optimizers: Iterable[Any]) -> str:
    """Return advice for a working set that is too large, the best first."""
    lasting = storage_bytes([*module.parameters(), *state_tensors(optimizers)])
    shard = (
        f"weights and optimizer state are {lasting / MB:,.0f} MB: shard them "
        '(strategy="fsdp"), precision="bf16-true", or an optimizer with less state; '
    )
    return (shard if lasting > usage.used / 3 else "") + (
        'a smaller batch with accumulate_grad_batches, precision="bf16-mixed", or '
        'lightning_opt.ActivationCheckpointing("auto")'
    )
