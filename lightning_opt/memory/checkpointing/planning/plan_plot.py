"""The figure of a plan: what each block would hold, what is done with it, and what that costs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from lightning_opt.core.memory import MB
from lightning_opt.core.report import Report
from lightning_opt.memory.checkpointing.planning.batch_planning import Planning
from lightning_opt.memory.figures import new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = {"kept": "#1f4e79", "recomputed in part": "#b26a00", "recomputed": "#9dc3e6"}
RED, GREY = "#c62828", "#8a8a8a"
NAMED = 40
"""Blocks that can be named on one axis; of more, every n-th is."""


def draw_plan(report: Report, planning: Planning | None) -> Figure:
    """Draw the blocks in order: with bytes, time and peaks where a plan was made.

    Args:
        report: One row a block, as ``describe`` returns it.
        planning: The measurements of ``"auto"``.

    Raises:
        ImportError: Without matplotlib; the message names the extra.
    """
    size = (12, 6.4 if planning else 3.6)
    figure = new_figure("ActivationCheckpointing", figsize=size, dpi=110, layout="constrained")
    figure.suptitle(report.title, x=0.01, ha="left", fontsize=12, weight="bold")
    if planning is None:
        _draw_blocks(figure.add_subplot(), report.rows, "parameters", "parameters")
        return figure
    grid = figure.add_gridspec(2, 2, width_ratios=[4, 1])
    ran = sorted((row for row in report.rows if "order" in row), key=lambda row: row["order"])
    _draw_blocks(figure.add_subplot(grid[0, 0]), ran, "keeping MB", "MB that keeping it holds")
    _draw_blocks(figure.add_subplot(grid[1, 0]), ran, "recomputing ms", "ms to recompute it")
    _draw_peaks(figure.add_subplot(grid[:, 1]), planning)
    return figure


def _draw_blocks(axes: Axes, rows: Sequence[dict[str, Any]], key: str, label: str) -> None:
    for treatment, colour in COLOURS.items():
        # One that is joined with others into a segment names them.
        bars = {
            place: row[key]
            for place, row in enumerate(rows)
            if str(row["policy"]).partition(" with ")[0] == treatment
        }
        axes.bar(list(bars), list(bars.values()), color=colour, label=f"{treatment} ({len(bars)})")
    ticks = range(0, len(rows), max(1, math.ceil(len(rows) / NAMED)))
    names = [str(rows[tick]["block"])[-22:] for tick in ticks]
    axes.set_xticks(ticks, names, rotation=55, ha="right", rotation_mode="anchor", fontsize=7.5)
    axes.set_ylabel(label)
    axes.grid(axis="y", alpha=0.25)
    axes.legend(fontsize=8)


def _draw_peaks(axes: Axes, planning: Planning) -> None:
    """Draw the peak of activations without the plan, as planned, and as measured."""
    peaks = {
        "without": planning.planner.unchecked_peak / MB,
        "predicted": planning.outcome.solution.peak / MB,
        "measured": planning.outcome.peak / MB,
    }
    axes.bar(range(3), list(peaks.values()), color=[GREY, COLOURS["recomputed"], COLOURS["kept"]])
    if math.isfinite(planning.budget):
        axes.axhline(planning.budget / MB, color=RED, ls="--", lw=1, label="budget")
        axes.legend(fontsize=8)
    axes.set_ylim(0, 1.15 * max(peaks.values()))  # a budget far above says enough by its absence
    axes.set_xticks(range(3), list(peaks), rotation=30, ha="right", fontsize=8)
    axes.set_ylabel("peak of activations, MB")
    axes.grid(axis="y", alpha=0.25)
