"""The knapsack against an exhaustive search."""

import itertools
import random

import pytest

from lightning_opt.memory.checkpointing import knapsack
from lightning_opt.memory.checkpointing.knapsack import Item, Option, solve

RECOMPUTE, PART = frozenset[tuple[str, int]](), frozenset({("mm", 0)})


def random_items(generator: random.Random, count: int) -> list[Item]:
    items = []
    for _ in range(count):
        nbytes, seconds = generator.randint(5, 40), generator.uniform(1, 5)
        part = Option(PART, nbytes // 3, seconds * generator.uniform(0.4, 0.9))
        options = (Option(RECOMPUTE, 0, seconds), Option(None, nbytes, 0.0), part)
        items.append(Item(options, generator.randint(40, 80)))
    return items


def fastest(items: list[Item], head_peak: int, limit: float) -> float | None:
    """Try every choice, with the peak computed by its definition."""
    best = None
    for chosen in itertools.product(*(item.options for item in items)):
        held, peak = 0, 0
        for item, option in zip(items, chosen, strict=True):
            peak = max(peak, held + item.peak)
            held += option.nbytes
        seconds = sum(option.seconds for option in chosen)
        if max(peak, held + head_peak) <= limit and (best is None or seconds < best):
            best = seconds
    return best


@pytest.mark.parametrize("seed", range(25))
def test_solution_is_the_fastest_of_all_choices(seed: int) -> None:
    generator = random.Random(seed)
    items, head = random_items(generator, generator.randint(1, 6)), generator.randint(20, 90)
    for limit in (60, 80, 100, 140, 200, 400):
        solution, expected = solve(items, head, limit), fastest(items, head, limit)
        assert (solution is None) == (expected is None)
        if solution is not None:
            assert solution.seconds == pytest.approx(expected)
            assert solution.seconds == pytest.approx(sum(o.seconds for o in solution.options))
            assert len(solution.options) == len(items)
            assert solution.peak <= limit


def large_items(generator: random.Random) -> list[Item]:
    items = []
    for _ in range(40):
        nbytes = generator.randint(9_000_000, 11_000_000)
        options = [Option(RECOMPUTE, 0, generator.uniform(4, 5)), Option(None, nbytes, 0.0)]
        options += [
            Option(PART, nbytes * n // 9, options[0].seconds * (1 - 0.12 * n)) for n in range(1, 8)
        ]
        items.append(Item(tuple(options), 20_000_000))
    return items


def test_feasible_limit_is_met_at_any_number_of_bytes() -> None:
    items = large_items(random.Random(0))
    assert solve(items, 5_000_000, 19_999_999) is None
    for limit in (20_000_000, 20_500_000, 100_000_000):
        solution = solve(items, 5_000_000, limit)
        assert solution is not None
        assert solution.peak <= limit


def test_400_states_lose_at_most_2_percent_against_4000(monkeypatch: pytest.MonkeyPatch) -> None:
    items = large_items(random.Random(1))
    for share in (0.2, 0.5):
        monkeypatch.setattr(knapsack, "MAX_STATES", 400)
        found = solve(items, 0, share * 40 * 10**7)
        monkeypatch.setattr(knapsack, "MAX_STATES", 4000)
        finer = solve(items, 0, share * 40 * 10**7)
        assert found is not None
        assert finer is not None
        assert finer.seconds <= found.seconds <= 1.02 * finer.seconds
