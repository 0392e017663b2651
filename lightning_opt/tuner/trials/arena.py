"""Runs trials: candidates and baseline in processes side by side, which take blocks in turn."""

from __future__ import annotations

import functools
import json
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from lightning_opt.tuner.search.objective import Objective, steps_to, target_loss
from lightning_opt.tuner.search.search import TimeIsUp
from lightning_opt.tuner.search.space import Switches
from lightning_opt.tuner.trials.baseline import (
    Baseline,
    BaselineFailed,
    close_all,
    moved_from,
    side_by_side,
)
from lightning_opt.tuner.trials.intervals import Interval, ratio_interval
from lightning_opt.tuner.trials.numerics import compare, still
from lightning_opt.tuner.trials.trial import Trial
from lightning_opt.worker.training_process import Fit, FitFailed

Accept = float | Callable[[Trial], bool | str | None] | None

ROUNDS = (4, 10)
"""The fewest and the most rounds of blocks in which a trial that may gain is timed."""

PRECISE = 0.01
"""Half-width of an interval, as a share, at which more rounds are of no use."""


@dataclass
class Racer:
    """A candidate's process, while it is tried."""

    switches: Switches
    fit: Fit | None
    file: Path
    started: float
    trial: Trial = field(init=False)
    blocks: list[float] = field(default_factory=list)
    reference: list[float] = field(default_factory=list)
    steady: float = math.nan
    done: bool = False
    alone: bool = False

    def __post_init__(self) -> None:
        self.trial = Trial(self.switches)

    def advance(self, steps: int) -> float:
        """Take steps, and return the mean seconds of one."""
        assert self.fit is not None
        taken = self.fit.advance(steps)
        if len(taken) < steps:
            raise FitFailed("error", "The training ended by itself before it was measured.")
        self.trial.losses += [step.loss for step in taken]
        self.trial.peak = self.fit.peak_bytes
        return statistics.fmean(step.seconds for step in taken)

    def warm_up(self) -> None:
        """Take the two steps in which things are compiled, measured and allocated."""
        self.trial.startup = self.advance(1)
        self.steady = self.advance(1)

    @property
    def interval(self) -> Interval:
        """The ratio of times so far."""
        return ratio_interval(self.blocks, self.reference)

    @property
    def decided(self) -> bool:
        """Whether more rounds would not change what is thought of it."""
        if len(self.blocks) < 3:
            return False
        found = self.interval
        loses = found.low > 1.02
        precise = len(self.blocks) >= ROUNDS[0] and found.width < PRECISE
        clear = len(self.blocks) >= ROUNDS[0] + 1 and found.high < 0.9 and found.width < 0.03
        return loses or precise or clear


class Arena:
    """Tries configurations against a baseline that stays alive.

    Args:
        start: Starts a process from switches, a seed and a label; returns it and the file in which
            it writes about itself.
        baseline: What all are compared with.
        objective: Decides how closely a trial is looked at.
        accept: None for what seeds say, a share of the loss that may differ, or a function that is
            given the trial and returns whether to take it, or why not.
        seeds: How many seeds of the baseline say what its losses may differ by, itself included.
        parallel: Candidates that are alive at once.
        deadline: Time of ``time.monotonic`` at which no trial is begun and none goes on.
        shared: Whether trials take memory from each other, so that what ran out of it may have
            enough alone.
        on_seed: Told of each other seed that was run.
        on_begin: Told which configurations are begun.
    """

    def __init__(
        self,
        start: Callable[[Switches, int, str], tuple[Fit, Path]],
        baseline: Baseline,
        objective: Objective,
        *,
        accept: Accept = None,
        seeds: int = 3,
        parallel: int = 2,
        deadline: float = math.inf,
        shared: bool = True,
        on_seed: Callable[[int, list[float]], None] = lambda seed, losses: None,
        on_begin: Callable[[Sequence[Switches]], None] = lambda group: None,
    ) -> None:
        self._start, self.baseline, self.objective = start, baseline, objective
        self.accept, self.seeds, self.parallel = accept, seeds, parallel
        self.deadline, self._on_seed, self._on_begin = deadline, on_seed, on_begin
        self.shared, self.crowded = shared, False
        self._costs: list[float] = []

    def measure(self, configurations: Sequence[Switches]) -> Iterator[Trial]:
        """Yield the trials of configurations, in order.

        Raises:
            TimeIsUp: If the budget does not allow the next.
        """
        left = list(configurations)
        while left:
            expected = statistics.median(self._costs) if self._costs else 0.0
            if time.monotonic() + expected > self.deadline:
                raise TimeIsUp
            size = 1 if self.crowded else self.parallel
            group, left = left[:size], left[size:]
            self._on_begin(group)
            begun = time.monotonic()
            trials = self._alone(group[0]) if self.crowded else self._group(group)
            self._costs.append((time.monotonic() - begun) * (1.0 if len(group) == size else 1.5))
            for trial in trials:
                trial.cost = round((time.monotonic() - begun) / len(trials), 2)
                yield trial

    def close(self) -> None:
        """End all processes."""
        self.baseline.close()

    # --- together ---------------------------------------------------------------------------------

    def _group(self, group: Sequence[Switches]) -> list[Trial]:
        """Try some at once; what finds no memory is tried again by itself."""
        racers: list[Racer] = []
        try:
            self.baseline.ensure()
            racers.extend(map(self._racer, group))
            side_by_side(
                [functools.partial(self._guarded, racer, Racer.warm_up) for racer in racers],
                [racer.fit for racer in racers],
            )
            for racer in racers:
                self._guarded(racer, self._leave_if_slow)
            self._rounds(racers)
            for racer in racers:
                self._guarded(racer, self._judge)
        except BaselineFailed as failure:
            if failure.kind not in ("out of memory", "died"):
                raise
            self.crowded = True  # it found no room beside the others
            for racer in racers:
                racer.trial.verdict = "out of memory"
        finally:
            close_all(racer.fit for racer in racers if racer.fit is not None)
        return [self._again(racer) for racer in racers]

    def _again(self, racer: Racer) -> Trial:
        """Return the trial, or another one by itself if memory was shared."""
        if racer.trial.verdict == "out of memory" and self.shared:
            return self._alone(racer.switches)[0]
        return racer.trial

    def _racer(self, switches: Switches) -> Racer:
        begun = time.monotonic()
        try:
            fit, file = self._start(switches, 0, " + ".join(switches))
        except FitFailed as failure:
            racer = Racer(switches, None, Path(), begun)
            _fail(racer, failure)
            return racer
        return Racer(switches, fit, file, begun)

    def _guarded(self, racer: Racer, action: Callable[[Racer], None]) -> None:
        """Do something with a candidate that may fail without harm to the others."""
        if racer.trial.failed:
            return
        try:
            action(racer)
        except FitFailed as failure:
            _fail(racer, failure)

    def _leave_if_slow(self, racer: Racer) -> None:
        """End a trial that is far slower than the baseline, before it costs a block."""
        limit = self.objective.slowest
        for _ in range(3):  # the second step may be one that compiles again
            if racer.steady <= limit * self.baseline.step:
                return
            racer.steady = min(racer.steady, racer.advance(1))
        if racer.steady <= limit * self.baseline.step:
            return
        ratio = racer.steady / self.baseline.step
        racer.done = True
        racer.trial.verdict = "too slow"
        racer.trial.ratio = racer.trial.low = racer.trial.high = ratio
        racer.trial.seconds = racer.steady
        racer.trial.why = f"stopped after {len(racer.trial.losses)} steps"

    def _rounds(self, racers: Sequence[Racer]) -> None:
        """Let baseline and candidates take blocks in turn, until all are decided."""
        for turn in range(ROUNDS[1]):
            running = [racer for racer in racers if not (racer.done or racer.trial.failed)]
            late = time.monotonic() > self.deadline
            if not running or (late and turn >= 2):
                break
            if turn % 2:
                running.reverse()
            reference = self.baseline.take() if turn % 2 == 0 else None
            taken: dict[int, float] = {}
            for racer in running:
                try:
                    taken[id(racer)] = racer.advance(self.baseline.block)
                except FitFailed as failure:
                    _fail(racer, failure)
            if reference is None:
                reference = self.baseline.take()
            for racer in running:
                if id(racer) in taken:
                    racer.blocks.append(taken[id(racer)])
                    racer.reference.append(reference)
                    racer.done = racer.decided

    # --- judged -----------------------------------------------------------------------------------

    def _judge(self, racer: Racer) -> None:
        """Fill in the trial from what was measured."""
        trial = racer.trial
        if racer.blocks:
            self._fill_times(racer)
        assert trial.peak is not None
        reference = self.baseline.peak_after(len(trial.losses))
        trial.peak_ratio = trial.peak / reference if reference else None
        if trial.verdict == "too slow" or trial.ratio is None:
            return
        if self.objective.name == "time_to_loss":
            self._learn_target(racer, trial.ratio)
            return
        if not self.objective.gains(trial):
            self._compare(racer, seeds=False)
            trial.verdict, trial.why = self._no_gain(trial)
            return
        horizon = self.baseline.horizon
        if len(trial.losses) < horizon:
            racer.advance(horizon - len(trial.losses))
        self.baseline.reach(horizon)
        if racer.alone:  # other seeds need the room
            close_all([racer.fit] if racer.fit is not None else [])
        self._compare(racer, seeds=True)

    def _no_gain(self, trial: Trial) -> tuple[str, str]:
        slow = self.objective.name == "memory" and (trial.ratio or 0) > self.objective.max_slowdown
        if slow:
            return (
                "too slow",
                f"more than {self.objective.max_slowdown:g} times the baseline's time",
            )
        return "no gain", ""

    def _fill_times(self, racer: Racer) -> None:
        trial, interval = racer.trial, racer.interval
        trial.ratio, trial.low, trial.high = interval.value, interval.low, interval.high
        trial.seconds = statistics.median(racer.blocks)
        if trial.startup is not None:
            trial.startup = max(0.0, trial.startup - trial.seconds)

    def _compare(self, racer: Racer, seeds: bool) -> None:
        """Compare losses and what moves with the baseline's, and set the verdict."""
        trial, baseline = racer.trial, self.baseline
        given = float(self.accept) if isinstance(self.accept, (int, float)) else None
        horizon = baseline.horizon
        own, reference = trial.losses[:horizon], baseline.losses[:horizon]
        agreement = compare(own, reference, tolerance=given)
        needed = not agreement.accepted and math.isfinite(agreement.difference)
        if seeds and needed and self.accept is None and self.seeds > 1:
            others = baseline.run_seeds(self.seeds - 1, self._on_seed, together=not racer.alone)
            agreement = compare(own, reference, others)
        trial.difference, trial.tolerance = agreement.difference, agreement.tolerance
        if callable(self.accept) and seeds:
            why = _refusal(self.accept(trial))
        else:
            baseline.read_facts()
            # What no longer moves says more than what becomes of the loss.
            why = still(_moved(racer.file), baseline.moved) or agreement.why
        trial.verdict, trial.why = ("rejected", why) if why else ("accepted", "")

    def _learn_target(self, racer: Racer, ratio: float) -> None:
        """Train until the loss that the baseline has at the horizon, or for longer than it took."""
        trial, horizon = racer.trial, self.baseline.horizon
        self.baseline.reach(horizon)
        reference = self.baseline.losses[:horizon]
        target = target_loss(reference)
        usual = steps_to(target, reference) or horizon
        longest = math.ceil(1.1 * usual / ratio)
        while steps_to(target, trial.losses) is None and len(trial.losses) < longest:
            racer.advance(min(self.baseline.block, longest - len(trial.losses)))
        steps = steps_to(target, trial.losses)
        trial.steps_ratio = (steps or max(longest, len(trial.losses))) / usual
        broken = not all(map(math.isfinite, trial.losses)) and all(map(math.isfinite, reference))
        why = "a loss of it is not finite" if broken else ""
        if steps is None:
            trial.verdict = "no gain"
            trial.why = f"the loss is not {target:.4g} after {len(trial.losses)} steps"
        elif callable(self.accept):
            why = why or _refusal(self.accept(trial))
        if why:
            trial.verdict, trial.why = "rejected", why

    # --- alone ------------------------------------------------------------------------------------

    def _alone(self, switches: Switches) -> list[Trial]:
        """Try one with the device to itself, against the baseline's blocks from before."""
        self.baseline.reach(self.baseline.horizon)
        self.baseline.close()
        racer = self._racer(switches)
        racer.alone = True
        try:
            self._guarded(racer, Racer.warm_up)
            self._guarded(racer, self._leave_if_slow)
            self._guarded(racer, self._lonely_rounds)
            if not racer.trial.failed:
                self.crowded = True  # it runs, but not beside the baseline
                self._guarded(racer, self._judge)
        finally:
            close_all([racer.fit] if racer.fit is not None else [])
        return [racer.trial]

    def _lonely_rounds(self, racer: Racer) -> None:
        if racer.done:
            return
        for _ in range(ROUNDS[0] + 1):
            racer.blocks.append(racer.advance(self.baseline.block))
        usual = self.baseline.step
        racer.reference = [usual] * len(racer.blocks)


def _refusal(answer: bool | str | None) -> str:
    """Return why a function of the user's does not take a trial; empty if it does."""
    return answer if isinstance(answer, str) else "accept says no" if answer is False else ""


def _fail(racer: Racer, failure: FitFailed) -> None:
    racer.trial.verdict, racer.trial.why = failure.kind, failure.message
    racer.trial.details = failure.details[-4000:]


def _moved(file: Path) -> dict[int, list[str]]:
    return moved_from(json.loads(file.read_text())) if file.exists() else {}
