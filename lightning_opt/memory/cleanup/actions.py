"""What can be done about full memory, each with what it freed and how long it took."""

from __future__ import annotations

import gc
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


def _in_use(device: torch.device) -> int:
    """Return what tensors hold, on the device and in the heap."""
    host = live_bytes(torch.device("cpu"))
    return host + (torch.cuda.memory_allocated(device) if device.type == "cuda" else 0)


_KINDS: Mapping[Action, tuple[Callable[[], object], Callable[[torch.device], int]]] = {
    "gc": (gc.collect, _in_use),
    "cuda_cache": (torch.cuda.empty_cache, lambda device: torch.cuda.memory_reserved(device)),
    "malloc_trim": (malloc_trim, lambda device: resident_memory()),
}

ACTIONS = tuple(_KINDS)
"""In the order in which they are done: what one lets go of, the next gives back."""


def clean(actions: Collection[Action], device: torch.device) -> list[Effect]:
    """Run the actions, in the order of :data:`ACTIONS`, as far as ``device`` has such a thing."""
    effects = []
    for action, (perform, counter) in _KINDS.items():
        if action in actions and (action != "cuda_cache" or device.type == "cuda"):
            start, before = perf_counter(), counter(device)
            perform()
            freed = before - counter(device)
            effects.append(Effect(action, freed, perf_counter() - start))
    return effects


def advise(usage: Usage, module: nn.Module, optimizers: Iterable[Any]) -> str:
    """Return what would help against a working set that is simply large, the best first."""
    lasting = storage_bytes([*module.parameters(), *state_tensors(optimizers)])
    shard = (
        f"weights and optimizer state are {lasting / MB:,.0f} MB: shard them "
        '(strategy="fsdp"), precision="bf16-true", or an optimizer with less state; '
    )
    return (shard if lasting > usage.used / 3 else "") + (
        'a smaller batch with accumulate_grad_batches, precision="bf16-mixed", or '
        'lightning_opt.ActivationCheckpointing("auto")'
    )
