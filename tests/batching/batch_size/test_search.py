"""The rules for batch sizes against exhaustive search."""

import random

import pytest

from lightning_opt.batching.batch_size.search import (
    FoundSizes,
    Trial,
    find_fastest,
    find_largest,
)


@pytest.mark.parametrize("knows_peak", [True, False], ids=["peaks", "only-failures"])
def test_search_is_within_3_percent_of_exhaustive(knows_peak):
    """Random models of memory, with noise and a bend; also with failures as the only evidence."""
    draw = random.Random(5)
    for _ in range(300):
        rest, exponent = draw.uniform(0.05, 0.6), draw.uniform(0.97, 1.03)
        true = int(10 ** draw.uniform(0, 3.3 if knows_peak else 2.2))
        salt = draw.random()

        def peak(size: int, true=true, rest=rest, exponent=exponent, salt=salt) -> float:
            return (
                rest + (1 - rest) * (size / (true + 0.5)) ** exponent + 0.002 * ((size * salt) % 1)
            )

        def run(size: int, peak=peak, rest=rest) -> Trial:
            share = peak(size)
            seen = share if knows_peak and share <= 1.2 else None
            return Trial(size, share <= 1.0, seen, rest, 1.0)

        exhaustive = max((n for n in range(1, 2 * true + 20) if peak(n) <= 1.0), default=0)
        start = draw.choice([1, 2, 8, 32])
        found, trials = find_largest(run, start, 30_000, target=1.0)
        assert len(trials) <= 12
        assert all(trial.size >= 1 for trial in trials)
        assert len({trial.size for trial in trials}) == len(trials)
        if exhaustive:
            enough = 0.97 if knows_peak else 0.9
            assert enough * exhaustive - 1 < found <= exhaustive, (true, trials)


@pytest.mark.parametrize("step", [64, 96, 99, 97])
def test_search_finds_the_largest_divisor_that_fits(step):
    divisors = [size for size in range(1, step + 1) if step % size == 0]

    def round_down(max_size: int) -> int:
        return max((size for size in divisors if size <= max_size), default=0)

    for limit in range(1, step + 5):

        def run(size: int, limit: int = limit) -> Trial:
            fits = size <= limit
            return Trial(size, fits, 0.1 + 0.8 * size / limit if fits else None, 0.1, float(size))

        found, trials = find_largest(run, 32, step, target=0.9, round_down=round_down)
        assert found == round_down(limit)
        assert {trial.size for trial in trials} <= {32, *divisors}
        assert find_fastest(run, found, round_down)[0] == found


def test_search_ends_at_the_number_of_samples_and_raises_if_nothing_fits():
    assert find_largest(lambda n: Trial(n, True, 0.1, 0.1, n), 8, 100, target=1.0)[0] == 100
    none, trials = find_largest(lambda n: Trial(n, False, None, 0.0, 0.0), 8, 100, target=1.0)
    assert none == 0
    with pytest.raises(MemoryError, match="Not even a batch of one sample"):
        FoundSizes(8, none, 0, trials).chosen("largest")


@pytest.mark.parametrize("best", [4, 24, 100, 1000])
def test_fastest_size_is_within_5_percent_of_a_grid(best):
    """Throughput peaks at some size, and a few timings are outliers."""

    def speed(size: int) -> float:
        return size / (size + best / 4) / (1 + (size / (6 * best)) ** 1.5)

    grid, within = max(speed(n) for n in range(1, 1201)), 0
    for seed in range(100):
        draw = random.Random(seed)
        order = []

        def run(size: int, draw: random.Random = draw, order: list[int] = order) -> Trial:
            order.append(size)
            slow = 0.6 if draw.random() < 0.05 else draw.gauss(1.0, 0.02)
            return Trial(size, True, 0.5, 0.1, speed(size) * slow)

        found, trials = find_fastest(run, 1200)
        first = [trial.size for trial in trials]
        assert first == order[: len(first)]
        assert first[:-2] == [1200 >> n for n in range(len(first) - 2)]
        assert len(order) <= 10 + 2 + 3 * 3 + 2
        within += speed(found) >= 0.95 * grid
    assert within >= 80


def test_smallest_of_equally_fast_sizes_wins():
    found, _ = find_fastest(lambda size: Trial(size, True, 0.5, 0.1, min(size, 64)), 512)
    assert found == 64
    assert find_fastest(lambda size: Trial(size, True, 0.5, 0.1, size), 1)[0] == 1
