"""The figure of a run's memory: by what it is taken over time, and peaks. Measures nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightning_opt.core.figures import new_figure
from lightning_opt.core.memory import MB
from lightning_opt.memory.profiler.record import MemoryProfile, Record

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = {
    "parameters": "#1f4e79",
    "gradients": "#2e8b57",
    "optimizer": "#b8860b",
    "activations": "#c0504d",
    "other": "#bfbfbf",
}
STEPS = 12
"""Profiled steps that are drawn, evenly from first to last: more would be a blur."""


def draw_profile(profile: MemoryProfile) -> Figure:
    """Draw what memory is taken by at the turns of the profiled steps, and peaks by phase.

    Raises:
        ImportError: Without matplotlib; the message names the extra.
    """
    figure = new_figure("MemoryProfiler", figsize=(12, 7.5), dpi=110, layout="constrained")
    above, below = figure.subplots(2, 1, height_ratios=[3, 2])
    _draw_parts(above, _selection(list(profile.records)))
    _draw_peaks(below, profile)
    return figure


def _selection(records: list[Record]) -> list[Record]:
    steps = list(dict.fromkeys(record.step for record in records if record.parts is not None))
    every = max(1, -(-len(steps) // STEPS))
    chosen = set(steps[::-1][::every])
    return [record for record in records if record.step in chosen and record.parts is not None]


def _draw_parts(axes: Axes, records: list[Record]) -> None:
    """Draw a stack at each record; between steps a gap, of which nothing is known."""
    places, place = [], 0
    for number, record in enumerate(records):
        place += 1 + (number > 0 and record.step != records[number - 1].step)
        places.append(place)
    bottom = [0.0] * len(records)
    for name, colour in COLOURS.items():
        parts = [record.parts[name] / MB if record.parts else 0.0 for record in records]
        axes.bar(places, parts, bottom=bottom, width=1.0, color=colour, label=name)
        bottom = [low + high for low, high in zip(bottom, parts, strict=True)]
    starts = [(p, r) for p, r in zip(places, records, strict=True) if r.name == "step_start"]
    axes.set_xticks([p for p, _ in starts], [f"step {r.step}" for _, r in starts], fontsize=8)
    if len(starts) == 1:
        names = [record.name.replace("_", "\n") for record in records]
        axes.set_xticks(places, names, fontsize=8)
    axes.set_title("Live memory at the turns of profiled steps", loc="left", fontsize=11)
    axes.set_ylabel("MB")
    axes.grid(axis="y", alpha=0.25)
    if records:
        axes.legend(fontsize=8, ncols=5, loc="upper left")


def _draw_peaks(axes: Axes, profile: MemoryProfile) -> None:
    """Draw the peak of each phase, one point a profiled step."""
    for phase, peaks in profile.peaks.items():
        axes.plot([peak / MB for peak in peaks], marker="o", ms=3, lw=1, label=phase)
    axes.set_title("Peak by phase", loc="left", fontsize=11)
    axes.set_xlabel("profiled step")
    axes.set_ylabel("MB")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.25)
    if profile.peaks:
        axes.legend(fontsize=8)
