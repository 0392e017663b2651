"""Runs trials: candidates and baseline in processes side by side, which take blocks in turn."""

from __future__ import annotations

import functools
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from lightning_opt.core.ratios import Ratio, compare_pairs
from lightning_opt.profiling.comparing.result import OFFSET
from lightning_opt.tuner.search.objective import Objective
from lightning_opt.tuner.search.search import TimeIsUp
from lightning_opt.tuner.trial import Switches, Trial
from lightning_opt.tuner.trials.baseline import (
    Baseline,
    BaselineFailed,
    Observed,
    close_all,
    side_by_side,
)
from lightning_opt.tuner.trials.numerics import compare_gradients, compare_losses, compare_paths
from lightning_opt.tuner.trials.probe import LOOKED_AT
from lightning_opt.worker.training_process import Fit, FitFailed

ROUNDS = (4, 10)
"""The fewest and the most rounds of blocks in which a trial that may gain is timed."""

STEPS_ALONE = 60
"""Steps of the baseline whose losses are known when a candidate is tried without it."""

PRECISE = 0.02
"""Half-width of an interval, as a share, at which more rounds are of no use."""


@dataclass
class Racer:
    """A candidate's process, while it is tried."""

    switches: Switches
    fit: Fit | None
    file: Path
    trial: Trial = field(init=False)
    pairs: list[tuple[float, float]] = field(default_factory=list)
    """Seconds of a step in the baseline's block and in its own, round by round."""
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
    def ratio(self) -> Ratio:
        """The ratio of times so far; how sure it is, as :func:`~lightning_opt.compare` has it."""
        found = compare_pairs([self.pairs], confidence=0.9, offset=OFFSET)
        assert found is not None
        return found

    @property
    def decided(self) -> bool:
        """Whether more rounds would not change what is thought of it."""
        if len(self.pairs) < 3:
            return False
        found = self.ratio
        loses = found.low > 1.02
        precise = len(self.pairs) >= ROUNDS[0] and found.width < PRECISE
        clear = len(self.pairs) > ROUNDS[0] and found.high < 0.9 and found.width < 2 * PRECISE
        return loses or precise or clear


class Arena:
    """Tries configurations against a baseline that stays alive.

    Args:
        start: Starts a process from switches and whether the model is to draw other random
            numbers; returns it and the file in which it writes about itself.
        baseline: What all are compared with.
        objective: Decides how closely a trial is looked at.
        parallel: Candidates that are alive at once.
        deadline: Time of ``time.monotonic`` at which no trial is begun and none goes on.
        shared: Whether trials take memory from each other, so that what ran out of it may have
            enough alone.
        on_begin: Told which configurations are begun.
    """

    def __init__(
        self,
        start: Callable[[Switches, bool], tuple[Fit, Path]],
        baseline: Baseline,
        objective: Objective,
        *,
        parallel: int = 2,
        deadline: float = math.inf,
        shared: bool = True,
        on_begin: Callable[[Sequence[Switches]], None] = lambda group: None,
    ) -> None:
        self._start, self.baseline, self.objective = start, baseline, objective
        self.parallel, self.deadline, self._on_begin = parallel, deadline, on_begin
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
                self._guarded(racer, self._finish_watch)
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
        try:
            fit, file = self._start(switches, False)
        except FitFailed as failure:
            racer = Racer(switches, None, Path())
            _fail(racer, failure)
            return racer
        return Racer(switches, fit, file)

    def _guarded(self, racer: Racer, action: Callable[[Racer], None]) -> None:
        """Do something with a candidate that may fail without harm to the others."""
        if racer.trial.failed:
            return
        try:
            action(racer)
        except BaselineFailed:
            raise
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

    def _finish_watch(self, racer: Racer) -> None:
        """Take the steps whose gradients are looked at, before any is timed."""
        if not racer.done and len(racer.trial.losses) < LOOKED_AT:
            racer.advance(LOOKED_AT - len(racer.trial.losses))

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
                    racer.pairs.append((reference, taken[id(racer)]))
                    racer.done = racer.decided

    # --- judged -----------------------------------------------------------------------------------

    def _judge(self, racer: Racer) -> None:
        """Fill in the trial from what was measured."""
        trial = racer.trial
        if racer.pairs:
            trial.rounds = [racer.pairs]
            trial.set_times()
            trial.startup = max(0.0, (trial.startup or 0.0) - (trial.seconds or 0.0))
        assert trial.peak is not None
        reference = self.baseline.peak_after(len(trial.losses))
        trial.peak_ratio = trial.peak / reference if reference else None
        if trial.verdict == "too slow" or trial.ratio is None:
            return
        limit = self.objective.max_slowdown
        if self.objective.name == "memory" and trial.ratio > limit:
            trial.verdict = "too slow"
            trial.why = f"more than {limit:g} times the baseline's time"
        elif not self.objective.gains(trial):
            trial.verdict = "no gain"
        elif why := self._learns_otherwise(racer):
            trial.verdict, trial.why = "rejected", why

    def _learns_otherwise(self, racer: Racer) -> str:
        """Return why it does not learn what the baseline learns; empty if it does."""
        trial, baseline = racer.trial, self.baseline
        own = Observed.read(racer.file)
        if not racer.alone:
            baseline.catch_up(len(trial.losses))
        usual = baseline.observed
        trial.agreement, why = compare_gradients(own.gradients, usual.gradients)
        if why:
            if racer.alone and racer.fit is not None:
                racer.fit.close()  # another run of the baseline needs the room
            trial.agreement, why = compare_gradients(
                own.gradients, usual.gradients, baseline.noise()
            )
        return (
            why
            or compare_paths(own.moved, usual.moved)
            or compare_losses(trial.losses, baseline.losses)
        )

    # --- alone ------------------------------------------------------------------------------------

    def _alone(self, switches: Switches) -> list[Trial]:
        """Try one with the device to itself, against the baseline's blocks from before."""
        self.baseline.catch_up(STEPS_ALONE)
        self.baseline.close()
        racer = self._racer(switches)
        racer.alone = True
        try:
            self._guarded(racer, Racer.warm_up)
            self._guarded(racer, self._leave_if_slow)
            self._guarded(racer, self._finish_watch)
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
            racer.pairs.append((self.baseline.step, racer.advance(self.baseline.block)))


def _fail(racer: Racer, failure: FitFailed) -> None:
    racer.trial.verdict, racer.trial.why = failure.kind, failure.message
    racer.trial.details = failure.details[-4000:]
