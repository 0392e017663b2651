"""The figure of a plan: what each block would hold, what it holds, and what that costs."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

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
    figure = new_figure(
        "ActivationCheckpointing",
        figsize=(12, 6.4 if planning else 3.6),
        dpi=110,
        layout="constrained",
    )
    figure.suptitle(report.title, x=0.01, ha="left", fontsize=12, weight="bold")
    names = [str(row["block"]) for row in report.rows]
    treatments = [_treatment(str(row["policy"])) for row in report.rows]
    if planning is None:
        axes = figure.add_subplot()
        sizes = [row["parameters"] for row in report.rows]
        _draw_bars(axes, names, sizes, treatments, "parameters")
        return figure
    grid = figure.add_gridspec(2, 2, width_ratios=[4, 1])
    ran = [row for row in report.rows if "order" in row]
    ran.sort(key=lambda row: row["order"])
    names = [str(row["block"]) for row in ran]
    treatments = [_treatment(str(row["policy"])) for row in ran]
    keeping = [row["keeping MB"] for row in ran]
    above = figure.add_subplot(grid[0, 0])
    _draw_bars(above, names, keeping, treatments, "MB that keeping it holds")
    seconds = [row["recomputing ms"] for row in ran]
    below = figure.add_subplot(grid[1, 0])
    _draw_bars(below, names, seconds, treatments, "ms to recompute it")
    _draw_peaks(figure.add_subplot(grid[:, 1]), planning)
    return figure


def _treatment(policy: str) -> str:
    return "recomputed" if policy.startswith("recomputed with") else policy


def _draw_bars(
    axes: Axes, names: list[str], heights: list[float], treatments: list[str], label: str
) -> None:
    for treatment, colour in COLOURS.items():
        places = [place for place, found in enumerate(treatments) if found == treatment]
        axes.bar(places, [heights[place] for place in places], color=colour,
                 label=f"{treatment} ({len(places)})")  # fmt: skip
    every = max(1, math.ceil(len(names) / NAMED))
    ticks = list(range(0, len(names), every))
    axes.set_xticks(ticks, [names[tick][-22:] for tick in ticks], rotation=55, ha="right",
                    rotation_mode="anchor", fontsize=7.5)  # fmt: skip
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
    colours = [GREY, COLOURS["recomputed"], COLOURS["kept"]]
    axes.bar(range(3), list(peaks.values()), color=colours)
    if math.isfinite(planning.budget):
        axes.axhline(planning.budget / MB, color=RED, ls="--", lw=1, label="budget")
        axes.legend(fontsize=8)
    axes.set_ylim(0, 1.15 * max(peaks.values()))  # a budget far above says enough by its absence
    axes.set_xticks(range(3), list(peaks), rotation=30, ha="right", fontsize=8)
    axes.set_ylabel("peak of activations, MB")
    axes.grid(axis="y", alpha=0.25)
