"""Measures trials: a configuration's process takes turns with the baseline's process."""

from __future__ import annotations

import math
import statistics
import time

from lightning_opt.core.measure.timing import take_turns
from lightning_opt.tuner.baseline import (
    MAX_STEPS_PER_BLOCK,
    Baseline,
    BaselineFailed,
    Run,
    StartRun,
)
from lightning_opt.tuner.numerics import judge
from lightning_opt.tuner.probe import COMPARED_UPDATES
from lightning_opt.tuner.trial import Objective, Switches, Trial
from lightning_opt.worker.training_process import FitFailed

MIN_ROUNDS, MAX_ROUNDS = 4, 14
"""Limits of the number of rounds in a trial. Trials that start slowly may exceed the maximum."""

PRECISE = 0.02
"""A trial ends when half the width of its interval is below this share of the ratio."""

CLEAR = 0.2
"""A trial also ends when half the width is below this share of the ratio's distance from 1."""

TURN_SECONDS = 0.05
"""Duration of a turn on a CPU without loader workers. The system favours one of two processes for
short periods. Turns of 150 ms exceed these, and have more than twice the noise in equal time."""


class Trials:
    """Measures configurations relative to the baseline.

    Args:
        start: Starts the process of a configuration.
        baseline: The baseline. Its process takes turns with the trial's, if memory suffices for
            both.
        objective: Scores the trials.
        deadline: The time (``time.monotonic()``) at which trials end.
    """

    def __init__(
        self, start: StartRun, baseline: Baseline, objective: Objective, deadline: float = math.inf
    ) -> None:
        self._start, self.baseline, self.objective = start, baseline, objective
        self.deadline = deadline
        self._one_at_a_time = False

    def measure(self, switches: Switches) -> Trial:
        """Measure in turns with the baseline, or alone if both do not fit in memory.

        Raises:
            BaselineFailed: If the baseline fails for a reason other than memory.
            TimeIsUp: If the deadline passes before the first round.
        """
        if not self._one_at_a_time:
            try:
                self.baseline.ensure_running()
                trial = self._try(switches)
            except BaselineFailed as failure:
                if failure.kind not in ("out of memory", "died"):
                    raise
                trial = Trial(switches, "out of memory")
            if trial.verdict != "out of memory":
                return trial
        self.baseline.close()
        trial = self._try(switches)
        self._one_at_a_time |= not trial.failed
        return trial

    def _try(self, switches: Switches) -> Trial:
        trial, run = Trial(switches, pairs_by_start=[[]]), None
        try:
            run = self._start(switches, "")
            self._time(trial, run)
            trial.losses, trial.peak = run.losses, run.peak
            self._set_verdict(trial, run)
        except BaselineFailed:
            raise
        except FitFailed as failure:
            trial.verdict, trial.why = failure.kind, failure.message
            trial.details = failure.details[-4000:]
        finally:
            if run is not None:
                run.close()
        return trial

    def _time(self, trial: Trial, run: Run) -> None:
        # Starting may take twice as long as for the baseline, even if less budget is left.
        deadline = max(self.deadline, time.monotonic() + 2 * self.baseline.startup)
        (first,) = run.advance(1, deadline)
        if not self._is_too_slow(trial, run, deadline):
            # Recording gradients takes time, so these updates precede all timed steps.
            run.advance(max(1, COMPARED_UPDATES - len(run.losses)), deadline)
            self._take_turns(trial, run, deadline, first)
            trial.startup = max(0.0, first - (trial.seconds or 0.0))

    def _is_too_slow(self, trial: Trial, run: Run, deadline: float) -> bool:
        """Take some steps. If the run is too slow, set the verdict and return True."""
        # The whole machine may be slow at the moment, so the baseline takes a turn too.
        turn_seconds = self.baseline.take_turn(self._turn_steps(run))
        reference = max(self.baseline.step_seconds, turn_seconds)
        seconds: list[float] = []
        # The second step may compile again, and short steps are slow at first.
        while len(seconds) < 4 or math.fsum(seconds) < self.baseline.block_seconds:
            seconds += run.advance(1, deadline)
            if min(seconds) <= self.objective.give_up_ratio * reference:
                return False
        trial.verdict, trial.why = "too slow", f"stopped after {len(run.losses)} steps"
        trial.ratio, trial.seconds = min(seconds) / reference, min(seconds)
        return True

    def _take_turns(self, trial: Trial, run: Run, deadline: float, startup: float) -> None:
        """Alternate between the baseline and the run until the ratio is precise or time is up."""
        started, steps = time.monotonic(), self._turn_steps(run)

        def take_turn() -> float:
            # A faster run takes more steps in a turn, because workers deliver batches in bursts.
            own_steps = min(MAX_STEPS_PER_BLOCK, round(steps / (trial.ratio or 1.0)))
            return statistics.fmean(run.advance(max(steps, own_steps), deadline))

        timers = {"baseline": lambda: self.baseline.take_turn(steps), "trial": take_turn}
        turns = max(1, self.baseline.steps_per_block // steps)
        for rounds, seconds in enumerate(take_turns(timers, turns=turns), start=1):
            trial.pairs_by_start[0].append((seconds["baseline"], seconds["trial"]))
            trial.set_times()
            now = time.monotonic()
            # Time a run that starts slowly for longer: starting it again would be expensive.
            enough = rounds >= MAX_ROUNDS and now - started > startup / 2
            if rounds >= 2 and (now > self.deadline or enough or _is_decided(trial, rounds)):
                return

    def _turn_steps(self, run: Run) -> int:
        """Return the number of steps in a turn: a whole block if shorter turns would be biased.

        The end of a turn synchronizes with a GPU, and the workers of loaders pause between turns.
        """
        block, facts = self.baseline.steps_per_block, run.observations.facts
        if facts.device != "cpu" or facts.workers:
            return block
        return min(block, max(1, round(TURN_SECONDS / self.baseline.step_seconds)))

    def _set_verdict(self, trial: Trial, run: Run) -> None:
        reference, limit = self.baseline.peak_after(len(trial.losses)), self.objective.max_slowdown
        trial.peak_ratio = (trial.peak or 0) / reference if reference else None
        if trial.verdict == "too slow":
            return
        if self.objective.name != "throughput" and (trial.ratio or 0.0) > limit:
            trial.verdict = "too slow"
            trial.why = f"more than {limit:g} times the baseline's time"
        elif not self.objective.may_gain(trial):
            trial.verdict = "no gain"
        else:
            observations = run.observations
            run.close()  # a reference run may need its memory
            trial.agreement, why = judge(
                observations, self.baseline.observations, self.baseline.reference_run
            )
            if why:
                trial.verdict, trial.why = "rejected", why


def _is_decided(trial: Trial, rounds: int) -> bool:
    ratio, low, high = trial.interval
    half_width = (high - low) / 2
    return rounds >= MIN_ROUNDS and half_width < max(PRECISE * ratio, CLEAR * abs(1 - ratio))
