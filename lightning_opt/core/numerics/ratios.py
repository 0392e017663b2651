"""Significance: the ratio of two run times with a confidence interval, and the trend of a series.

Timings are not independent. They have outliers and slow minutes. They also have an offset per
process: a second process with the same code may be some tenths of a percent slower throughout.
Therefore only timings of the same round are compared. The estimate is the median of the logarithms
of their ratios, averaged over process starts. The interval comes from the spread between starts.

A few starts give a poor estimate of that spread. A usual spread is therefore added with the weight
of ``PRIOR_STARTS`` starts, as in moderated variances for few replicates (Smyth 2004).

References:
    G. K. Smyth. Linear models and empirical Bayes methods for assessing differential expression in
    microarray experiments. 2004.
    D. N. Politis and J. P. Romano. A circular block-resampling procedure for stationary data. 1992.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Sequence
from itertools import combinations
from typing import NamedTuple

import torch

PRIOR_STARTS = 4
"""The weight of the usual spread, in process starts."""

RESAMPLES = 400

WIDENED = 1.25
"""Factor on the variance of resamples, which is too small for short series; from simulations."""


class Ratio(NamedTuple):
    """The time of a candidate divided by the reference's time, with interval and verdict."""

    value: float
    low: float
    high: float
    verdict: str


def compare_pairs(
    starts: Sequence[Sequence[tuple[float, float]]],
    *,
    confidence: float = 0.95,
    offset: float = 0.0,
    tolerance: float = 0.0,
) -> Ratio | None:
    """Estimate the ratio of the candidate's time to the reference's; None without valid pairs.

    Args:
        starts: The rounds of each process start. A round is a pair of run times in seconds, of the
            reference and of the candidate.
        confidence: Confidence level of the interval.
        offset: The usual standard deviation of the log ratio of two processes with the same code.
        tolerance: Relative difference below which the verdict is "no difference".
    """
    logs = [
        [math.log(other / reference) for reference, other in rounds if reference > 0 < other]
        for rounds in starts
    ]
    logs = [values for values in logs if values]
    if not logs:
        return None
    centres, within = zip(*(centre_and_variance(values) for values in logs), strict=True)
    count, centre = len(centres), statistics.fmean(centres)
    usual = offset**2 + math.fsum(within) / count
    weight = PRIOR_STARTS + count - 1
    spread = (PRIOR_STARTS * usual + math.fsum((c - centre) ** 2 for c in centres)) / weight
    # The usual spread contains that of the rounds, which two or three rounds hardly show.
    freedom = max(1, min(weight, sum(map(len, logs)) - 1))
    margin = student_quantile((1 + confidence) / 2, freedom) * math.sqrt(spread / count)
    low, value, high = (math.exp(centre + margin * side) for side in (-1, 0, 1))
    return Ratio(value, low, high, judge(value, low, high, tolerance))


def judge(value: float, low: float, high: float, tolerance: float) -> str:
    if low <= 1 <= high or abs(math.log(value)) < math.log1p(tolerance):
        return "no difference"
    return "slower" if value > 1 else "faster"


def centre_and_variance(values: Sequence[float]) -> tuple[float, float]:
    """Return the median of a series and the variance of this median.

    A block bootstrap estimates the variance, because neighbours are correlated. It uses quantiles
    of the resampled medians, because a few resamples consist mostly of outliers.
    """
    series = torch.tensor(values, dtype=torch.float64)
    count = len(series)
    centre = statistics.median(values)
    if count == 1:
        return centre, 0.0
    run = max(1, min(round(math.sqrt(count)), count // 2))
    generator = torch.Generator().manual_seed(0)
    first = torch.randint(count, (RESAMPLES, -(-count // run), 1), generator=generator)
    chosen = ((first + torch.arange(run)) % count).flatten(1)[:, :count]
    resampled = series[chosen].quantile(0.5, dim=1)
    low, high = resampled.quantile(torch.tensor([0.1587, 0.8413], dtype=torch.float64)).tolist()
    return centre, ((high - low) / 2) ** 2 * WIDENED * count / (count - run)


def student_quantile(probability: float, freedom: float) -> float:
    """Return a quantile of Student's t-distribution.

    The error is at most 1% for at least 4 degrees of freedom. With 1 degree, the quantile at 0.975
    is 11% too small. The formula expands in the normal quantile (Abramowitz and Stegun 1964,
    26.7.5).
    """
    z = statistics.NormalDist().inv_cdf(probability)
    first = (z**3 + z) / 4
    second = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    fourth = (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160
    return z + first / freedom + second / freedom**2 + third / freedom**3 + fourth / freedom**4


# --- the trend of a series ------------------------------------------------------------------------


def theil_sen(x: Sequence[float], y: Sequence[float]) -> float:
    """Return the median slope over all pairs of points; 0 for fewer than two points.

    Up to almost a third of the points may be outliers. Sen (1968), *Estimates of the
    Regression Coefficient Based on Kendall's Tau*.
    """
    pairs = combinations(zip(x, y, strict=True), 2)
    slopes = [(y2 - y1) / (x2 - x1) for (x1, y1), (x2, y2) in pairs if x1 != x2]
    return statistics.median(slopes) if slopes else 0.0


def mann_kendall(y: Sequence[float]) -> tuple[int, float]:
    """Return Kendall's S and the one-sided p-value of S.

    The p-value uses the normal approximation, corrected for ties and continuity. It is 1 for fewer
    than three values. Mann (1945), *Nonparametric Tests Against Trend*.
    """
    n = len(y)
    s = sum((later > earlier) - (later < earlier) for earlier, later in combinations(y, 2))
    tied = sum(t * (t - 1) * (2 * t + 5) for t in Counter(y).values())
    variance = (n * (n - 1) * (2 * n + 5) - tied) / 18
    if n < 3 or variance <= 0:
        return s, 1.0
    z = (s - math.copysign(1, s)) / math.sqrt(variance) if s else 0.0
    return s, 0.5 * math.erfc(z / math.sqrt(2))
