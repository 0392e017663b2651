"""How trials are run, on processes that only pretend: their clocks, losses and faults are planned.

Real ones are in ``test_autotune.py``; a device that holds one training but not two is not at hand.
"""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from lightning_opt.tuner.search.objective import Objective
from lightning_opt.tuner.search.search import TimeIsUp
from lightning_opt.tuner.search.space import Switches
from lightning_opt.tuner.trials.arena import Arena
from lightning_opt.tuner.trials.baseline import Baseline, BaselineFailed
from lightning_opt.tuner.trials.trial import Trial
from lightning_opt.worker.training_process import FitFailed, Step


def falling(step: int, seed: int = 0) -> float:
    return 1.0 + 4.0 * math.exp(-0.1 * step) + 0.002 * ((7 * step + 3 * seed) % 5)


@dataclass
class Plan:
    """What a pretended training does."""

    seconds: float = 0.1
    peak: int = 1000
    loss: Callable[[int, int], float] = falling
    fails: tuple[int, str] | None = None
    moved: tuple[str, ...] = ("a", "b")
    room: int = 99  # trainings that may be alive at once


@dataclass
class World:
    """All pretended trainings, and how many are alive."""

    plans: dict[Switches, Plan]
    folder: Path
    alive: int = 0
    started: list[tuple[Switches, int]] = field(default_factory=list)

    def start(self, switches: Switches, seed: int, label: str) -> tuple[Any, Path]:
        file = self.folder / f"{len(self.started)}.json"
        self.started.append((switches, seed))
        return Pretended(self, self.plans[switches], seed, file), file

    def arena(self, objective: str = "throughput", **settings: Any) -> Arena:
        baseline = Baseline(self.start, block_seconds=0.5, horizon_seconds=2.4)
        return Arena(self.start, baseline, Objective(objective), **settings)


class Pretended:
    """Stands for a Fit."""

    def __init__(self, world: World, plan: Plan, seed: int, file: Path) -> None:
        self.world, self.plan, self.seed, self.file = world, plan, seed, file
        self.taken, self.open = 0, True
        self.peak_bytes = plan.peak
        world.alive += 1

    def advance(self, count: int) -> list[Step]:
        assert self.open
        if self.world.alive > self.plan.room:
            raise FitFailed("out of memory", "no room")
        if self.plan.fails and self.taken + count > self.plan.fails[0]:
            raise FitFailed(self.plan.fails[1], "planted", "trace")
        steps = range(self.taken, self.taken + count)
        self.taken += count
        moved = {
            str(power): list(self.plan.moved) for power in (2, 4, 8, 16) if power <= self.taken
        }
        self.file.write_text(json.dumps({"device": "cuda", "blocks": 3, "moved": moved}))
        drift = 1 + 0.01 * (self.taken % 3)
        return [
            Step(self.plan.seconds * drift, self.plan.loss(step, self.seed), 8) for step in steps
        ]

    def ask_to_end(self) -> None:
        pass

    def close(self) -> None:
        self.world.alive -= self.open
        self.open = False

    def __exit__(self, *error: object) -> None:
        self.close()


def run(world: World, wanted: Sequence[Switches], **settings: Any) -> dict[Switches, Trial]:
    arena = world.arena(**settings)
    try:
        return {trial.switches: trial for trial in arena.measure(wanted)}
    finally:
        arena.close()
        assert world.alive == 0, "a process was left behind"


def world_of(folder: Path, **plans: Plan) -> World:
    return World({(): Plan(), **{(name,): plan for name, plan in plans.items()}}, folder)


def test_times_memory_and_losses_are_those_of_the_trainings(tmp_path: Path) -> None:
    world = world_of(tmp_path, quick=Plan(0.06, 1500), slow=Plan(0.12), awful=Plan(2.0))
    trials = run(world, [("quick",), ("slow",), ("awful",)])
    quick, slow, awful = trials.values()
    assert quick.verdict == "accepted"
    assert quick.ratio == pytest.approx(0.6, rel=0.05)
    assert quick.peak_ratio == 1.5
    assert quick.difference == 0
    assert len(quick.losses) >= 24, "as many as are compared"
    assert slow.verdict == "no gain"
    assert awful.verdict == "too slow"
    assert len(awful.losses) == 5
    assert awful.ratio == pytest.approx(20, rel=0.05)
    assert [seed for _, seed in world.started if seed] == [], "no other seed was needed"


def test_seeds_are_run_once_and_only_when_they_decide(tmp_path: Path) -> None:
    off = Plan(0.05, loss=lambda step, seed: 1.003 * falling(step, seed))
    wrong = Plan(0.05, loss=lambda step, seed: 1.0 + 4.0 * math.exp(-0.05 * step))
    spread = Plan(loss=lambda step, seed: falling(step, seed) * (1 + 0.01 * (seed == 1)))
    world = world_of(tmp_path, off=off, wrong=wrong)
    world.plans[()] = spread
    told: list[int] = []
    trials = run(world, [("off",), ("wrong",)], on_seed=lambda seed, losses: told.append(seed))
    assert trials[("off",)].verdict == "accepted"
    assert trials[("wrong",)].verdict == "rejected"
    assert told == [1, 2]
    assert [seed for switches, seed in world.started if not switches] == [0, 1, 2]


def test_a_share_or_a_function_may_decide_instead(tmp_path: Path) -> None:
    off = Plan(0.05, loss=lambda step, seed: 1.01 * falling(step, seed))
    for accept, verdict, why in (
        (0.02, "accepted", ""),
        (0.001, "rejected", "its loss differs"),
        (lambda trial: trial.ratio > 0.9, "rejected", "accept says no"),
        (lambda trial: "not on a Sunday", "rejected", "not on a Sunday"),
        (lambda trial: None, "accepted", ""),
    ):
        world = world_of(tmp_path, off=off)
        trial = run(world, [("off",)], accept=accept)[("off",)]
        assert (trial.verdict, trial.why[: len(why)]) == (verdict, why)
        assert len(world.started) == 2, "no other seed"


def test_what_no_longer_moves_is_rejected(tmp_path: Path) -> None:
    world = world_of(tmp_path, frozen=Plan(0.05, moved=("a",)))
    trial = run(world, [("frozen",)])[("frozen",)]
    assert trial.verdict == "rejected"
    assert trial.why == "after 16 steps it has not changed b, which the baseline trains"


@pytest.mark.parametrize("when", [0, 1, 3, 8])
@pytest.mark.parametrize("kind", ["error", "died", "timeout", "setup"])
def test_a_failure_ends_one_trial_only(tmp_path: Path, kind: str, when: int) -> None:
    world = world_of(tmp_path, bad=Plan(0.05, fails=(when, kind)), good=Plan(0.05))
    trials = run(world, [("bad",), ("good",)])
    assert (trials[("bad",)].verdict, trials[("bad",)].details) == (kind, "trace")
    assert trials[("good",)].verdict == "accepted"


def test_what_finds_no_room_beside_the_others_is_tried_alone(tmp_path: Path) -> None:
    world = world_of(tmp_path, big=Plan(0.05, 5000, room=1), small=Plan(0.07))
    trials = run(world, [("big",), ("small",)])
    assert trials[("big",)].verdict == "accepted"
    assert trials[("big",)].ratio == pytest.approx(0.5, rel=0.05)
    assert trials[("small",)].verdict == "accepted"


def test_a_baseline_that_is_crowded_out_is_begun_again(tmp_path: Path) -> None:
    world = world_of(tmp_path, a=Plan(0.05), b=Plan(0.06))
    world.plans[()] = Plan(room=1)
    trials = run(world, [("a",), ("b",)])
    assert [trial.verdict for trial in trials.values()] == ["accepted", "accepted"]
    assert trials[("b",)].ratio == pytest.approx(0.6, rel=0.05)


def test_other_seeds_are_run_one_by_one_where_there_is_room_for_one(tmp_path: Path) -> None:
    off = Plan(0.05, loss=lambda step, seed: 1.003 * falling(step, seed), room=1)
    world = world_of(tmp_path, off=off)
    world.plans[()] = Plan(
        room=1, loss=lambda step, seed: falling(step, seed) * (1 + 0.01 * (seed == 1))
    )
    trial = run(world, [("off",)])[("off",)]
    assert trial.verdict == "accepted"
    assert [seed for _, seed in world.started if seed] == [1, 2]


def test_where_a_limit_holds_for_each_alone_nothing_is_tried_twice(tmp_path: Path) -> None:
    world = world_of(tmp_path, big=Plan(fails=(3, "out of memory")))
    assert run(world, [("big",)], shared=False)[("big",)].verdict == "out of memory"
    assert len(world.started) == 2


def test_a_baseline_that_fails_by_itself_is_an_error(tmp_path: Path) -> None:
    world = world_of(tmp_path, a=Plan())
    world.plans[()] = Plan(fails=(30, "error"))
    with pytest.raises(BaselineFailed, match="planted"):
        run(world, [("a",)])


def test_no_trial_is_begun_after_the_deadline(tmp_path: Path) -> None:
    world = world_of(tmp_path, a=Plan())
    with pytest.raises(TimeIsUp):
        run(world, [("a",)], deadline=0.0)
    assert world.started == []


def test_memory_may_cost_some_time_but_not_any(tmp_path: Path) -> None:
    world = world_of(tmp_path, small=Plan(0.13, 500), slow=Plan(0.16, 300), worse=Plan(0.1, 1200))
    small, slow, worse = run(
        world, [("small",), ("slow",), ("worse",)], objective="memory"
    ).values()
    assert (small.verdict, small.peak_ratio) == ("accepted", 0.5)
    assert slow.why == "more than 1.5 times the baseline's time"
    assert worse.verdict == "no gain"


def test_time_to_loss_takes_any_way_there(tmp_path: Path) -> None:
    leaping = Plan(0.11, loss=lambda step, seed: falling(3 * step))
    stuck = Plan(0.05, loss=lambda step, seed: 4.0)
    broken = Plan(0.05, loss=lambda step, seed: math.nan if step == 3 else falling(step))
    world = world_of(tmp_path, leaping=leaping, stuck=stuck, broken=broken)
    wanted = [("leaping",), ("stuck",), ("broken",)]
    trials = run(world, wanted, objective="time_to_loss")
    goal = Objective("time_to_loss")
    assert trials[("leaping",)].verdict == "accepted"
    assert goal.outcome(trials[("leaping",)]).score < 0.6
    assert trials[("stuck",)].why.startswith("the loss is not")
    assert goal.outcome(trials[("stuck",)]).score > 1
    assert trials[("broken",)].verdict == "rejected"
