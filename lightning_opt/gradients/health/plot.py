"""The figure of a run's gradients: their flow by layer, and over time. Draws, measures nothing."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from textwrap import shorten, wrap
from typing import TYPE_CHECKING, Any

from lightning_opt.gradients.health.diagnosis import Limits
from lightning_opt.gradients.health.issues import CRITICAL, Issue
from lightning_opt.gradients.health.report import HealthSummary
from lightning_opt.gradients.health.vitals import LayerVitals

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = {"healthy": "#1a7f37", "warning": "#b26a00", "critical": "#c62828"}
LINE, SOFT, GREY = "#1f4e79", "#9dc3e6", "#8a8a8a"
WIDTH = 165  # characters of a line of the verdict
NAMED = 40
"""Layers that can be named on one axis; of more, every n-th is."""


def draw_health(
    summary: HealthSummary,
    issues: Sequence[Issue],
    layers: Sequence[LayerVitals],
    timelines: Mapping[int, Sequence[Mapping[str, Any]]],
    limits: Limits,
) -> Figure:
    """Draw verdict, gradient flow by layer, flow over time, total norm and update ratios.

    Args:
        summary: The verdict.
        issues: What is wrong, the worst first.
        layers: In forward order.
        timelines: For each optimizer, one entry a report.
        limits: The thresholds to draw.

    Raises:
        ImportError: Without matplotlib; the message names the extra.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            "The figure of GradientHealth needs matplotlib: pip install 'lightning-opt[plots]'."
        ) from error
    trained = [layer for layer in layers if layer.trained]
    figure = Figure(figsize=(13, 8.6), dpi=110)
    grid = figure.add_gridspec(
        3, 1, height_ratios=[1.0, 3, 2.6], hspace=0.45,
        left=0.065, right=0.975, top=0.975, bottom=0.06,
    )  # fmt: skip
    _draw_verdict(figure.add_subplot(grid[0]), summary, issues)
    _draw_flow(figure.add_subplot(grid[1]), trained, issues, timelines, limits)
    below = grid[2].subgridspec(1, 3, wspace=0.33)
    _draw_norm(figure.add_subplot(below[0]), timelines, limits)
    _draw_history(figure, figure.add_subplot(below[1]), trained, timelines)
    _draw_updates(figure.add_subplot(below[2]), trained)
    return figure


def _draw_verdict(axes: Axes, summary: HealthSummary, issues: Sequence[Issue]) -> None:
    axes.axis("off")
    axes.text(0.0, 1.0, summary.status.upper(), fontsize=20, weight="bold", va="top",
              color=COLOURS[summary.status])  # fmt: skip
    lines = [shorten(str(issue), WIDTH) for issue in issues[:2]] or [summary.sentence]
    if len(issues) > 2:
        lines[-1] += f" And {len(issues) - 2} more: see the report."
    lines += wrap(f"What to do: {issues[0].advice}", WIDTH) if issues else []
    axes.text(0.0, 0.55, "\n".join(lines), fontsize=9.5, va="top", linespacing=1.4)


def _draw_flow(
    axes: Axes,
    layers: Sequence[LayerVitals],
    issues: Sequence[Issue],
    timelines: Mapping[int, Sequence[Mapping[str, Any]]],
    limits: Limits,
) -> None:
    """Draw the RMS of each layer, with the range it had over the run, and what is wrong in red."""
    places = range(len(layers))
    past = [_past(layer.name, timelines) for layer in layers]
    low, high = zip(*((min(p, default=math.nan), max(p, default=math.nan)) for p in past),
                    strict=True) if past else ((), ())  # fmt: skip
    flows = [layer.flow or math.nan for layer in layers]
    axes.fill_between(places, low, high, color=SOFT, alpha=0.5, lw=0, label="range over the run")
    axes.plot(places, flows, color=LINE, lw=1.2, zorder=2)
    axes.scatter(places, flows, s=26, color=LINE, zorder=3, label="at the last report")
    known = [value for pair in (low, high, flows) for value in pair if value > 0]  # NaN is not
    if known:
        axes.set_yscale("log")
    else:
        axes.text(0.5, 0.5, "no finite gradient was seen", ha="center", transform=axes.transAxes)
    for severity, label in ((CRITICAL, "critical"), ("warning", "warning")):
        hit = {p for i in issues if i.severity == severity for p in (i.place, *i.others)}
        marked = [(x, layer) for x, layer in enumerate(layers) if layer.name in hit]
        floor = axes.get_ylim()[0]
        ys = [layer.flow or floor for _, layer in marked]
        axes.scatter([x for x, _ in marked], ys, s=70, color=COLOURS[severity], zorder=4 if
                     severity == CRITICAL else 3.5, label=label if marked else None,
                     edgecolor="white", clip_on=False)  # fmt: skip
    if known and min(known) < 100 * limits.vanishing:
        bottom, red = axes.get_ylim()[0], COLOURS["critical"]
        axes.axhspan(bottom, limits.vanishing, color=red, alpha=0.07, lw=0)
        axes.axhline(limits.vanishing, color=red, ls="--", lw=1)
        axes.set_ylim(bottom=bottom)
        axes.text(0.995, limits.vanishing, f"vanishing: below {limits.vanishing:.0e} ",
                  color=red, fontsize=8.5, ha="right", va="top",
                  transform=axes.get_yaxis_transform())  # fmt: skip
    title = "Gradient flow: RMS of each layer's gradient, from the inputs (left) to the loss"
    axes.set_title(title, loc="left", fontsize=11)
    axes.set_ylabel("gradient RMS")
    _name_layers(axes, layers)
    axes.grid(axis="y", alpha=0.25)
    axes.legend(loc="best", fontsize=8, frameon=True)


def _draw_norm(
    axes: Axes, timelines: Mapping[int, Sequence[Mapping[str, Any]]], limits: Limits
) -> None:
    """Draw median and range of the total norm over time."""
    highest = 0.0
    for index, entries in timelines.items():
        steps = [entry["step"] for entry in entries]
        label = "median" if len(timelines) == 1 else f"optimizer {index}"
        line = axes.plot(steps, [entry["median"] for entry in entries], marker="o", ms=3,
                         label=label, color=LINE if len(timelines) == 1 else None)[0]  # fmt: skip
        axes.fill_between(steps, [entry["low"] for entry in entries],
                          [entry["high"] for entry in entries], alpha=0.25,
                          color=line.get_color(), lw=0)  # fmt: skip
        highest = max([highest, *(entry["high"] for entry in entries)])
    if highest > 0:
        axes.set_yscale("log")
    if highest > limits.exploding / 10:
        axes.axhline(limits.exploding, color=COLOURS["critical"], ls="--", lw=1,
                     label=f"exploding above {limits.exploding:g}")  # fmt: skip
    axes.set_title("Total norm over time", loc="left", fontsize=11)
    axes.set_xlabel("optimizer step")
    axes.grid(alpha=0.25)
    if timelines:
        axes.legend(fontsize=8)


def _draw_history(
    figure: Figure,
    axes: Axes,
    layers: Sequence[LayerVitals],
    timelines: Mapping[int, Sequence[Mapping[str, Any]]],
) -> None:
    """Draw every layer's RMS over time, as colours."""
    steps = sorted({entry["step"] for entries in timelines.values() for entry in entries})
    axes.set_title("Flow over time: log10 of the RMS", loc="left", fontsize=11)
    if not steps or not layers:
        axes.axis("off")
        return
    at = {step: column for column, step in enumerate(steps)}
    image = [[math.nan] * len(steps) for _ in layers]
    for row, layer in enumerate(layers):
        for entries in timelines.values():
            for entry in entries:
                if entry["flow"].get(layer.name):
                    image[row][at[entry["step"]]] = math.log10(entry["flow"][layer.name])
    drawn = axes.imshow(image, aspect="auto", cmap="viridis", interpolation="nearest")
    figure.colorbar(drawn, ax=axes, fraction=0.05, pad=0.03)
    ticks = sorted({0, len(steps) // 2, len(steps) - 1})
    axes.set_xticks(ticks, [str(steps[tick]) for tick in ticks])
    axes.set_yticks([0, len(layers) - 1], ["input", "loss"])
    axes.set_xlabel("optimizer step")


def _draw_updates(axes: Axes, layers: Sequence[LayerVitals]) -> None:
    """Draw how much one step changes each layer; healthy training is often near 1e-3."""
    updates = [layer.update or math.nan for layer in layers]
    axes.plot(range(len(layers)), updates, marker="o", ms=3, lw=1, color=LINE)
    if any(value == value for value in updates):
        axes.set_yscale("log")
    axes.axhline(1e-3, color=GREY, ls=":", lw=1, label="1e-3, a usual value")
    axes.set_title("Update-to-weight ratio", loc="left", fontsize=11)
    axes.set_xlabel("layer, inputs to loss")
    axes.grid(alpha=0.25)
    axes.legend(fontsize=8)


def _past(name: str, timelines: Mapping[int, Sequence[Mapping[str, Any]]]) -> list[float]:
    return [
        entry["flow"][name]
        for entries in timelines.values()
        for entry in entries
        if entry["flow"].get(name)
    ]


def _name_layers(axes: Axes, layers: Sequence[LayerVitals]) -> None:
    every = max(1, math.ceil(len(layers) / NAMED))
    ticks = list(range(0, len(layers), every))
    names = [layers[tick].name for tick in ticks]
    short = [name if len(name) <= 22 else "…" + name[-21:] for name in names]
    axes.set_xticks(ticks, short, rotation=55, ha="right", rotation_mode="anchor", fontsize=7.5)
    axes.margins(x=0.015)
