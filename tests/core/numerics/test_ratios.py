"""Ratios and trends, against known distributions, scipy and planted differences."""

import math
import random
import statistics

import pytest
import scipy.stats
from scipy.stats import kendalltau, norm, theilslopes

from lightning_opt.core.numerics.ratios import (
    PRIOR_STARTS,
    centre_and_variance,
    compare_pairs,
    judge,
    mann_kendall,
    theil_sen,
)


def noisy(generator: random.Random, count: int, memory: float) -> list[float]:
    values, last = [], 0.0
    for _ in range(count):
        last = memory * last + math.sqrt(1 - memory**2) * generator.gauss(0, 1)
        values.append(last)
    return values


def test_variance_of_a_short_series_is_not_too_small():
    """Resamples of a short series vary less than new series would, hence ``WIDENED``."""
    generator = random.Random(3)
    found = [centre_and_variance(noisy(generator, 12, 0.5)) for _ in range(300)]
    true = statistics.variance(centre for centre, _ in found)
    assert 0.95 * true < statistics.fmean(variance for _, variance in found) < 1.4 * true


def timings(generator: random.Random, slower: float) -> list[list[tuple[float, float]]]:
    """Return rounds with drift, correlation, outliers and offsets of processes, like real ones."""
    data, rounds = [], 12
    for _ in range(3):
        offsets = [generator.gauss(0, 0.0035) for _ in range(2)]
        drift = noisy(generator, rounds, 0.8)
        noise = [noisy(generator, rounds, 0.5) for _ in range(2)]
        pairs = []
        for i in range(rounds):
            a, b = (
                math.exp(offset + 0.05 * drift[i] + 0.008 * own[i])
                * (1 + 0.3 * generator.paretovariate(2) * (generator.random() < 0.05))
                for offset, own in zip(offsets, noise, strict=True)
            )
            pairs.append((0.02 * a, 0.02 * b * (1 + slower)))
        data.append(pairs)
    return data


def test_five_percent_is_found_and_equal_runs_are_not_distinguished():
    generator = random.Random(3)
    verdicts = {0.0: [], 0.05: [], -0.05: []}
    for slower, found in verdicts.items():
        for _ in range(60):
            ratio = compare_pairs(timings(generator, slower), offset=0.008, tolerance=0.01)
            assert ratio.low < ratio.value < ratio.high
            found.append(ratio)
    assert sum(r.verdict == "no difference" for r in verdicts[0.0]) >= 58
    assert sum(r.verdict == "slower" for r in verdicts[0.05]) >= 58
    assert sum(r.verdict == "faster" for r in verdicts[-0.05]) >= 58
    assert sum(r.low <= 1.05 <= r.high for r in verdicts[0.05]) >= 54


def test_spread_between_starts_decides_however_many_rounds_there_are():

    def starts(offsets: list[float]) -> list[list[tuple[float, float]]]:
        noise = random.Random(4)
        return [
            [(1.0, math.exp(offset + noise.gauss(0, 0.001))) for _ in range(40)]
            for offset in offsets
        ]

    assert compare_pairs(starts([0.03, -0.02, 0.05, 0.01])).verdict == "no difference"
    assert compare_pairs(starts([0.03, 0.02, 0.04, 0.03])).verdict == "slower"
    # With a single start the usual offset widens the interval.
    alone = compare_pairs(starts([0.01]), offset=0.01)
    assert alone.low < 1 < alone.high
    assert compare_pairs(starts([0.01]), offset=0.0).verdict == "slower"


@pytest.mark.parametrize(("starts", "rounds"), [(1, 2), (1, 3), (2, 2), (1, 12)])
def test_few_rounds_on_a_busy_machine_are_no_evidence(starts, rounds):
    noise, found = random.Random(0), 0
    for _ in range(300):
        pairs = [
            [(1.0, math.exp(noise.gauss(0, 0.1))) for _ in range(rounds)] for _ in range(starts)
        ]
        ratio = compare_pairs(pairs, offset=0.008)
        found += not ratio.low <= 1 <= ratio.high
    assert found <= 0.07 * 300


@pytest.mark.parametrize("starts", [1, 2, 4, 37])
def test_interval_agrees_with_scipy(starts):
    """Without noise, only the usual difference between processes remains."""
    for confidence in (0.2, 0.9, 0.95, 0.99):
        pairs = [[(1.0, 1.1)] * 12] * starts
        ratio = compare_pairs(pairs, confidence=confidence, offset=0.01)
        freedom = PRIOR_STARTS + starts - 1
        spread = PRIOR_STARTS * 0.01**2 / freedom
        quantile = scipy.stats.t.ppf((1 + confidence) / 2, freedom)
        margin = quantile * math.sqrt(spread / starts)
        found = [math.log(1.1 / ratio.low), math.log(ratio.high / 1.1)]
        assert found == pytest.approx([margin, margin], rel=3e-3)


def test_tolerance_widens_the_verdict_of_no_difference():
    assert compare_pairs([[], [(0.0, 1.0)]]) is None
    assert judge(1.008, 1.006, 1.01, 0.01) == "no difference"
    assert judge(1.008, 1.006, 1.01, 0.0) == "slower"
    assert judge(0.98, 0.97, 0.99, 0.01) == "faster"


# --- trends --------------------------------------------------------------------------------------


def series(seed: int, n: int, slope: float, digits: int) -> tuple[list[float], list[float]]:
    rng = random.Random(seed)
    x = sorted(rng.sample(range(1000), n))
    return [float(v) for v in x], [round(slope * v + rng.gauss(0, 1), digits) for v in x]


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("digits", [0, 6])
def test_trend_agrees_with_scipy(seed, digits):
    x, y = series(seed, 25, 0.003, digits)
    assert theil_sen(x, y) == pytest.approx(theilslopes(y, x).slope, abs=1e-12)
    s, p = mann_kendall(y)
    pairs = 25 * 24 / 2
    ties = sum(y[i] == y[j] for i in range(25) for j in range(i + 1, 25))
    tau = kendalltau(x, y, variant="b").statistic
    assert s == pytest.approx(tau * (pairs * (pairs - ties)) ** 0.5, abs=1e-6)
    # scipy's p has two sides and no correction for continuity: compare the z that it comes from.
    z = norm.isf(kendalltau(x, y, method="asymptotic").pvalue / 2) * (1 if s > 0 else -1)
    if s:
        assert norm.isf(p) == pytest.approx(z * (abs(s) - 1) / abs(s), rel=1e-6)


@pytest.mark.parametrize("y", [[], [1.0, 2.0], [5.0] * 20], ids=["empty", "short", "constant"])
def test_short_or_constant_series_has_no_trend(y):
    assert mann_kendall(y)[1] == 1.0
