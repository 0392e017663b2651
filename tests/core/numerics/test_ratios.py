"""Ratios and their intervals, against known distributions and planted differences."""

import math
import random
import statistics

import pytest
import scipy.stats

from lightning_opt.core.numerics.ratios import (
    centre_and_variance,
    compare_pairs,
    judge,
    quartiles,
    student_quantile,
)


@pytest.mark.parametrize("freedom", [4, 5, 7, 40])
def test_student_quantile_agrees_with_scipy(freedom):
    for probability in (0.6, 0.95, 0.975, 0.995):
        expected = scipy.stats.t.ppf(probability, freedom)
        assert student_quantile(probability, freedom) == pytest.approx(expected, rel=3e-3)


def test_centre_is_the_median():
    values = [random.Random(0).gauss(0, 1) for _ in range(11)]
    assert centre_and_variance(values)[0] == sorted(values)[5]
    assert centre_and_variance([3.0]) == (3.0, 0.0)


def test_few_outliers_do_not_move_the_centre():
    values = [random.Random(1).gauss(0, 0.01) for _ in range(20)]
    spoilt = [5.0, 9.0, 70.0, *values[3:]]
    assert abs(centre_and_variance(spoilt)[0] - centre_and_variance(values)[0]) < 0.01


def noisy(generator: random.Random, count: int, memory: float) -> list[float]:
    values, last = [], 0.0
    for _ in range(count):
        last = memory * last + math.sqrt(1 - memory**2) * generator.gauss(0, 1)
        values.append(last)
    return values


@pytest.mark.parametrize("memory", [0.0, 0.5])
def test_variance_matches_the_variance_of_new_series(memory):
    generator = random.Random(2)
    found = [centre_and_variance(noisy(generator, 40, memory)) for _ in range(100)]
    true = statistics.variance(centre for centre, _ in found)
    assert 0.6 * true < statistics.fmean(variance for _, variance in found) < 1.6 * true


def test_variance_of_a_short_series_is_not_too_small():
    """Resamples of a short series vary less than new series would, hence ``WIDENED``."""
    generator = random.Random(3)
    found = [centre_and_variance(noisy(generator, 12, 0.5)) for _ in range(300)]
    true = statistics.variance(centre for centre, _ in found)
    assert 0.95 * true < statistics.fmean(variance for _, variance in found) < 1.4 * true


def timings(
    generator: random.Random, slower: float, starts: int = 3, rounds: int = 12
) -> list[list[tuple[float, float]]]:
    """Return rounds with drift, correlation, outliers and offsets of processes, like real ones."""
    data = []
    for _ in range(starts):
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


def test_confidence_widens_the_interval_and_tolerance_the_verdict():
    rounds = timings(random.Random(5), 0.02)
    wide, narrow = (compare_pairs(rounds, confidence=c) for c in (0.99, 0.8))
    assert wide.low < narrow.low < narrow.value == wide.value < narrow.high < wide.high
    assert judge(1.008, 1.006, 1.01, 0.01) == "no difference"
    assert judge(1.008, 1.006, 1.01, 0.0) == "slower"
    assert judge(0.98, 0.97, 0.99, 0.01) == "faster"


def test_no_pairs_give_none():
    assert compare_pairs([]) is None
    assert compare_pairs([[], [(0.0, 1.0)]]) is None


def test_quartiles_of_several_values_and_of_one():
    assert quartiles([4.0, 1.0, 3.0, 2.0, 5.0]) == (2.0, 3.0, 4.0)
    assert quartiles([7.0]) == (7.0, 7.0, 7.0)
