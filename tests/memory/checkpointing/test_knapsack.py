"""The knapsack against trying everything."""

import itertools
import random
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_opt.core.modules.blocks import Block, find_blocks
from lightning_opt.memory.checkpointing.planning import knapsack
from lightning_opt.memory.checkpointing.planning.block_profile import Unit
from lightning_opt.memory.checkpointing.planning.knapsack import (
    Item,
    Option,
    _steps,
    smallest_peak,
    solve,
)
from lightning_opt.memory.checkpointing.planning.step_planner import StepPlanner, longest_segment


def random_items(generator: random.Random, count: int) -> tuple[list[Item], int]:
    items = []
    for _ in range(count):
        internals = generator.randint(5, 40)
        recompute = Option("recompute", 0, generator.uniform(1, 5))
        part = Option("0", internals // 3, recompute.seconds * generator.uniform(0.4, 0.9))
        items.append(
            Item(
                options=(recompute, Option("keep", internals, 0.0), part),
                recompute=recompute if generator.random() < 0.8 else None,
                follows=generator.random() < 0.8,
                inputs=generator.randint(1, 5),
                internals=internals,
                forward_peak=generator.randint(10, 40),
                backward_peak=generator.randint(40, 80),
            )
        )
    return items, generator.randint(20, 90)


def fastest(items: list[Item], head_peak: int, budget: float) -> float | None:
    """Try every choice without segments; in prefixes, as the definition of the peak has it."""
    best = None
    for chosen in itertools.product(*(item.options for item in items)):
        held, peak = 0, 0
        for item, option in zip(items, chosen, strict=True):
            peak = max(peak, held + item.forward_peak, held + item.backward_peak)
            held += option.nbytes
        peak = max(peak, held + head_peak)
        seconds = sum(option.seconds for option in chosen)
        if peak <= budget and (best is None or seconds < best):
            best = seconds
    return best


@pytest.mark.parametrize("seed", range(25))
def test_it_finds_the_fastest(seed: int) -> None:
    generator = random.Random(seed)
    items, head = random_items(generator, generator.randint(1, 6))
    for budget in (60, 80, 100, 140, 200, 400):
        solution, expected = solve(items, head, budget), fastest(items, head, budget)
        assert (solution is None) == (expected is None)
        if solution is not None:
            assert solution.seconds == pytest.approx(expected)
            assert solution.peak <= budget
            assert [d.start for d in solution.decisions] == list(range(len(items)))


@pytest.mark.parametrize("seed", range(10))
def test_segments_never_hurt(seed: int) -> None:
    items, head = random_items(random.Random(seed), 8)
    for budget in (60, 100, 200):
        alone, joined = solve(items, head, budget), solve(items, head, budget, longest=4)
        if alone is not None:
            assert joined is not None
            assert joined.seconds <= alone.seconds + 1e-9
            assert joined.peak <= budget
            covered = [i for d in joined.decisions for i in range(d.start, d.stop)]
            assert covered == list(range(8))


@pytest.mark.parametrize("seed", range(10))
def test_the_smallest_peak(seed: int) -> None:
    items, head = random_items(random.Random(seed), 6)
    smallest = smallest_peak(items, head)
    recomputed = max(head, *(max(item.forward_peak, item.backward_peak) for item in items))
    assert smallest.peak == recomputed
    joined = smallest_peak(items, head, longest=3)
    assert joined.peak <= smallest.peak
    assert solve(items, head, joined.peak * 0.99, longest=3) is None


def test_what_can_be_met_is_met_however_many_bytes_there_are() -> None:
    """Of sums of bytes that are near each other the fastest is followed, and the least too."""
    generator, items = random.Random(0), []
    for _ in range(96):
        internals = generator.randint(9_000_000, 11_000_000)
        recompute = Option("recompute", 0, generator.uniform(4, 5))
        little = Option("0", internals // 9, 0.8 * recompute.seconds)
        items.append(
            Item(
                options=(recompute, Option("keep", internals, 0.0), little),
                recompute=recompute,
                follows=False,
                inputs=1_000_000,
                internals=internals,
                forward_peak=internals,
                backward_peak=20_000_000,
            )
        )
    assert smallest_peak(items, 5_000_000).peak == 20_000_000
    for budget in (20_000_000, 20_500_000, 100_000_000):
        solution = solve(items, 5_000_000, budget)
        assert solution is not None
        assert solution.peak <= budget


def test_a_segment_pays_for_the_rest_of_all_but_its_last() -> None:
    recompute = Option("recompute", 0, 1.0)
    items = [
        Item((recompute,), recompute, order > 0, 10, 20, 30, 30, remainder=0.25)
        for order in range(3)
    ]
    alone = solve(items, 30, 1000.0)
    assert alone is not None
    assert alone.seconds == 3.0
    joined = solve(items, 30, 1000.0, longest=3)
    assert joined is not None
    assert [(d.start, d.stop) for d in joined.decisions] == [(0, 1), (1, 2), (2, 3)], (
        "what costs more is not chosen for nothing"
    )
    found = [seconds for _, _, seconds, _ in _steps(items, 0, 3)]
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
def test_segments_are_offered_where_they_win(
    inputs: int, internals: int, count: int, longest: int
) -> None:
    """Against every length: no other holds much less, with all in segments of one length."""
    units = [Unit(Block(str(i), ()), inputs=inputs, internals=internals) for i in range(count)]
    assert longest_segment(units) == longest
    if count:
        held = {k: count / k * inputs + k * internals for k in range(1, count + 1)}
        best = min(held, key=lambda k: held[k])
        assert held[max(1, longest // 2)] <= 1.05 * held[best]


def test_96_blocks_of_eight_options_are_solved_as_well_with_400_states_as_with_10_000(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    generator = random.Random(1)
    items = []
    for _ in range(96):
        internals = generator.randint(900_000, 1_100_000)
        recompute = Option("recompute", 0, 1.0)
        levels = [Option(str(n), internals * n // 9, 1.0 - 0.12 * n) for n in range(1, 8)]
        items.append(
            Item(
                (recompute, Option("keep", internals, 0.0), *levels),
                recompute,
                True,
                60_000,
                internals,
                internals,
                2 * internals,
            )
        )
    for share in (0.2, 0.5):
        monkeypatch.setattr(knapsack, "STATES", 400)
        found = solve(items, 0, share * 96 * 10**6, longest=2)
        monkeypatch.setattr(knapsack, "STATES", 10_000)
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
    """A forward and backward pass, as the planner runs it."""

    def __init__(self) -> None:
        self.model, self.batch = nn.Sequential(*(Wide() for _ in range(16))), torch.randn(64, 32)

    def run(self, inside: Callable[[ExitStack], Any] | None = None) -> float:
        with ExitStack() as stack:
            if inside is not None:
                inside(stack)
            self.model(self.batch).sum().backward()
        return 0.0


def test_a_budget_that_single_blocks_miss_is_met_by_segments() -> None:
    step: Any = Step()
    step.run()
    planner = StepPlanner(step, find_blocks(step.model), torch.device("cpu"))
    assert longest_segment(planner.profile.units) == 1
    alone = smallest_peak(planner.items, planner.profile.head_peak, 1).peak
    joined = planner.smallest()
    assert joined.peak < 0.95 * alone
    outcome = planner.plan((joined.peak + alone) / 2 + planner.unseen)
    assert outcome.fits
    assert outcome.solution.seconds < joined.seconds, "no more segments than it takes"
    assert any(len(stretch.blocks) > 1 for stretch in outcome.plan)
