"""Measures a step (peaks by phase, categories, saved tensors, gc pauses), and makes tables."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from lightning_opt.core.measure.memory import MB, live_bytes
from lightning_opt.core.modules.compiling import has_compiled_parts
from lightning_opt.core.modules.patching import takes_hooks
from lightning_opt.core.modules.trial import storages_of
from lightning_opt.core.output.report import Report
from lightning_opt.memory.meters import StorageMeter, measuring, state_tensors, storage_bytes

CATEGORIES = ("parameters", "gradients", "optimizer", "activations", "other")
"""``"other"`` is memory that was allocated before the step and is in no other category."""


class PhaseMeter:
    """Measures the peak of live memory between marks.

    On CUDA the allocator records it. On a CPU every operator's result is counted, which makes the
    step about 20% slower and misses the internal buffers of kernels. If operators cannot be counted
    (compiled parts, DTensors), memory is read only at each mark, the peak is the larger of two
    readings, and :attr:`exact` is False.

    ``held`` contains existing tensors that may be freed between marks, such as gradients.

    Attributes:
        exact: Whether peaks between two marks are measured, not only memory at the marks.
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
        with suppress(RuntimeError):  # an exception may have removed the dispatch mode already
            self._measurement.close()


def countable(module: nn.Module) -> bool:
    return not has_compiled_parts(module) and all(
        type(p) in (Tensor, nn.Parameter) for p in module.parameters()
    )


class MemoryCategories:
    """Divides live memory into :data:`CATEGORIES`, relative to the start of a step."""

    def __init__(self, module: nn.Module, optimizers: Iterable[Any], device: torch.device) -> None:
        self._parameters = list(module.parameters())
        self._optimizers = list(optimizers)
        self._device = device
        self._other = live_bytes(device) - sum(self._known().values())

    def replaceable(self) -> list[Tensor]:
        """Return gradients and optimizer state, which a step may free and allocate again."""
        return [*self._gradients(), *state_tensors(self._optimizers)]

    def divide(self, live: int) -> dict[str, int]:
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
    """Tensors saved by autograd in one module. ``bytes`` counts storages first saved in it."""

    module: str
    kind: str
    bytes: int = 0
    tensors: int = 0


class SavedTensorCounter:
    """Counts the tensors that autograd saves after :meth:`start`, by the innermost module.

    Checkpointed regions save nothing and are not counted.
    """

    def __init__(self, model: nn.Module) -> None:
        self._entries = {
            module: SavedBytes(name, type(module).__name__)
            for name, module in model.named_modules()
            if takes_hooks(module)
        }
        tensors = (*model.parameters(), *model.buffers())
        # Storages, not addresses: memory freed within the step may be reused for another tensor.
        self._model_storages = WeakSet(s for tensor in tensors for s in storages_of(tensor))
        self._outside = SavedBytes("(outside of modules)", "")
        self._stack: list[nn.Module] = []
        self._seen: WeakSet[torch.UntypedStorage] = WeakSet()

    def start(self, until: ExitStack) -> None:
        """Count until a stack is closed."""
        for module in self._entries:
            until.callback(module.register_forward_pre_hook(self._enter).remove)
            until.callback(module.register_forward_hook(self._leave, always_call=True).remove)
        until.enter_context(saved_tensors_hooks(self._pack, lambda tensor: tensor))

    def found(self) -> list[SavedBytes]:
        entries = [entry for entry in (*self._entries.values(), self._outside) if entry.tensors]
        return sorted(entries, key=lambda entry: -entry.bytes)

    def _enter(self, module: nn.Module, args: Any) -> None:
        self._stack.append(module)
        # FSDP2 has just gathered the parameters, into new storages.
        self._model_storages.update(
            s for p in module.parameters(recurse=False) for s in storages_of(p)
        )

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        while self._stack and self._stack.pop() is not module:
            pass  # drop modules that an exception ended

    def _pack(self, tensor: Tensor) -> Tensor:
        entry = self._entries[self._stack[-1]] if self._stack else self._outside
        for storage in storages_of(tensor):
            if storage not in self._model_storages:
                entry.tensors += 1
                if storage not in self._seen:
                    self._seen.add(storage)
                    entry.bytes += storage.nbytes()
        return tensor


@dataclass
class Pauses:
    """The number, the total seconds and the longest of this process's garbage collections."""

    count: int = 0
    total: float = 0.0
    longest: float = 0.0
    _start: float = 0.0

    def record(self, phase: str, info: dict[str, Any]) -> None:
        """Record a collection, as a member of ``gc.callbacks``."""
        if phase == "start":
            self._start = perf_counter()
        elif self._start:
            seconds = perf_counter() - self._start
            self.count += 1
            self.total += seconds
            self.longest = max(self.longest, seconds)


MAX_RECORDS = 5000
"""Maximum number of records."""


@dataclass(frozen=True)
class Record:
    """Memory at one moment.

    Attributes:
        name: Name of the moment.
        step: Training batches before it.
        live: Live bytes, by the allocator's own counter.
        resident: Physical memory of the process, in bytes.
        parts: Bytes by category, in profiled steps.
    """

    name: str
    step: int
    live: int
    resident: int
    parts: Mapping[str, int] | None = None


@dataclass
class MemoryProfile:
    """All recorded data.

    Attributes:
        records: The newest 5000, oldest first.
        peaks: Peaks of each phase, one per profiled step, in bytes.
        exact: Whether the peaks were measured, not only memory at the two ends of a phase.
        source: The counter of live memory.
        pauses: Garbage collections during the run.
        modules: Tensors that autograd saved in one step, by module.
    """

    source: str = ""
    records: deque[Record] = field(default_factory=lambda: deque(maxlen=MAX_RECORDS))
    peaks: defaultdict[str, list[int]] = field(default_factory=lambda: defaultdict(list))
    exact: bool = True
    pauses: Pauses = field(default_factory=Pauses)
    modules: list[SavedBytes] = field(default_factory=list)

    def latest(self, name: str) -> Record:
        """Return the newest record of a name."""
        matching = [record for record in self.records if record.name == name]
        if not matching:
            known = ", ".join(dict.fromkeys(record.name for record in self.records)) or "none"
            raise KeyError(f"No record {name!r} to compare with; recorded so far: {known}.")
        return matching[-1]

    def phase_table(self) -> Report:
        ends = {"forward": "after_forward", "backward": "after_backward", "optimizer": "step_end"}
        rows = []
        for phase, peaks in self.peaks.items():
            at_end = [r for r in self.records if r.name == ends.get(phase) and r.parts is not None]
            parts = at_end[-1].parts if at_end else None
            rows.append(
                {
                    "phase": phase,
                    "peak MB": max(peaks) / MB,
                    "profiled": len(peaks),
                    **{f"{name} MB": parts[name] / MB for name in CATEGORIES if parts is not None},
                }
            )
        title = "MemoryProfiler: peaks by phase, and memory at its end by category"
        return Report(title, rows, self._notes())

    def module_table(self, top: int | None) -> Report:
        rows = [
            {
                "module": entry.module or "(root)",
                "class": entry.kind,
                "saved MB": entry.bytes / MB,
                "tensors": entry.tensors,
            }
            for entry in self.modules[:top]
        ]
        total = sum(entry.bytes for entry in self.modules)
        note = f"{total / MB:,.1f} MB in {len(self.modules)} modules."
        return Report("Activations saved for the backward pass of one step", rows, [note])

    def _notes(self) -> list[str]:
        notes = [f"Live memory as read from {self.source}."] if self.source else []
        if not self.exact:
            notes.append(
                "Peaks were measured only at the two ends of each phase, because operators cannot "
                "be counted (compiled parts, sharded parameters)."
            )
        if self.pauses.count:
            notes.append(
                f"Garbage collection: {self.pauses.count} times, {self.pauses.total:.3g} s, the "
                f"longest {1e3 * self.pauses.longest:.3g} ms."
            )
        return notes
