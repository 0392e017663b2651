"""The knapsack against a search of all plans."""

import random

import numpy as np
import pytest

from lightning_opt.core.modules.blocks import Block
from lightning_opt.memory.checkpointing.batch_plan import solve
from lightning_opt.memory.checkpointing.step_profile import Option, Unit

BLOCK = Block("", ())
RECOMPUTE, PART = frozenset[tuple[str, int]](), frozenset({("mm", 0)})


def random_items(generator: random.Random, count: int) -> list[Unit]:
    items = []
    for _ in range(count):
        nbytes, seconds = generator.randint(10**6, 10**8), generator.uniform(1, 10)
        held = int(nbytes * generator.uniform(0.1, 0.8))
        part = Option(PART, held, seconds * generator.uniform(0.1, 0.9))
        options = (Option(RECOMPUTE, 0, seconds), Option(None, nbytes, 0.0), part)
        items.append(Unit(BLOCK, options, generator.randint(10**7, 2 * 10**8)))
    return items


def all_plans(items: list[Unit], head_peak: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the peak and the seconds of every plan, each by its definition."""
    held = peak = np.zeros(1, np.int64)
    seconds = np.zeros(1)
    for item in items:
        peak = np.tile(np.maximum(peak, held + item.peak), len(item.options))
        held = np.concatenate([held + option.nbytes for option in item.options])
        seconds = np.concatenate([seconds + option.seconds for option in item.options])
    return np.maximum(peak, held + head_peak), seconds


@pytest.mark.parametrize("seed", range(24))
def test_solution_is_as_fast_as_the_best_of_all_plans(seed: int) -> None:
    generator = random.Random(seed)
    items = random_items(generator, 12 if seed % 4 == 0 else generator.randint(1, 11))
    head = generator.randint(10**6, 10**8)
    peaks, seconds = all_plans(items, head)
    for share in (0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0):
        limit = share * peaks.max()
        solution = solve(items, head, limit)
        assert (solution is None) == (peaks > limit).all()
        if solution is not None:
            assert solution.seconds <= 1.001 * seconds[peaks <= limit].min() + 1e-9
            assert solution.seconds == pytest.approx(sum(o.seconds for o in solution.options))
            assert len(solution.options) == len(items)
            assert solution.peak <= limit


def test_feasible_limit_is_met_at_any_number_of_bytes() -> None:
    generator = random.Random(0)
    items = []
    for _ in range(40):
        nbytes = generator.randint(9_000_000, 11_000_000)
        options = [Option(RECOMPUTE, 0, generator.uniform(4, 5)), Option(None, nbytes, 0.0)]
        options += [
            Option(PART, nbytes * n // 9, options[0].seconds * (1 - 0.12 * n)) for n in range(1, 8)
        ]
        items.append(Unit(BLOCK, tuple(options), 20_000_000))
    assert solve(items, 5_000_000, 19_999_999) is None
    for limit in (20_000_000, 20_500_000, 100_000_000):
        solution = solve(items, 5_000_000, limit)
        assert solution is not None
        assert solution.peak <= limit
