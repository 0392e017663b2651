"""What a profiler has seen: records in order, peaks by phase, and the tables made of them."""

from __future__ import annotations

import itertools
import statistics
from collections import deque
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from lightning_opt.core.measure.memory import MB
from lightning_opt.core.output.report import Report
from lightning_opt.memory.profiler.phase_peaks import CATEGORIES
from lightning_opt.memory.profiler.saved_by_module import SavedBytes

RECORDS = 5000
"""Records that are kept."""


@dataclass(frozen=True)
class Record:
    """Memory at one moment.

    Attributes:
        name: What it was recorded as.
        step: Batches of training before it.
        seconds: Since the profiler began.
        live: Bytes that are live, by the allocator's own counter.
        resident: Physical memory of the process, in bytes.
        reserved: Bytes that the CUDA allocator holds; 0 elsewhere.
        parts: Bytes by category, if that was known.
    """

    name: str
    step: int
    seconds: float
    live: int
    resident: int
    reserved: int = 0
    parts: Mapping[str, int] | None = None


@dataclass
class MemoryProfile:
    """Everything that was recorded.

    Attributes:
        records: The newest 5000, oldest first.
        peaks: For each phase its peaks, one a profiled step, in bytes.
        exact: Phases whose peak was followed within, not only at its ends.
        source: Where live memory was read.
        pauses: Seconds of each garbage collection.
        allocator: Of the CUDA allocator: retries, out-of-memory errors, fragmentation.
        modules: What autograd saved in one step, by module.
    """

    source: str = ""
    records: deque[Record] = field(default_factory=lambda: deque(maxlen=RECORDS))
    peaks: dict[str, list[int]] = field(default_factory=dict)
    exact: dict[str, bool] = field(default_factory=dict)
    pauses: list[float] = field(default_factory=list)
    allocator: dict[str, float] = field(default_factory=dict)
    modules: list[SavedBytes] = field(default_factory=list)

    def add_peak(self, phase: str, peak: int, exact: bool) -> None:
        """Add a peak of a phase; of several in one step the caller gives the largest."""
        self.peaks.setdefault(phase, []).append(peak)
        self.exact[phase] = self.exact.get(phase, True) and exact

    def latest(self, name: str, before: Record | None = None) -> Record:
        """Return the newest record of a name, or the newest before another one.

        Raises:
            KeyError: If there is none.
        """
        earlier = itertools.takewhile(lambda record: record is not before, self.records)
        found = [record for record in earlier if record.name == name]
        if not found:
            known = ", ".join(dict.fromkeys(record.name for record in self.records)) or "none"
            raise KeyError(f"No record {name!r} to compare with; recorded so far: {known}.")
        return found[-1]

    def delta(self, first: str, second: str) -> int:
        """Return by how many bytes live memory grew from the one record to the next other."""
        end = self.latest(second)
        return end.live - self.latest(first, before=end).live

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain types, bytes as they are."""
        return {
            "source": self.source,
            "records": [asdict(record) for record in self.records],
            "peaks": self.peaks,
            "peaks_followed_within": self.exact,
            "gc_seconds": self.pauses,
            "allocator": self.allocator,
            "modules": [asdict(entry) for entry in self.modules],
        }

    def phase_table(self) -> Report:
        """Return one row a phase, with the memory at its end by category."""
        ends = {"forward": "after_forward", "backward": "after_backward", "optimizer": "step_end"}
        rows = []
        for phase, peaks in self.peaks.items():
            at_end = [r for r in self.records if r.name == ends.get(phase) and r.parts is not None]
            parts = at_end[-1].parts if at_end else None
            rows.append(
                {
                    "phase": phase,
                    "peak MB": max(peaks) / MB,
                    "median peak MB": statistics.median(peaks) / MB,
                    "profiled": len(peaks),
                    **{f"{name} MB": parts[name] / MB for name in CATEGORIES if parts is not None},
                }
            )
        return Report("MemoryProfiler: peaks by phase, and what is held at its end", rows,
                      self._notes())  # fmt: skip

    def module_table(self, top: int | None = 20) -> Report:
        """Return what autograd saved in one step, the largest modules first."""
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
        return Report("Activations saved for the backward pass of one step", rows,
                      [f"{total / MB:,.1f} MB in {len(self.modules)} modules."])  # fmt: skip

    def _notes(self) -> list[str]:
        notes = [f"Live memory as read from {self.source}."] if self.source else []
        rough = [phase for phase, exact in self.exact.items() if not exact]
        if rough:
            notes.append(
                f"Peaks of {', '.join(rough)} are those of their two ends: within, there was "
                "nothing to count (compiled parts, sharded parameters)."
            )
        if self.pauses:
            notes.append(
                f"Garbage collection: {len(self.pauses)} times, {sum(self.pauses):.3g} s, the "
                f"longest {1e3 * max(self.pauses):.3g} ms."
            )
        notes += [f"CUDA allocator: {name} {value:g}." for name, value in self.allocator.items()]
        return notes
