"""The knapsack against an exhaustive search, and the plan of a step."""

import itertools
import random
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_opt.core.modules.blocks import Block, find_blocks
from lightning_opt.memory.checkpointing import knapsack
from lightning_opt.memory.checkpointing.batch_plan import plan_step, smallest
from lightning_opt.memory.checkpointing.knapsack import Item, Option, smallest_peak, solve
from lightning_opt.memory.checkpointing.probes import Unit
from lightning_opt.memory.checkpointing.step_profile import (
    StepRunner,
    best_segment_length,
    profile_step,
)


def random_items(generator: random.Random, count: int) -> tuple[list[Item], int]:
    items = []
    for _ in range(count):
        internals = generator.randint(5, 40)
        recompute = Option("recompute", 0, generator.uniform(1, 5))
        part = Option("0", internals // 3, recompute.seconds * generator.uniform(0.4, 0.9))
        items.append(
            Item(
                options=(recompute, Option("keep", internals, 0.0), part),
                joinable=generator.random() < 0.8,
                takes_previous_output=generator.random() < 0.8,
                inputs=generator.randint(1, 5),
                internal_bytes=internals,
                forward_peak=generator.randint(10, 40),
                backward_peak=generator.randint(40, 80),
            )
        )
    return items, generator.randint(20, 90)


def fastest(items: list[Item], head_peak: int, limit: float) -> float | None:
    """Try every choice without segments, with the peak computed by its definition."""
    best = None
    for chosen in itertools.product(*(item.options for item in items)):
        held, peak = 0, 0
        for item, option in zip(items, chosen, strict=True):
            peak = max(peak, held + item.forward_peak, held + item.backward_peak)
            held += option.nbytes
        peak = max(peak, held + head_peak)
        seconds = sum(option.seconds for option in chosen)
        if peak <= limit and (best is None or seconds < best):
            best = seconds
    return best


@pytest.mark.parametrize("seed", range(25))
def test_solution_is_the_fastest_of_all_choices(seed: int) -> None:
    generator = random.Random(seed)
    items, head = random_items(generator, generator.randint(1, 6))
    for limit in (60, 80, 100, 140, 200, 400):
        solution, expected = solve(items, head, limit), fastest(items, head, limit)
        assert (solution is None) == (expected is None)
        if solution is not None:
            assert solution.seconds == pytest.approx(expected)
            assert solution.peak <= limit
            assert [d.start for d in solution.decisions] == list(range(len(items)))


@pytest.mark.parametrize("seed", range(10))
def test_segments_never_make_the_solution_slower_or_larger(seed: int) -> None:
    items, head = random_items(random.Random(seed), 8)
    for limit in (60, 100, 200):
        alone, joined = solve(items, head, limit), solve(items, head, limit, longest=4)
        if alone is not None:
            assert joined is not None
            assert joined.seconds <= alone.seconds + 1e-9
            assert joined.peak <= limit
            covered = [i for d in joined.decisions for i in range(d.start, d.stop)]
            assert covered == list(range(8))
    least = smallest_peak(items, head)
    assert least.peak == max(head, *(max(i.forward_peak, i.backward_peak) for i in items))
    joined = smallest_peak(items, head, longest=3)
    assert joined.peak <= least.peak
    assert solve(items, head, joined.peak * 0.99, longest=3) is None


def test_feasible_limit_is_met_at_any_number_of_bytes() -> None:
    generator, items = random.Random(0), []
    for _ in range(96):
        internals = generator.randint(9_000_000, 11_000_000)
        recompute = Option("recompute", 0, generator.uniform(4, 5))
        little = Option("0", internals // 9, 0.8 * recompute.seconds)
        items.append(
            Item(
                options=(recompute, Option("keep", internals, 0.0), little),
                joinable=True,
                inputs=1_000_000,
                internal_bytes=internals,
                forward_peak=internals,
                backward_peak=20_000_000,
            )
        )
    assert smallest_peak(items, 5_000_000).peak == 20_000_000
    for limit in (20_000_000, 20_500_000, 100_000_000):
        solution = solve(items, 5_000_000, limit)
        assert solution is not None
        assert solution.peak <= limit


def test_segment_includes_the_remainder_of_all_but_its_last_block() -> None:
    recompute = Option("recompute", 0, 1.0)
    items = [Item((recompute,), True, i > 0, 10, 20, 30, 30, remainder=0.25) for i in range(3)]
    # Segments are slower, so only a limit that single blocks miss chooses them.
    for limit, seconds in ((30.0, 3.0), (25.0, None)):
        solution = solve(items, 0, limit, longest=3)
        assert (solution and solution.seconds) == seconds
    found = [decision.seconds for decision in knapsack._decisions(items, 0, 3)]
    assert found == [1.0, 2.25, 3.5]


@pytest.mark.parametrize(
    ("inputs", "internals", "count", "longest"),
    [
        (1, 16, 24, 1),  # a transformer: one input beside sixteen tensors inside
        (1, 3, 12, 4),  # residual convolutions
        (1, 2, 32, 8),  # linear, norm, activation
        (1, 0, 0, 1),
    ],
)
def test_segment_length_holds_little_more_than_the_best_one(
    inputs: int, internals: int, count: int, longest: int
) -> None:
    units = [
        Unit(block=Block(str(i), ()), inputs=inputs, internal_bytes=internals) for i in range(count)
    ]
    assert best_segment_length(units) == longest
    if count:
        held = {k: count / k * inputs + k * internals for k in range(1, count + 1)}
        best = min(held, key=lambda k: held[k])
        assert held[max(1, longest // 2)] <= 1.05 * held[best]


def test_400_states_lose_at_most_2_percent_against_10_000(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = random.Random(1)
    items = []
    for _ in range(96):
        internals = generator.randint(900_000, 1_100_000)
        recompute = Option("recompute", 0, 1.0)
        levels = [Option(str(n), internals * n // 9, 1.0 - 0.12 * n) for n in range(1, 8)]
        options = (recompute, Option("keep", internals, 0.0), *levels)
        items.append(Item(options, True, True, 60_000, internals, internals, 2 * internals))
    for share in (0.2, 0.5):
        monkeypatch.setattr(knapsack, "MAX_STATES", 400)
        found = solve(items, 0, share * 96 * 10**6, longest=2)
        monkeypatch.setattr(knapsack, "MAX_STATES", 10_000)
        finer = solve(items, 0, share * 96 * 10**6, longest=2)
        assert found is not None
        assert finer is not None
        assert finer.seconds <= found.seconds <= 1.02 * finer.seconds


class Wide(nn.Module):
    """A residual block with eight times its input inside."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(32, 256), nn.Linear(256, 32)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.outer(self.inner(x).relu())


class Step:
    """A forward and backward pass, with the interface of `TrialStep`."""

    def __init__(self) -> None:
        self.model, self.batch = nn.Sequential(*(Wide() for _ in range(16))), torch.randn(64, 32)

    def run(self, inside: Callable[[ExitStack], Any] | None = None) -> float:
        with ExitStack() as stack:
            if inside is not None:
                inside(stack)
            self.model(self.batch).sum().backward()
        return 0.0


def test_segments_meet_a_limit_that_single_blocks_miss() -> None:
    step: Any = Step()
    step.run()
    profile = profile_step(StepRunner(step, torch.device("cpu")), find_blocks(step.model))
    assert best_segment_length(profile.units) == 1
    alone = smallest_peak(profile.units, profile.head_peak, 1).peak
    joined = smallest(profile)
    assert joined.peak < 0.95 * alone
    found = plan_step(profile, (joined.peak + alone) / 2 + profile.reserve)
    assert found.fits
    assert found.solution.seconds < joined.seconds, "no more segments than necessary"
    assert any(len(group.blocks) > 1 for group in found.plan)
