"""Trials with simulated processes, whose times, losses and faults are planned."""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from lightning_opt.tuner.probe import Facts
from lightning_opt.tuner.search import Objective, Switches, TimeIsUp, Trial
from lightning_opt.tuner.trials import Baseline, BaselineFailed, Run, Trials
from lightning_opt.worker.training_process import FitFailed, Step


def falling(step: int) -> float:
    return 1.0 + 4.0 * math.exp(-0.1 * step) + 0.002 * (7 * step % 5)


@dataclass
class Plan:
    """The behaviour of a simulated training."""

    seconds: float = 0.1
    peak: int = 1000
    loss: Callable[[int], float] = falling
    fails: tuple[int, str] | None = None
    gradient: float = 1.0
    draws: bool = False  # whether random numbers change the gradient
    moved: tuple[str, ...] = ("a", "b")
    room: int = 99  # trainings that may be alive at once
    device: str = "cuda"
    workers: int = 0
    noise: float = 0.0
    growth: int = 0  # of the peak, per step


@dataclass
class World:
    """All simulated trainings, and the number alive."""

    plans: dict[Switches, Plan]
    folder: Path
    alive: int = 0
    busy_from: int = 99  # index of the first process on a slow machine

    @property
    def load(self) -> float:
        return 3.0 if len(self.started) >= self.busy_from else 1.0

    started: list[tuple[Switches, int]] = field(default_factory=list)
    turns: list[int] = field(default_factory=list)  # steps of each turn
    turn_switches: list[Switches] = field(default_factory=list)

    def start(self, switches: Switches, reseed: int) -> Run:
        file = self.folder / f"{len(self.started)}.pt"
        self.started.append((switches, reseed))
        process: Any = SimulatedProcess(self, switches, file)
        return Run(process, file)


class SimulatedProcess:
    def __init__(self, world: World, switches: Switches, file: Path) -> None:
        self.world, self.switches, self.file = world, switches, file
        self.plan = world.plans[switches]
        self.steps: list[Step] = []
        self.open = True
        self.timeout = 100.0
        world.alive += 1

    def advance(self, count: int) -> list[Step]:
        assert self.open
        if self.world.alive > self.plan.room:
            raise FitFailed("out of memory", "no room")
        if self.plan.fails and self.taken + count > self.plan.fails[0]:
            raise FitFailed(self.plan.fails[1], "planted", "trace")
        drift = 1 + (0.01 + self.plan.noise) * ((self.taken + count) % 3)
        seconds = self.plan.seconds * drift * self.world.load
        numbers = range(self.taken, self.taken + count)
        self.steps += [Step(seconds, self.plan.loss(number), 8) for number in numbers]
        self.world.turns.append(count)
        self.world.turn_switches.append(self.switches)
        self.write()
        return self.steps[-count:]

    @property
    def taken(self) -> int:
        return len(self.steps)

    @property
    def peak_bytes(self) -> int:
        return self.plan.peak + self.plan.growth * self.taken

    def write(self) -> None:
        generator = torch.Generator().manual_seed(int(self.file.stem))
        own = self.plan.gradient * torch.linspace(-1, 1, 400)
        own = own + 0.5 * self.plan.draws * torch.randn(400, generator=generator)
        moved = {
            power: {name: float(name in self.plan.moved) for name in "ab"}
            for power in (2, 4, 8, 16)
            if power <= self.taken
        }
        facts = asdict(Facts(device=self.plan.device, blocks=3, workers=self.plan.workers))
        gradients = [{"a.weight": own}] * min(self.taken, 4)
        torch.save({"facts": facts, "gradients": gradients, "moved": moved}, self.file)

    def close(self) -> None:
        self.world.alive -= self.open
        self.open = False


def run(
    world: World, wanted: Sequence[Switches], objective: str = "throughput", **settings: Any
) -> dict[Switches, Trial]:
    baseline = Baseline(world.start, 0.5)
    try:
        baseline.ensure_running()
        trials = Trials(world.start, baseline, Objective(objective), **settings)
        return {switches: trials.measure(switches) for switches in wanted}
    finally:
        baseline.close()
        assert world.alive == 0, "a process was not closed"


def world_of(folder: Path, **plans: Plan) -> World:
    return World({(): Plan(), **{(name,): plan for name, plan in plans.items()}}, folder)


def test_trials_record_time_and_memory_of_their_runs(tmp_path: Path) -> None:
    world = world_of(tmp_path, quick=Plan(0.06, 1500), slow=Plan(0.12), awful=Plan(2.0))
    trials = run(world, [("quick",), ("slow",), ("awful",)])
    quick, slow, awful = trials.values()
    assert quick.verdict == "accepted"
    assert quick.ratio == pytest.approx(0.6, rel=0.05)
    assert quick.peak_ratio == 1.5
    assert slow.verdict == "no gain"
    assert awful.verdict == "too slow"
    assert len(awful.losses) == 5
    assert awful.ratio == pytest.approx(20, rel=0.05)
    assert (awful.low, awful.high) == (None, None), "a few steps give no interval"
    assert {reseed for _, reseed in world.started} == {0}, "no noise run was needed"


def test_slow_machine_does_not_make_a_trial_too_slow(tmp_path: Path) -> None:
    world = world_of(tmp_path, quick=Plan(0.06))
    world.busy_from = 2
    trial = run(world, [("quick",)])["quick",]
    assert trial.verdict == "accepted"
    assert trial.ratio == pytest.approx(0.6, rel=0.05)


@pytest.mark.parametrize("room", [1, 99])
def test_noise_run_happens_once_and_alone(tmp_path: Path, room: int) -> None:
    world = world_of(
        tmp_path,
        off=Plan(0.05, draws=True, room=room),
        wrong=Plan(0.05, gradient=-1.0, draws=True, room=room),
    )
    world.plans[()] = Plan(draws=True, room=room)
    trials = run(world, [("off",), ("wrong",)])
    assert trials["off",].verdict == "accepted"
    assert trials["wrong",].verdict == "rejected"
    assert "has another direction" in trials["wrong",].why
    assert world.started.count(((), 1)) == 1


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        (Plan(0.05, gradient=-1.0), "the gradient of a.weight has another direction"),
        (Plan(0.05, moved=("a",)), "after 16 steps it has not changed b (1 in all), which"),
        (Plan(0.05, loss=lambda step: falling(step) + (step > 12)), "its loss differs by +1"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_different_learning_is_rejected(tmp_path: Path, wrong: Plan, why: str) -> None:
    trial = run(world_of(tmp_path, wrong=wrong), [("wrong",)])[("wrong",)]
    assert trial.verdict == "rejected"
    assert trial.why.startswith(why)


@pytest.mark.parametrize(("kind", "when"), [("setup", 0), ("error", 3), ("timeout", 8)])
def test_failure_ends_only_its_trial(tmp_path: Path, kind: str, when: int) -> None:
    world = world_of(tmp_path, bad=Plan(0.05, fails=(when, kind)), good=Plan(0.05))
    trials = run(world, [("bad",), ("good",)])
    assert (trials["bad",].verdict, trials["bad",].details) == (kind, "trace")
    assert trials["good",].verdict == "accepted"


@pytest.mark.parametrize(("trial_room", "baseline_room"), [(1, 99), (99, 1)])
def test_trial_without_memory_beside_the_baseline_runs_alone(
    tmp_path: Path, trial_room: int, baseline_room: int
) -> None:
    world = world_of(tmp_path, big=Plan(0.05, 5000, room=trial_room), small=Plan(0.06))
    world.plans[()] = Plan(room=baseline_room)
    big, small = run(world, [("big",), ("small",)]).values()
    assert (big.verdict, small.verdict) == ("accepted", "accepted")
    assert big.ratio == pytest.approx(0.5, rel=0.05)
    assert small.ratio == pytest.approx(0.6, rel=0.05)


@pytest.mark.parametrize(
    ("when", "kind", "message"),
    [(0, "error", "planted"), (12, "error", "planted"), (0, "timeout", r"\(--timeout\)")],
)
def test_baseline_failure_raises(tmp_path: Path, when: int, kind: str, message: str) -> None:
    world = world_of(tmp_path, a=Plan())
    world.plans[()] = Plan(fails=(when, kind))
    with pytest.raises(BaselineFailed, match=message):
        run(world, [("a",)])


@pytest.mark.parametrize("step", [0, 9])
def test_unresponsive_trial_raises_when_the_budget_ends(tmp_path: Path, step: int) -> None:
    world = world_of(tmp_path, a=Plan(fails=(step, "timeout")))
    with pytest.raises(TimeIsUp):
        run(world, [("a",)], deadline=time.monotonic() + 50)
    # The budget is longer than the trial's own timeout.
    trials = run(world, [("a",)], deadline=time.monotonic() + 150)
    assert trials["a",].verdict == "timeout"


def test_turn_with_little_time_does_not_shorten_the_next_one(tmp_path: Path) -> None:
    process = SimulatedProcess(world_of(tmp_path), (), tmp_path / "0.pt")
    run = Run(cast(Any, process), tmp_path / "0.pt")
    run.advance(1, deadline=time.monotonic() + 50)
    assert process.timeout <= 50
    run.advance(1)
    assert process.timeout == 100


def test_short_trial_is_compared_with_the_peak_after_as_many_steps(tmp_path: Path) -> None:
    world = world_of(tmp_path)
    world.plans[()] = Plan(peak=1000, growth=1)
    baseline = Baseline(world.start, 0.5)
    baseline.ensure_running()
    steps = max(baseline.peaks)
    baseline.take_turn(10)
    assert (baseline.peak_after(steps), baseline.peak_after(steps + 1)) == (
        1000 + steps,
        1010 + steps,
    )
    baseline.close()


def test_memory_objective_limits_the_slowdown(tmp_path: Path) -> None:
    world = world_of(tmp_path, small=Plan(0.13, 500), slow=Plan(0.16, 300), worse=Plan(0.1, 1200))
    small, slow, worse = run(
        world, [("small",), ("slow",), ("worse",)], objective="memory"
    ).values()
    assert (small.verdict, small.peak_ratio) == ("accepted", 0.5)
    assert slow.why == "more than 1.5 times the baseline's time"
    assert worse.verdict == "no gain"


def test_clear_differences_need_the_fewest_rounds(tmp_path: Path) -> None:
    """The minimum is four: with fewer, a 10% gain has looked like a loss on a busy machine."""
    world = world_of(tmp_path, half=Plan(0.05), near=Plan(0.095, noise=0.05))
    half, near = run(world, [("half",), ("near",)]).values()
    assert len(half.pairs_by_start[0]) == 4
    assert len(near.pairs_by_start[0]) > 4


CPU, WORKERS = Plan(device="cpu"), Plan(device="cpu", workers=2)


@pytest.mark.parametrize(
    ("baseline", "candidate", "whole"),
    [(CPU, CPU, False), (CPU, WORKERS, True), (WORKERS, CPU, True), (Plan(), Plan(), True)],
)
def test_turns_are_whole_blocks_on_gpu_and_with_workers(
    tmp_path: Path, baseline: Plan, candidate: Plan, whole: bool
) -> None:
    world = World({(): baseline, ("same",): candidate}, tmp_path)
    rounds = len(run(world, [("same",)])[("same",)].pairs_by_start[0])
    assert (world.turns.count(5) >= 2 * rounds) == whole
    assert (world.turns.count(1) >= 10 * rounds) != whole


def test_turns_alternate_and_rounds_start_with_either(tmp_path: Path) -> None:
    world = World({(): CPU, ("same",): CPU}, tmp_path)
    rounds = len(run(world, [("same",)])[("same",)].pairs_by_start[0])
    assert rounds >= 4
    timed = world.turn_switches[-10 * rounds :]
    pair: list[Switches] = [(), ("same",)]
    assert timed[:20] == pair * 5 + pair[::-1] * 5
