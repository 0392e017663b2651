"""The data of a memory profile, with its tables and figure."""

from __future__ import annotations

import itertools
import statistics
from collections import deque
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from lightning_opt.core.measure.memory import MB
from lightning_opt.core.output.loggers import new_figure
from lightning_opt.core.output.report import Report
from lightning_opt.memory.profiler.measures import CATEGORIES, SavedBytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

RECORDS = 5000
"""Maximum number of records."""

COLOURS = ("#1f4e79", "#2e8b57", "#b8860b", "#c0504d", "#bfbfbf")
STEPS = 12
"""Maximum number of profiled steps in the figure, evenly spaced."""


@dataclass(frozen=True)
class Record:
    """Memory at one moment.

    Attributes:
        name: Name of the moment.
        step: Training batches before it.
        seconds: Since the profiler started.
        live: Live bytes, by the allocator's own counter.
        resident: Physical memory of the process, in bytes.
        reserved: Bytes that the CUDA allocator holds; 0 elsewhere.
        parts: Bytes by category, in profiled steps.
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
    """All recorded data.

    Attributes:
        records: The newest 5000, oldest first.
        peaks: Peaks of each phase, one per profiled step, in bytes.
        exact: Whether the peaks of a phase were measured throughout, not only at its ends.
        source: The counter of live memory.
        pauses: Seconds of each garbage collection.
        allocator: State of the CUDA allocator: reserved MB, fragmentation and retries.
        modules: Tensors that autograd saved in one step, by module.
    """

    source: str = ""
    records: deque[Record] = field(default_factory=lambda: deque(maxlen=RECORDS))
    peaks: dict[str, list[int]] = field(default_factory=dict)
    exact: dict[str, bool] = field(default_factory=dict)
    pauses: list[float] = field(default_factory=list)
    allocator: dict[str, float] = field(default_factory=dict)
    modules: list[SavedBytes] = field(default_factory=list)

    def add_peak(self, phase: str, peak: int, exact: bool) -> None:
        """Add the peak of a phase in one step."""
        self.peaks.setdefault(phase, []).append(peak)
        self.exact[phase] = self.exact.get(phase, True) and exact

    def latest(self, name: str, before: Record | None = None) -> Record:
        """Return the newest record of a name, optionally the newest before another record.

        Raises:
            KeyError: If there is none.
        """
        earlier = itertools.takewhile(lambda record: record is not before, self.records)
        found = [record for record in earlier if record.name == name]
        if not found:
            known = ", ".join(dict.fromkeys(record.name for record in self.records)) or "none"
            raise KeyError(f"No record {name!r} to compare with; recorded so far: {known}.")
        return found[-1]

    def to_dict(self) -> dict[str, Any]:
        """Return all data as plain types, memory in bytes."""
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
        """Return one row per phase, with the memory at its end by category."""
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
        title = "MemoryProfiler: peaks by phase, and memory at its end by category"
        return Report(title, rows, self._notes())

    def module_table(self, top: int | None = 20) -> Report:
        """Return one row per module with the tensors that autograd saved, the largest first."""
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
        rough = [phase for phase, exact in self.exact.items() if not exact]
        if rough:
            notes.append(
                f"Peaks of {', '.join(rough)} were measured only at their two ends, because "
                "operators cannot be counted there (compiled parts, sharded parameters)."
            )
        if self.pauses:
            notes.append(
                f"Garbage collection: {len(self.pauses)} times, {sum(self.pauses):.3g} s, the "
                f"longest {1e3 * max(self.pauses):.3g} ms."
            )
        notes += [f"CUDA allocator: {name} {value:g}." for name, value in self.allocator.items()]
        return notes


def draw_profile(profile: MemoryProfile) -> Figure:
    """Draw memory by category over the profiled steps, and peaks by phase.

    Raises:
        ImportError: Without matplotlib; the message names the extra.
    """
    figure = new_figure("MemoryProfiler", figsize=(12, 7.5), dpi=110, layout="constrained")
    above, below = figure.subplots(2, 1, height_ratios=[3, 2])
    records = [record for record in profile.records if record.parts is not None]
    steps = list(dict.fromkeys(record.step for record in records))
    shown = steps[:: -max(1, -(-len(steps) // STEPS))]
    _draw_parts(above, [record for record in records if record.step in shown])
    for phase, peaks in profile.peaks.items():
        below.plot([peak / MB for peak in peaks], marker="o", ms=3, lw=1, label=phase)
    below.set_title("Peak by phase", loc="left", fontsize=11)
    below.set_xlabel("profiled step")
    below.set_ylim(bottom=0)
    for axes in (above, below):
        axes.set_ylabel("MB")
        axes.grid(axis="y", alpha=0.25)
        if profile.peaks:
            axes.legend(fontsize=8, ncols=5, loc="upper left")
    return figure


def _draw_parts(axes: Axes, records: list[Record]) -> None:
    """Draw stacked categories at each record, with a tick where a step starts."""
    parts = [[(record.parts or {})[name] / MB for record in records] for name in CATEGORIES]
    places = range(len(records))
    axes.stackplot(places, parts, labels=CATEGORIES, colors=COLOURS)
    starts = [place for place in places if records[place].name == "step_start"]
    axes.set_xticks(starts, [f"step {records[place].step}" for place in starts], fontsize=8)
    axes.set_title("Live memory in profiled steps", loc="left", fontsize=11)
