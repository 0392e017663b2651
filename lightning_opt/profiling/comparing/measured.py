"""What a comparison has found: a table, and ratios to its first row."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning_opt.core.numerics.ratios import Ratio
from lightning_opt.core.output.report import Report


class Measured:
    """What was measured of several things beside each other.

    Args:
        report: A row for each.
        ratios: For each but the first, and but those that failed, its :class:`Ratio` to the first.
    """

    def __init__(self, report: Report, ratios: Mapping[str, Ratio]) -> None:
        self.report, self.ratios = report, dict(ratios)

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
