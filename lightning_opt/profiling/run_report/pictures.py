"""Draws the pictures of a run report. ``page.py`` runs this file as a script in its own process.

It needs matplotlib (the extra ``plots``).
"""

from __future__ import annotations

import io
import json
import math
import re
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from numpy.lib.stride_tricks import sliding_window_view

Points = Sequence[tuple[float, float]]

STYLE = Path(__file__).with_name("report.mplstyle")

MAX_NAME = 41  # characters of a layer's name

BLUE, ORANGE, GREEN, PURPLE, RED, TEAL, OLIVE, GREY = (f"C{number}" for number in range(8))

EVENTS = {
    "skip": ("skipped", ORANGE, "v"), "backoff": ("learning rate reduced", OLIVE, "v"),
    "rollback": ("rolled back", RED, "<"), "raise": ("stopped by a fault", RED, "X"),
    "split": ("out of memory, batch split", PURPLE, "s"),
    "out of memory": ("out of memory", PURPLE, "X"),
}  # fmt: skip
"""Label, colour and marker of an event, by its action or kind."""


class Panel(NamedTuple):
    """One plot of a picture.

    Attributes:
        unit: The label of the y axis; empty for a heat map with one row per series.
        lines: Line style by key pattern.
        bands: Label and colour of each stacked band, by key pattern. The first match is used.
    """

    unit: str
    lines: Mapping[str, str] = {}
    bands: Mapping[str, tuple[str, str]] = {}


LOSS = Panel("loss", {"loss": "-", "validation/.*": ".--"})
NORM = Panel("gradient norm", {"(health|clip)/.*norm": "-", "clip/.*threshold": "--"})
TIME = Panel("ms per step", bands={
    "time/data_wait_ms": ("data", ORANGE), "time/transfer_ms": ("transfer", OLIVE),
    "time/(forward|loss|forward_and_loss)_ms": ("forward", BLUE),
    "time/backward_ms": ("backward", TEAL),
    "time/(gradient_communication|waiting_for_ranks)_ms": ("communication", RED),
    "time/(clipping|optimizer_step|zeroing_.*|LR_scheduler)_ms": ("optimizer", GREEN),
    "time/callback_.*_ms": ("callbacks", PURPLE), "time/(?!step_).*_ms": ("Lightning", GREY),
})  # fmt: skip
MEMORY = Panel("MB", {"profile/peak.*_mb": ".-", "profile/reserved_mb": "-"}, {
    "profile/parameters_mb": ("parameters", BLUE), "profile/gradients_mb": ("gradients", TEAL),
    "profile/optimizer_mb": ("optimizer", GREEN), "profile/other_mb": ("other", GREY),
    "profile/activations_mb": ("activations", ORANGE),
})  # fmt: skip
SIZES = Panel("number", {"batch_size/size|micro_batching/size|accumulation/batches": ".-"})
PICTURES = {
    "Loss and gradient norm": (LOSS, NORM),
    "Where a step's time goes": (TIME,),
    "Memory": (MEMORY,),
    "Gradient RMS by layer": (Panel("", {"layers/.*": ""}),),
    "Batch sizes and communication": (SIZES, Panel("bytes sent per step", {"comm/bytes": ".-"})),
}


class Data(NamedTuple):
    """The data to draw: each series (steps and values) by key, and each event (step and name)."""

    series: Mapping[str, Points]
    events: Sequence[tuple[float, str]] = ()

    def find(self, *patterns: str) -> dict[str, Points]:
        """Return the non-empty series whose keys match a pattern."""
        pattern = re.compile("|".join(patterns))
        return {key: p for key, p in self.series.items() if p and pattern.fullmatch(key)}

    @property
    def last(self) -> float:
        """The last step of the run."""
        found = (*self.series.values(), self.events)
        return max(1, *(point[0] for points in found for point in points[-1:]))

    def panels(self, title: str) -> list[Panel]:
        """Return the panels of a picture that have data."""
        return [panel for panel in PICTURES[title] if self.find(*panel.lines, *panel.bands)]


def draw(title: str, data: Data) -> Figure:
    panels = data.panels(title)
    row_counts = [0 if panel.unit else len(data.find(*panel.lines)) for panel in panels]
    heights = [min(0.9 + 0.2 * count, 4.2) if count else 2.4 for count in row_counts]
    with rc_context(fname=STYLE):
        figure = Figure(figsize=(10.4, sum(heights)))
        column = figure.subplots(len(panels), 1, squeeze=False, height_ratios=heights, sharex=True)
        for panel, axes in zip(panels, column[:, 0], strict=True):
            (_plot if panel.unit else _heat_map)(figure, axes, panel, data)
            axes.locator_params("x", integer=True)
            axes.xaxis.set_major_formatter("{x:,g}")
        margin = 0.01 * data.last
        axes.set(xlabel="step", xlim=(-margin, data.last + margin))
    return figure


def _plot(figure: Figure, axes: Axes, panel: Panel, data: Data) -> None:
    totals = _stack(axes, panel.bands, data)
    for pattern, style in panel.lines.items():
        for key, points in data.find(pattern).items():
            label = re.sub("^(profile|validation)/", "", key)
            xs, ys = zip(*points, strict=True)
            axes.plot(xs, ys, style, label=label)
    _choose_range(axes, totals)
    for name, (label, colour, marker) in EVENTS.items() if panel is LOSS else ():
        steps = [step for step, kind in data.events if kind == name]
        if steps:
            (line,) = axes.plot(steps, [1.02] * len(steps), marker, color=colour, markersize=6)
            line.set(transform=axes.get_xaxis_transform(), clip_on=False)
            line.set_label(f"{label} ({len(steps)})")
    axes.yaxis.set_major_formatter("{x:,g}")
    axes.set_ylabel(panel.unit)
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1.05), ncols=5)


def _choose_range(axes: Axes, totals: Any) -> None:
    """Choose a linear or log range. Short spikes are cut off; the legend states their height."""
    drawn = {line: _finite(line.get_ydata()) for line in axes.lines}
    curves = [curve for curve in (*drawn.values(), totals) if curve.size] or [np.zeros(1)]
    smooth = [np.median(sliding_window_view(np.pad(c, 2, "edge"), 5), 1) for c in curves]
    usual = float(np.concatenate(smooth).max())
    low, high = float(np.concatenate(curves).min()), float(np.concatenate(curves).max())
    if high > 10 * usual > 0:
        high = 2 * usual
    for line, curve in drawn.items():
        if curve.max(initial=high) > high:
            line.set_label(f"{line.get_label()}, up to {curve.max():,.4g}")
    if high > 30 * low > 0 and not totals.size:
        axes.set(yscale="log", ylim=(low / 1.2, 1.2 * high))
        axes.minorticks_off()
    elif high > min(low, 0.0):
        axes.set_ylim(min(low, 0.0), high + 0.05 * abs(high))
        axes.locator_params("y", nbins=4)


def _finite(values: Any) -> Any:
    return np.array([value for value in values if math.isfinite(value)])


def _stack(axes: Axes, bands: Mapping[str, tuple[str, str]], data: Data) -> Any:
    """Draw the bands on top of each other, and return the total at each step."""
    found = data.find(*bands)
    steps = sorted({step for points in found.values() for step, _ in points})
    sums = np.zeros((len(bands), len(steps)))
    for key, points in found.items():
        row = next(row for row, pattern in enumerate(bands) if re.fullmatch(pattern, key))
        for step, value in points:
            sums[row, steps.index(step)] += value
    drawn = np.hstack((sums[:, :1], sums))  # repeat the first values at step 0
    shares, tops = sums.sum(1) / (sums.sum() or 1.0), drawn.cumsum(0)
    for row, (label, colour) in enumerate(bands.values()):
        if shares[row] > 0.005:
            low, name = tops[row] - drawn[row], f"{label} {shares[row]:.0%}"
            axes.fill_between(
                [0, *steps], low, tops[row], color=colour, alpha=0.8, lw=0, label=name
            )
    return sums.sum(0)


def _heat_map(figure: Figure, axes: Axes, panel: Panel, data: Data) -> None:
    rows = {key.removeprefix("layers/"): dict(p) for key, p in data.find(*panel.lines).items()}
    steps = sorted({step for row in rows.values() for step in row})
    grid = [[row.get(step) or math.nan for step in steps] for row in rows.values()]
    known = [value for values in grid for value in values if math.isfinite(value)] or [1.0]
    norm = LogNorm(min(known), 1.01 * max(known))
    # A report's column spans the steps since the previous report.
    mesh = axes.pcolormesh([0, *steps], range(len(rows) + 1), grid, norm=norm, rasterized=True)
    names = [name if len(name) <= MAX_NAME else f"…{name[-MAX_NAME:]}" for name in rows]
    interval = math.ceil(len(names) / 20)
    axes.set_yticks([row + 0.5 for row in range(0, len(names), interval)], names[::interval])
    axes.invert_yaxis()
    axes.grid(visible=False)
    colours: Any = figure.colorbar(mesh, ax=axes, format="{x:g}", aspect=30, pad=0.02)
    colours.solids.set_rasterized(True)


def to_svg(title: str, data: Data) -> str:
    """Return a picture as an SVG element."""
    file, settings = io.StringIO(), {"svg.hashsalt": title}  # reproducible identifiers
    with rc_context(settings, STYLE):  # type: ignore[arg-type]
        draw(title, data).savefig(file, format="svg", transparent=True)
    svg = re.sub(r"<metadata>.*?</metadata>", "", file.getvalue(), flags=re.S)
    return re.sub(r'(width|height)="[\d.]+pt" ', "", svg[svg.index("<svg") :], count=2)


def write_pictures(data: Data, folder: Path, images: bool) -> None:
    """Write ``pictures.html`` and, if asked, PNG images."""
    figures = []
    for title in [title for title in PICTURES if data.panels(title)]:
        svg = to_svg(title, data)
        figures.append(f"<figure><figcaption>{title}</figcaption>{svg}</figure>")
        if images:
            draw(title, data).savefig(folder / f"{title}.png", dpi=100)
    (folder / "pictures.html").write_text("".join(figures), encoding="utf-8")


if __name__ == "__main__":
    with suppress(OSError):  # if memory runs out, the kernel must kill this process, not training
        Path("/proc/self/oom_score_adj").write_text("1000")
    write_pictures(Data(*json.load(sys.stdin)), Path(sys.argv[1]), images="images" in sys.argv)
