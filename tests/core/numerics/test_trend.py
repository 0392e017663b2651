"""The trend of a series, against scipy and random series."""

import random

import pytest
from scipy.stats import kendalltau, norm, theilslopes

from lightning_opt.core.numerics.ratios import mann_kendall, theil_sen


def series(seed: int, n: int, slope: float, digits: int) -> tuple[list[float], list[float]]:
    rng = random.Random(seed)
    x = sorted(rng.sample(range(1000), n))
    return [float(v) for v in x], [round(slope * v + rng.gauss(0, 1), digits) for v in x]


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("digits", [0, 6])
def test_agrees_with_scipy(seed, digits):
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


def test_outliers_do_not_move_the_slope():
    x = list(range(30))
    y = [2.0 * v for v in x]
    for outlier in (3, 11, 17, 22, 28):
        y[outlier] = 1e6
    assert theil_sen(x, y) == pytest.approx(2.0, rel=0.2)


@pytest.mark.parametrize("y", [[], [1.0], [1.0, 2.0], [5.0] * 20])
def test_too_little_or_constant_is_no_trend(y):
    assert mann_kendall(y)[1] == 1.0


def test_false_alarms_are_as_rare_as_promised():
    rng = random.Random(1)
    alarms = sum(mann_kendall([rng.gauss(0, 1) for _ in range(15)])[1] < 0.05 for _ in range(2000))
    assert 60 <= alarms <= 120  # 5% of 2000 would be 100; the correction for continuity lowers it


def test_direction():
    assert mann_kendall([1, 2, 3, 4, 5, 6])[1] < 0.01
    assert mann_kendall([6, 5, 4, 3, 2, 1])[1] > 0.99
    assert mann_kendall([1, 2, 3, 4])[0] == 6
