"""The figure of a run's memory: by what it is taken over time, and peaks. Measures nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightning_opt.core.measure.memory import MB
from lightning_opt.core.output.loggers import new_figure
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
    """Draw a stack at each record: each step is named where it begins."""
    parts = [[(record.parts or {})[name] / MB for record in records] for name in COLOURS]
    places = range(len(records))
    axes.stackplot(places, parts, labels=list(COLOURS), colors=list(COLOURS.values()))
    starts = [place for place in places if records[place].name == "step_start"]
    axes.set_xticks(starts, [f"step {records[place].step}" for place in starts], fontsize=8)
    axes.set_title("Live memory at the turns of profiled steps", loc="left", fontsize=11)
