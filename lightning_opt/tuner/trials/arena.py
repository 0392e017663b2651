"""Runs trials: a candidate and the baseline, in processes side by side, take blocks in turn."""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from lightning_opt.tuner.search.objective import Objective
from lightning_opt.tuner.search.search import HOPELESS, TimeIsUp
from lightning_opt.tuner.trial import Switches, Trial
from lightning_opt.tuner.trials.baseline import (
    MOST_STEPS,
    Baseline,
    BaselineFailed,
    Observed,
    Start,
)
from lightning_opt.tuner.trials.numerics import judge
from lightning_opt.tuner.trials.probe import LOOKED_AT
from lightning_opt.worker.training_process import Fit, FitFailed

ROUNDS = (4, 14)
"""The fewest rounds of blocks in which a trial that may gain is timed, and the usual most."""

PRECISE = 0.02
"""Half-width of an interval, as a share, at which more rounds are of no use."""

TURN = 0.05
"""Seconds of a turn where both may alternate that often: in equal time it has less than half the
noise of turns of 150 ms, since which of two processes the system favours changes within those."""

GRACE = 2.0
"""Seconds that a trial's answer may still take when the budget has ended."""


class Racer:
    """A candidate's process, and the trial that comes of it."""

    def __init__(self, trial: Trial, fit: Fit, file: Path, alone: bool, deadline: float) -> None:
        self.trial, self.fit, self.file, self.alone = trial, fit, file, alone
        self.trial.rounds = [[]]
        self._deadline, self._patience = deadline, fit.timeout

    def advance(self, steps: int) -> float:
        """Take steps, and return the mean seconds of one."""
        left = max(GRACE, self._deadline - time.monotonic())
        self.fit.timeout = min(self._patience, left)
        try:
            taken = self.fit.advance(steps)
        except FitFailed as failure:
            if failure.kind == "timeout" and left < self._patience:
                raise TimeIsUp from failure
            raise
        if len(taken) < steps:
            raise FitFailed("error", "The run ended by itself before it was measured.")
        self.trial.losses += [step.loss for step in taken]
        self.trial.peak = self.fit.peak_bytes
        return statistics.fmean(step.seconds for step in taken)

    def block(self, steps: int) -> float:
        """Take about as long a block as the baseline's, since data come from workers in bursts."""
        return self.advance(max(steps, min(MOST_STEPS, round(steps / (self.trial.ratio or 1.0)))))

    def add(self, reference: float, own: float) -> None:
        """Take in a round: seconds of a step in the baseline's block and in its own."""
        self.trial.rounds[0].append((reference, own))
        self.trial.set_times()

    @property
    def decided(self) -> bool:
        """Whether more rounds would not change what is thought of it."""
        rounds, (ratio, low, high) = len(self.trial.rounds[0]), self.trial.interval
        width = (high - low) / 2 / ratio
        loses = rounds >= 3 and low > HOPELESS  # three rounds have called a gain of 10% a loss
        precise = rounds >= ROUNDS[0] and width < PRECISE
        clear = rounds > ROUNDS[0] and high < 0.9 and width < 2 * PRECISE
        return loses or precise or clear


class Arena:
    """Tries configurations against a baseline that stays alive.

    Args:
        start: Starts a process from switches; returns it and the file in which it writes about
            itself.
        baseline: What all are compared with.
        objective: Decides how closely a trial is looked at.
        deadline: Time of ``time.monotonic`` at which no trial is begun and none goes on.
        on_begin: Told which configuration is begun.
    """

    def __init__(
        self,
        start: Start,
        baseline: Baseline,
        objective: Objective,
        *,
        deadline: float = math.inf,
        on_begin: Callable[[Switches], None] = lambda switches: None,
    ) -> None:
        self._start, self.baseline, self.objective = start, baseline, objective
        self.deadline, self._on_begin = deadline, on_begin
        self.crowded = False
        self._costs: list[float] = []

    def measure(self, configurations: Sequence[Switches]) -> Iterator[Trial]:
        """Yield the trials of configurations, in order.

        Raises:
            TimeIsUp: If the budget does not allow the next.
        """
        for switches in configurations:
            begun = time.monotonic()
            if begun + (statistics.median(self._costs) if self._costs else 0.0) > self.deadline:
                raise TimeIsUp
            self._on_begin(switches)
            trial = self._alone(switches) if self.crowded else self._beside(switches)
            trial.cost = round(time.monotonic() - begun, 2)
            self._costs.append(trial.cost)
            yield trial

    def close(self) -> None:
        """End all processes."""
        self.baseline.close()

    def _beside(self, switches: Switches) -> Trial:
        """Try one beside the baseline; what finds no memory is tried again by itself."""
        try:
            self.baseline.ensure()
            trial = self._run(switches, self._rounds)
        except BaselineFailed as failure:
            if failure.kind not in ("out of memory", "died"):
                raise
            self.crowded = True  # it found no room beside the candidate
            trial = Trial(switches, "out of memory")
        return self._alone(switches) if trial.verdict == "out of memory" else trial

    def _alone(self, switches: Switches) -> Trial:
        """Try one with the device to itself, against the baseline's blocks from before."""
        # Its losses up to where the candidate will come to are compared with the candidate's.
        self.baseline.catch_up(self._compared)
        self.baseline.close()
        trial = self._run(switches, self._lonely_rounds, alone=True)
        self.crowded |= not trial.failed  # it runs, but not beside the baseline
        return trial

    @property
    def _compared(self) -> int:
        """Steps whose losses are compared, or more if the baseline has taken them."""
        return LOOKED_AT + 1 + (ROUNDS[0] + 1) * self.baseline.block

    def _run(
        self, switches: Switches, rounds: Callable[[Racer], None], alone: bool = False
    ) -> Trial:
        trial, fit = Trial(switches), None
        try:
            fit, file = self._start(switches)
            # It may start as slowly as the baseline did, however little of the budget is left.
            started = time.monotonic() + 2 * self.baseline.startup
            racer = Racer(trial, fit, file, alone, max(self.deadline, started))
            trial.startup = racer.advance(1)
            if not self._is_too_slow(racer):
                # The steps whose gradients are looked at come before any that is timed.
                racer.advance(max(1, LOOKED_AT - len(trial.losses)))
                rounds(racer)
            self._judge(racer)
        except BaselineFailed:
            raise
        except FitFailed as failure:
            trial.verdict, trial.why = failure.kind, failure.message
            trial.details = failure.details[-4000:]
        finally:
            if fit is not None:
                fit.close()
        return trial

    def _is_too_slow(self, racer: Racer) -> bool:
        """Return whether a trial is far slower than the baseline, before it costs a block."""
        usual, trial = self.baseline.step, racer.trial
        steady = math.inf
        spent = 0.0
        # The second step may be one that compiles again, and short ones take long at first.
        while len(trial.losses) < 5 or spent < self.baseline.block_seconds:
            spent += (last := racer.advance(1))
            steady = min(steady, last)
            if steady <= self.objective.slowest * usual:
                return False
        if not racer.alone:  # the machine may have become slow, and not the candidate
            usual = max(usual, self.baseline.take())
        if steady <= self.objective.slowest * usual:
            return False
        trial.verdict, trial.why = "too slow", f"stopped after {len(trial.losses)} steps"
        trial.ratio, trial.seconds = steady / usual, steady
        return True

    def _rounds(self, racer: Racer) -> None:
        """Let baseline and candidate take blocks in turn, until it is decided."""
        begun, steps = time.monotonic(), self._turn(racer)
        startup = racer.trial.startup or 0.0
        for count in itertools.count():
            now = time.monotonic()
            # What took long to start is looked at for longer.
            decided = now - begun > startup / 8 and racer.decided
            tired = now - begun > startup / 2 and count >= ROUNDS[1]
            if count >= 2 and (now > self.deadline or decided or tired):
                return
            turns = range(max(1, self.baseline.block // steps))
            pairs = [(self.baseline.take(steps), racer.block(steps)) for _ in turns]
            racer.add(*map(statistics.fmean, zip(*pairs, strict=True)))

    def _turn(self, racer: Racer) -> int:
        """Return the steps of a turn, a whole block where short ones would mislead.

        A GPU is waited for at the end of a turn, and a loader's workers rest between turns.
        """
        block, facts = self.baseline.block, Observed.read(racer.file).facts
        if facts.device != "cpu" or facts.workers:
            return block
        return min(block, max(1, round(TURN / self.baseline.step)))

    def _lonely_rounds(self, racer: Racer) -> None:
        for _ in range(ROUNDS[0] + 1):
            racer.add(self.baseline.step, racer.block(self.baseline.block))

    def _judge(self, racer: Racer) -> None:
        """Fill in the trial from what was measured."""
        trial, limit = racer.trial, self.objective.max_slowdown
        if racer.trial.rounds[0]:
            trial.startup = max(0.0, (trial.startup or 0.0) - (trial.seconds or 0.0))
        reference = self.baseline.peak_after(len(trial.losses))
        trial.peak_ratio = (trial.peak or 0) / reference if reference else None
        if trial.verdict == "too slow":
            return
        if self.objective.name != "throughput" and (trial.ratio or 0.0) > limit:
            trial.verdict = "too slow"
            trial.why = f"more than {limit:g} times the baseline's time"
        elif not self.objective.gains(trial):
            trial.verdict = "no gain"
        elif why := self._learns_otherwise(racer):
            trial.verdict, trial.why = "rejected", why

    def _learns_otherwise(self, racer: Racer) -> str:
        """Return why it does not learn what the baseline learns; empty if it does."""
        own = Observed.read(racer.file, racer.trial.losses)
        if not racer.alone:
            self.baseline.catch_up(min(len(own.losses), self._compared))
        racer.fit.close()  # another run of the baseline may need the room
        racer.trial.agreement, why = judge(own, self.baseline.observed, self.baseline.another)
        return why
