"""What a comparison has found: a table, ratios to its first row, and their figure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from lightning_opt.core.figures import new_figure
from lightning_opt.core.ratios import Ratio
from lightning_opt.core.report import Report

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLOURS = {"slower": "#c0504d", "faster": "#2e8b57", "no difference": "#7f7f7f"}


class Measured:
    """What was measured of several things beside each other.

    Args:
        report: A row for each.
        ratios: For each but the first, and but those that failed, its :class:`Ratio` to the first.
        timings: What was timed of each, for the figure.
        unit: Of the timings.
    """

    def __init__(
        self,
        report: Report,
        ratios: Mapping[str, Ratio],
        timings: Mapping[str, Sequence[float]],
        unit: str,
    ) -> None:
        self.report, self.ratios = report, dict(ratios)
        self._timings, self._unit = timings, unit

    def plot(self) -> Figure:
        """Draw a box of the timings of each, and beside it its ratio with the interval.

        Raises:
            ImportError: Without matplotlib; the message names the extra.
        """
        timings, ratios = self._timings, self.ratios
        names = list(timings)
        size = (10, 1.6 + 0.5 * len(names))
        figure = new_figure("a comparison", figsize=size, dpi=110, layout="constrained")
        left, right = figure.subplots(1, 2, sharey=True, width_ratios=[3, 2])
        places = range(len(names))
        measured = [place for place in places if timings[names[place]]]
        left.boxplot(
            [list(timings[names[place]]) for place in measured],
            positions=measured,
            orientation="horizontal",
            showfliers=False,
        )
        left.set_yticks(list(places), names)
        left.set_xlabel(self._unit)
        left.set_xlim(left=0)
        left.invert_yaxis()
        right.axvline(1.0, color="black", linewidth=0.8)
        for place, name in enumerate(names):
            ratio = ratios.get(name)
            if ratio is not None:
                colour = COLOURS[ratio.verdict]
                right.plot([ratio.low, ratio.high], [place, place], color=colour, linewidth=2)
                right.plot([ratio.value], [place], "o", color=colour)
        right.set_xlabel(f"ratio to {names[0]}, with its interval")
        return figure

    def __str__(self) -> str:
        return str(self.report)

    def _repr_markdown_(self) -> str:
        return self.report.to_markdown()


def verdict_note(ratios: Mapping[str, Ratio], confidence: float, tolerance: float) -> str:
    """Say what the verdicts mean, and how small a difference would have been seen."""
    margin = max(ratio.high / ratio.value - 1 for ratio in ratios.values())
    return (
        f"Ratios with {100 * confidence:g}% intervals. No difference: the interval contains 1, or "
        f"the ratio is within {100 * tolerance:g}% of it. A difference of less than about "
        f"{100 * max(margin, tolerance):.1f}% would not have been seen here."
    )


def ratio_columns(ratio: Ratio | None) -> dict[str, Any]:
    """Return what a table says of a ratio; None is that of the first to itself."""
    if ratio is None:
        return {"ratio": 1.0, "low": None, "high": None, "verdict": ""}
    numbers = {"ratio": ratio.value, "low": ratio.low, "high": ratio.high}
    return {**{key: round(value, 4) for key, value in numbers.items()}, "verdict": ratio.verdict}


def format_seconds(seconds: float) -> str:
    """Return seconds in the unit in which they are read best."""
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= size:
            return f"{seconds / size:.4g} {unit}"
    return f"{seconds / 1e-9:.4g} ns"
