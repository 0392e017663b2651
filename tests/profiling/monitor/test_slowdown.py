"""Slowdowns are found soon, and noise is not a slowdown."""

import math
import random

import pytest

from lightning_opt.profiling.monitor.slowdown import MAX_POINTS, Throughput, find_slowdown


def noise(kind, sigma, n, seed):
    rng, wandering = random.Random(seed), 0.0
    for i in range(n):
        wandering = 0.8 * wandering + 0.6 * rng.gauss(0, sigma)
        value = math.exp(wandering if kind == "wandering" else rng.gauss(0, sigma))
        if kind == "spikes":
            value *= 0.5 if rng.random() < 0.1 else 1
        if kind == "periodic":
            value *= 0.6 if i % 10 == 0 else 1
        if kind == "settling":
            value *= 1 - 0.5 * math.exp(-i / 5)
        yield value


def first_alarm(rates):
    history = Throughput()
    for i, rate in enumerate(rates):
        history.add(50 * i, 100 * rate, 100.0)
        fall = history.find_slowdown(0.1)
        if fall is not None:
            return i, fall
    return None


@pytest.mark.parametrize(
    ("kind", "sigma"),
    [
        ("white", 0.03),
        ("white", 0.2),
        ("wandering", 0.03),
        ("wandering", 0.05),
        ("spikes", 0.03),
        ("periodic", 0.03),
        ("settling", 0.03),
    ],
)
def test_noise_is_not_a_slowdown(kind, sigma):
    alarms = [first_alarm(noise(kind, sigma, 150, seed)) for seed in range(5)]
    assert alarms == [None] * 5


@pytest.mark.parametrize(
    ("shape", "sigma", "within", "beside"),
    [("step", 0.03, 10, 1), ("step", 0.1, 30, 10), ("ramp", 0.03, 30, 10)],
)
def test_slowdown_is_found_soon_with_its_first_step(shape, sigma, within, beside):
    """Throughput falls by 20% at report 40: at once, or over the next 40 reports."""
    for seed in range(5):
        rates = [
            value * (1 - 0.2 * (i >= 40) * (1 if shape == "step" else (i - 40) / 40))
            for i, value in enumerate(noise("white", sigma, 80, seed))
        ]
        found_at, fall = first_alarm(rates)
        assert 40 < found_at <= 40 + within
        assert abs(fall.step / 50 - 40) <= beside
        assert 0.1 <= fall.drop <= 0.35


def test_recovery_and_oscillation_are_not_a_slowdown():
    steady = [1.0] * 30
    assert find_slowdown(range(42), [*steady, *[0.6] * 12], 0.1) is not None
    assert find_slowdown(range(54), [*steady, *[0.6] * 12, *[1.0] * 12], 0.1) is None
    ragged = [0.6, 0.6, 0.6, 1.0, 1.0] * 8
    assert find_slowdown(range(70), steady + ragged, 0.1) is None


def test_smaller_drop_is_not_a_slowdown():
    rates = [1.0] * 30 + [0.92] * 30
    assert find_slowdown(range(60), rates, 0.1) is None
    fall = find_slowdown(range(60), rates, 0.05)
    assert (fall.step, fall.before, fall.after) == (30, 1.0, 0.92)


def test_history_is_bounded_and_keeps_the_sum():
    history = Throughput()
    for i in range(5000):
        history.add(10 * i, 2.0, 0.5)
    assert len(history.newest) == MAX_POINTS
    assert MAX_POINTS // 2 <= len(history.whole) <= MAX_POINTS
    assert sum(point[1] for point in history.whole) == 10_000
    assert history.whole[0][0] == 0


def test_sudden_slowdown_late_in_a_long_run_is_found_soon():
    rates = [1.0 + 0.01 * math.sin(i) for i in range(3000)] + [0.8] * 20
    found_at, fall = first_alarm(rates)
    assert found_at < 3000 + 10
    assert fall.step == 50 * 3000


def test_slow_decline_of_a_long_run_is_found():
    """3% over the newest 96 reports: only the whole run shows it."""
    rates = [1 - i / 3200 for i in range(1000)]
    assert first_alarm(rates) is not None
