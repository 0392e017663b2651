"""Trend of a series: a robust slope and a significance test."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Sequence


def theil_sen(x: Sequence[float], y: Sequence[float]) -> float:
    """Return the median slope over all pairs of points; 0 for fewer than two points.

    Up to almost a third of the points may be outliers. Sen (1968), *Estimates of the
    Regression Coefficient Based on Kendall's Tau*.
    """
    slopes = [
        (y[j] - y[i]) / (x[j] - x[i])
        for i in range(len(x))
        for j in range(i + 1, len(x))
        if x[j] != x[i]
    ]
    return statistics.median(slopes) if slopes else 0.0


def mann_kendall(y: Sequence[float]) -> tuple[int, float]:
    """Return Kendall's S and the one-sided p-value of S.

    The p-value uses the normal approximation, corrected for ties and continuity. It is 1 for fewer
    than three values. Mann (1945), *Nonparametric Tests Against Trend*.
    """
    n = len(y)
    s = sum((y[j] > y[i]) - (y[j] < y[i]) for i in range(n) for j in range(i + 1, n))
    tied = sum(t * (t - 1) * (2 * t + 5) for t in Counter(y).values())
    variance = (n * (n - 1) * (2 * n + 5) - tied) / 18
    if n < 3 or variance <= 0:
        return s, 1.0
    z = (s - math.copysign(1, s)) / math.sqrt(variance) if s else 0.0
    return s, 0.5 * math.erfc(z / math.sqrt(2))
