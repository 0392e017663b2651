"""What can be done about full memory, each with what it freed and how long it took."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING, Literal

import torch

from lightning_opt.core.malloc import malloc_info, malloc_trim
from lightning_opt.core.memory import MB, DeviceMemory, Usage, resident_memory

if TYPE_CHECKING:
    import lightning.pytorch as pl

Action = Literal["gc", "cuda_cache", "malloc_trim"]

ACTIONS: tuple[Action, ...] = ("gc", "cuda_cache", "malloc_trim")
"""In the order in which they are done: what one lets go of, the next gives back."""

REST_AFTER = 2
"""Attempts in a row without effect after which an action is left out."""

NEGLIGIBLE = MB


@dataclass(frozen=True)
class Effect:
    """What one action did.

    Attributes:
        action: Its name.
        freed: Bytes, by the counter that it is meant to lower.
        seconds: How long it took.
    """

    action: Action
    freed: int
    seconds: float


class Cleaner:
    """Runs the actions, and leaves out those that have had no effect.

    Args:
        actions: Which ones.
        device: Whose memory they are to free.
    """

    def __init__(self, actions: Iterable[Action], device: torch.device) -> None:
        self._device = device
        possible = {"gc": True, "cuda_cache": device.type == "cuda", "malloc_trim": True}
        self._idle: dict[Action, int] = {a: 0 for a in ACTIONS if a in actions and possible[a]}

    def clean(self) -> list[Effect]:
        """Run what has not failed twice in a row; everything, if nothing is left."""
        due = [action for action, idle in self._idle.items() if idle < REST_AFTER]
        effects = [self._run(action) for action in due or self._idle]
        for effect in effects:
            idle = 0 if effect.freed >= NEGLIGIBLE else self._idle[effect.action] + 1
            self._idle[effect.action] = idle
        return effects

    def resting(self) -> list[Action]:
        """Return the actions that are left out for now."""
        return [action for action, idle in self._idle.items() if idle >= REST_AFTER]

    def retry(self) -> None:
        """Give every action another chance."""
        self._idle = dict.fromkeys(self._idle, 0)

    def _run(self, action: Action) -> Effect:
        perform, counter = _KINDS[action]
        start, before = perf_counter(), counter(self._device)
        perform()
        return Effect(action, before - counter(self._device), perf_counter() - start)


def _in_use(device: torch.device) -> int:
    """Return what tensors hold, on the device and in the heap."""
    heap = malloc_info()
    host = heap.used if heap is not None else resident_memory()
    return host + (torch.cuda.memory_allocated(device) if device.type == "cuda" else 0)


_KINDS: Mapping[Action, tuple[Callable[[], object], Callable[[torch.device], int]]] = {
    "gc": (gc.collect, _in_use),
    "cuda_cache": (torch.cuda.empty_cache, lambda device: torch.cuda.memory_reserved(device)),
    "malloc_trim": (malloc_trim, lambda device: resident_memory()),
}


def advise(
    usage: Usage, trainer: pl.Trainer, pl_module: pl.LightningModule, device: DeviceMemory | None
) -> str:
    """Return what would help against a working set that is simply large, the best first."""
    advice = []
    weights = sum(p.nbytes for p in pl_module.parameters())
    state = sum(
        value.nbytes
        for optimizer in trainer.optimizers
        for values in optimizer.state.values()
        for value in (values.values() if isinstance(values, dict) else ())
        if isinstance(value, torch.Tensor)
    )
    if device is not None and device.others > usage.total / 5:
        advice.append(
            f"other processes and libraries hold {device.others / MB:,.0f} MB of the device"
        )
    if device is not None and device.reserved - device.allocated > device.reserved / 4:
        advice.append(
            "a quarter of what torch holds is fragments: "
            "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
        )
    if usage.source == "system":
        advice.append(
            "see whether it is this process at all; fewer workers or a smaller prefetch_factor "
            "in the DataLoader"
        )
    if weights + state > usage.used / 3:
        advice.append(
            f"weights and optimizer state are {(weights + state) / MB:,.0f} MB: shard them "
            '(strategy="fsdp"), precision="bf16-true", or an optimizer with less state'
        )
    advice.append(
        'a smaller batch with accumulate_grad_batches, precision="bf16-mixed", or '
        'lightning_opt.ActivationCheckpointing("auto")'
    )
    return "; ".join(advice)
