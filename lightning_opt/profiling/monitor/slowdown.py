"""Whether a run gets slower, and since when."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence
from typing import Any, NamedTuple

from lightning_opt.core.numerics.trend import mann_kendall

POINTS = 96
"""Points of a history at most; even."""

BEFORE, FEWEST = 10, 5
"""Points before a fall and after it, at least."""

SURE, CLEAR = 0.01, 5.0
"""Probability of so steady a decline by chance, and standard errors of the difference. Many looks
are taken, and the noise is estimated from what a fitted step or ramp leaves, so the latter is
strict."""


class Fall(NamedTuple):
    """A throughput that has fallen and not risen again.

    Attributes:
        step: At which it began.
        before: Throughput up to then.
        after: Throughput of late.
    """

    step: int
    before: float
    after: float

    @property
    def drop(self) -> float:
        """The share that is lost."""
        return 1 - self.after / self.before


def find_fall(steps: Sequence[int], rates: Sequence[float], least: float) -> Fall | None:
    """Return the fall of a series, or None.

    A fall has to pass three tests. The series declines, by the ranks of all pairs, in which
    outliers count no more than other values. The newest values are lower by ``least`` than those
    before the best step or ramp, most of them, so that what has recovered is no fall. And that
    difference is clear of the noise, whose memory counts.

    Args:
        steps: One for each value, rising.
        rates: Throughputs, above 0.
        least: Share of the throughput that has to be lost.
    """
    if len(rates) < BEFORE + FEWEST:
        return None
    # What is cheap goes first: at most reports of most runs there is nothing to see.
    top = sorted(rates)[int(0.95 * (len(rates) - 1))]
    if statistics.median(rates[-FEWEST:]) > (1 - least) * top:
        return None
    if mann_kendall([-rate for rate in rates])[1] > SURE:
        return None
    begin, residuals = _begin(rates)
    before = statistics.median(rates[:begin])
    newest = rates[max(begin, len(rates) - max(FEWEST, (len(rates) - begin) // 3)) :]
    fall = Fall(steps[begin], before, statistics.median(newest))
    low = sum(rate < before * (1 - least / 2) for rate in newest)
    if fall.drop < least or low < 0.8 * len(newest):
        return None
    return fall if before - fall.after >= CLEAR * _error(residuals, begin, len(newest)) else None


def _begin(values: Sequence[float]) -> tuple[int, list[float]]:
    """Return where the best step or ramp downwards begins, and what it leaves unexplained."""
    best, begin, residuals = math.inf, BEFORE, [0.0] * len(values)
    for start in range(BEFORE, len(values) - FEWEST + 1):
        level, rest = statistics.median(values[:start]), values[start:]
        lower = statistics.median(rest)
        if lower >= level:
            continue
        slope = statistics.median((value - level) / i for i, value in enumerate(rest, start=1))
        head = [value - level for value in values[:start]]
        for tail in (
            [value - lower for value in rest],
            [value - level - i * slope for i, value in enumerate(rest, start=1)],
        ):
            error = sum(map(abs, head)) + sum(map(abs, tail))
            if error < best:
                best, begin, residuals = error, start, head + tail
    return begin, residuals


def _error(residuals: Sequence[float], before: int, after: int) -> float:
    """Return the standard error of the difference of two levels of so many values each."""
    scale = sum(value * value for value in residuals)
    if not scale:
        return 0.0
    # Noise that wanders has fewer values that are independent than it has values. A short series
    # makes its memory look shorter than it is.
    found = sum(a * b for a, b in itertools.pairwise(residuals)) / scale + 8 / len(residuals)
    memory = min(0.95, max(0.0, found))
    sigma = 1.4826 * statistics.median(map(abs, residuals))
    return sigma * math.sqrt((1 + memory) / (1 - memory) * (1 / before + 1 / after))


class Throughput:
    """The throughput over a run, in a bounded number of points.

    It is kept twice: of the newest reports each, and of the whole run at a resolution that is
    halved whenever there is no more room. So a sudden fall is seen soon after a long run as well,
    and a slow one at all.

    Attributes:
        whole: Points of the whole run: step, amount and seconds.
        newest: Points of the newest reports.
    """

    def __init__(self) -> None:
        self.whole: list[list[float]] = []
        self.newest: list[list[float]] = []
        self._reports_a_point = 1
        self._open = 0

    def add(self, step: int, amount: float, seconds: float) -> None:
        """Take in a report: ``amount`` done in ``seconds`` up to ``step``."""
        self.newest = [*self.newest[1 - POINTS :], [step, amount, seconds]]
        if self._open:
            self.whole[-1] = _joined(self.whole[-1], [step, amount, seconds])
        else:
            if len(self.whole) == POINTS:
                pairs = zip(self.whole[::2], self.whole[1::2], strict=True)
                self.whole = [_joined(*pair) for pair in pairs]
                self._reports_a_point *= 2
            self.whole.append([step, amount, seconds])
        self._open = (self._open + 1) % self._reports_a_point

    def find_fall(self, least: float) -> Fall | None:
        """Return the fall of the whole run, else that of late, else None."""
        full = self.whole[: len(self.whole) - bool(self._open)]
        for points in (full, self.newest):
            steps, rates = [int(point[0]) for point in points], [p[1] / p[2] for p in points]
            fall = find_fall(steps, rates, least)
            if fall is not None:
                return fall
        return None

    def state_dict(self) -> dict[str, Any]:
        """Return everything, as plain types."""
        return {
            "whole": [list(point) for point in self.whole],
            "newest": [list(point) for point in self.newest],
            "reports_a_point": self._reports_a_point,
            "open": self._open,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned."""
        self.whole = [list(point) for point in state["whole"]]
        self.newest = [list(point) for point in state["newest"]]
        self._reports_a_point, self._open = state["reports_a_point"], state["open"]


def _joined(first: Sequence[float], second: Sequence[float]) -> list[float]:
    # The step is that of the first, because a fall begins with it.
    return [first[0], first[1] + second[1], first[2] + second[2]]
