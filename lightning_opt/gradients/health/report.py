"""Present a run's gradient health: summary, table of layers and figure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from textwrap import shorten, wrap
from typing import TYPE_CHECKING, Any, NamedTuple

from lightning_opt.core.output.loggers import new_figure
from lightning_opt.gradients.health.diagnosis import CRITICAL, WARNING, Issue
from lightning_opt.gradients.health.layer_stats import LayerStats

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Timelines = Mapping[int, Sequence[Mapping[str, Any]]]

COLOURS = {"healthy": "#1a7f37", WARNING: "#b26a00", CRITICAL: "#c62828"}
LINE, SOFT = "#1f4e79", "#9dc3e6"
WIDTH = 165  # characters per line of the figure's title
NAMED = 40
"""Layers that can be named on one axis; of more, every n-th is."""


class HealthSummary(NamedTuple):
    """The state of a run's gradients.

    ``status`` is ``"healthy"``, ``"warning"`` or ``"critical"``.
    """

    status: str
    sentence: str

    def __str__(self) -> str:
        return f"{self.status}: {self.sentence}"


def summarize(
    issues: Sequence[Issue], steps: int, reports: int, nonfinite: int = 0
) -> HealthSummary:
    """Summarize the issues, the worst first, in a status and one sentence."""
    if issues:
        worst = issues[0]
        status = "critical" if worst.severity == CRITICAL else "warning"
        rest = f"; {len(issues) - 1} more" if len(issues) > 1 else ""
        sentence = f"{worst.type} at {worst.where}: {worst.detail}{rest}"
        return HealthSummary(status, sentence)
    if nonfinite:
        sentence = f"no issue now, but {nonfinite} of {steps} steps had gradients of NaN or Inf"
        return HealthSummary("warning", sentence)
    if not reports:
        return HealthSummary("healthy", f"nothing was found yet; no report in {steps} steps")
    return HealthSummary("healthy", f"no issue in {steps} steps")


def layer_rows(layers: Sequence[LayerStats], issues: Sequence[Issue]) -> list[dict[str, Any]]:
    """Return one row per layer, the worst first.

    Layers with critical issues come first, then layers with other issues, then the rest by the
    distance of their RMS, in orders of magnitude, from the median.
    """
    flows = [layer.flow for layer in layers if layer.trained and layer.flow]
    middle = math.log(statistics.median(flows)) if flows else 0.0

    def rank(layer: LayerStats) -> tuple[int, int, int, float]:
        own = [issue for issue in issues if layer.name in (issue.place, *issue.others)]
        distance = abs(math.log(layer.flow) - middle) if layer.trained and layer.flow else 0.0
        critical = sum(issue.severity == CRITICAL for issue in own)
        named = sum(layer.name == issue.place for issue in own)
        return (-critical, -len(own), -named, -distance)

    rows = []
    for layer in sorted(layers, key=rank):
        state = ", ".join(i.type for i in issues if layer.name in (i.place, *i.others))
        rows.append(
            {
                "layer": layer.name,
                "elements": sum(p.numel for p in layer.parameters),
                "rms": layer.flow if layer.trained else None,
                "max": layer.max,
                "zeros": None if layer.zeros is None else f"{layer.zeros:.1%}",
                "update": layer.update,
                "noise": layer.noise if layer.trained else None,
                "state": state or ("ok" if layer.trained else layer.status),
            }
        )
    return rows


def draw_health(
    summary: HealthSummary,
    issues: Sequence[Issue],
    layers: Sequence[LayerStats],
    timelines: Timelines,
    exploding: float,
    vanishing: float,
) -> Figure:
    """Draw summary, gradient flow by layer, total norm over time, and both thresholds."""
    figure = new_figure("GradientHealth", figsize=(13, 8.6), dpi=110, layout="constrained")
    flow, norm = figure.subplots(2, 1, height_ratios=[3, 2.6])
    lines = [summary.status.upper(), *(shorten(str(issue), WIDTH) for issue in issues[:2])]
    lines += wrap(f"What to do: {issues[0].advice}", WIDTH) if issues else [summary.sentence]
    figure.suptitle("\n".join(lines), x=0.01, ha="left", fontsize=11, color=COLOURS[summary.status])
    _draw_flow(flow, [layer for layer in layers if layer.trained], issues, timelines, vanishing)
    _draw_norm(norm, timelines, exploding)
    for panel in (flow, norm):
        panel.grid(alpha=0.25)
        if panel.get_legend_handles_labels()[0]:
            panel.legend(fontsize=8)
    return figure


def _draw_flow(
    axes: Axes,
    layers: Sequence[LayerStats],
    issues: Sequence[Issue],
    timelines: Timelines,
    vanishing: float,
) -> None:
    """Draw the RMS of each layer with its range over the run, and mark layers with issues."""
    entries = [entry["flow"] for timeline in timelines.values() for entry in timeline]
    places = range(len(layers))
    past = [[flow[x.name] for flow in entries if flow.get(x.name)] or [math.nan] for x in layers]
    flows = [layer.flow or math.nan for layer in layers]
    low, high = list(map(min, past)), list(map(max, past))
    axes.fill_between(places, low, high, color=SOFT, alpha=0.5, lw=0, label="range over the run")
    axes.plot(places, flows, color=LINE, lw=1.2, marker="o", label="at the last report")
    known = [value for value in (*low, *flows) if value > 0]  # not NaN
    if known:
        axes.set_yscale("log")
        if min(known) < 100 * vanishing:
            label = f"vanishing below {vanishing:.0e}"
            axes.axhline(vanishing, color=COLOURS[CRITICAL], ls="--", lw=1, label=label)
    floor = axes.get_ylim()[0]
    for severity in (WARNING, CRITICAL):
        hit = {p for i in issues if i.severity == severity for p in (i.place, *i.others)}
        marked = {x: layer.flow or floor for x, layer in enumerate(layers) if layer.name in hit}
        if marked:
            axes.scatter(
                list(marked), list(marked.values()), 70, COLOURS[severity], zorder=4, label=severity
            )
    title = "Gradient flow: RMS of each layer's gradient, from the inputs (left) to the loss"
    axes.set_title(title, loc="left", fontsize=11)
    every = max(1, math.ceil(len(layers) / NAMED))
    names = [x.name if len(x.name) <= 22 else "…" + x.name[-21:] for x in layers[::every]]
    ticks = list(places)[::every]
    axes.set_xticks(ticks, names, rotation=55, ha="right", rotation_mode="anchor", fontsize=7.5)


def _draw_norm(axes: Axes, timelines: Timelines, exploding: float) -> None:
    highest = 0.0
    for index, entries in timelines.items():
        steps, low, median, high = (
            [entry[key] for entry in entries] for key in ("step", "low", "median", "high")
        )
        label = "median" if len(timelines) == 1 else f"optimizer {index}"
        (line,) = axes.plot(steps, median, marker="o", ms=3, label=label)
        axes.fill_between(steps, low, high, alpha=0.25, color=line.get_color(), lw=0)
        highest = max([highest, *high])
    if highest > 0:
        axes.set_yscale("log")
    if highest > exploding / 10:
        label = f"exploding above {exploding:g}"
        axes.axhline(exploding, color=COLOURS[CRITICAL], ls="--", lw=1, label=label)
    axes.set_title("Total norm over time", loc="left", fontsize=11)
    axes.set_xlabel("optimizer step")
