"""Measures the baseline and the trials, whose processes take turns."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from lightning_opt.core.measure.timing import take_turns
from lightning_opt.tuner.numerics import judge
from lightning_opt.tuner.probe import COMPARED_UPDATES, Observations
from lightning_opt.tuner.search import MIN_GAIN, Objective, Switches, TimeIsUp, Trial
from lightning_opt.worker.training_process import FitFailed, TrainingProcess

MIN_ROUNDS, MAX_ROUNDS = 4, 14
"""Limits of the number of rounds in a trial. Trials that start slowly may exceed the maximum."""

PRECISE = 0.02
"""A trial ends when half the width of its interval is below this share of the ratio."""

CLEAR = 0.2
"""A trial also ends when half the width is below this share of the distance of the ratio from 1."""

TURN_SECONDS = 0.05
"""Duration of a turn on a CPU without loader workers. The scheduler favours one process for short
periods. Turns that are longer than these periods, such as 150 ms, more than double the noise."""

MAX_STEPS_PER_BLOCK = 200

WARMUP_STEPS, WARMUP_SECONDS = 64, 1.0
"""The baseline warms up for at most this many steps or seconds: short steps are slow at first."""

NOISE_STEPS = 16
"""Steps of the run with different random numbers, which measures the noise of the losses."""

GRACE_SECONDS = 2.0
"""Minimum seconds to wait for a trial's response, even after the budget has ended."""


class Run:
    """A training process, and the file that holds the observations of its TrialWatch."""

    def __init__(self, process: TrainingProcess, file: Path) -> None:
        self._process, self._file = process, file
        self._timeout = process.timeout

    def advance(self, steps: int, deadline: float = math.inf) -> list[float]:
        """Take steps, and return the seconds of each step.

        Raises:
            FitFailed: If the run fails.
            TimeIsUp: If the run does not respond before the deadline.
        """
        seconds_left = max(GRACE_SECONDS, deadline - time.monotonic())
        self._process.timeout = min(self._timeout, seconds_left)
        try:
            return [step.seconds for step in self._process.advance(steps)]
        except FitFailed as failure:
            if failure.kind == "timeout" and seconds_left < self._timeout:
                raise TimeIsUp from failure
            raise

    @property
    def losses(self) -> list[float]:
        return [step.loss for step in self._process.steps]

    @property
    def peak(self) -> int:
        return self._process.peak_bytes

    @property
    def observations(self) -> Observations:
        return Observations.read(self._file, self.losses)

    def close(self) -> None:
        self._process.close()


StartRun = Callable[[Switches, int], Run]
"""Starts the process of a configuration. The number is added to its random seed."""


@dataclass
class Baseline:
    """The baseline's measurements, and its process while it runs.

    Args:
        start: Starts a process.
        block_seconds: Approximate duration of a block, the steps in one round of a trial.

    Attributes:
        startup: Seconds until the end of the first step.
        steps_per_block: Number of steps in a block.
        turn_seconds: Mean seconds per step of each turn.
        peaks: Peak bytes by number of steps taken.
    """

    start: StartRun
    block_seconds: float
    startup: float = 0.0
    steps_per_block: int = 0
    turn_seconds: list[float] = field(default_factory=list)
    peaks: dict[int, int] = field(default_factory=dict)
    _run: Run | None = None
    _earlier: Observations = field(default_factory=Observations)
    _noise: Observations | None = None

    @property
    def step_seconds(self) -> float:
        return statistics.median(self.turn_seconds)

    @property
    def observations(self) -> Observations:
        """The observations of the process that has taken the most steps."""
        current = self._earlier if self._run is None else self._run.observations
        return max(self._earlier, current, key=lambda one: len(one.losses))

    def ensure_running(self) -> None:
        """Start and warm up the process unless it is running."""
        if self._run is not None:
            return
        started = time.monotonic()
        self._run = self.start((), 0)
        try:
            self._advance(1)
            self.startup = self.startup or time.monotonic() - started
            self._advance(7)  # past the updates whose gradients are recorded
            warm = time.monotonic() + WARMUP_SECONDS
            while time.monotonic() < warm and len(self._run.losses) < WARMUP_STEPS:
                self._advance(4)
            step_seconds = min(self._advance(2))
            if not self.turn_seconds:
                steps = round(self.block_seconds / step_seconds)
                self.steps_per_block = max(1, min(MAX_STEPS_PER_BLOCK, steps))
                self.take_turn(self.steps_per_block)
        except BaseException:
            self.close()
            raise

    def take_turn(self, steps: int) -> float:
        """Take steps and return their mean seconds. If not running, return ``step_seconds``."""
        if self._run is None:
            return self.step_seconds
        self.turn_seconds.append(statistics.fmean(self._advance(steps)))
        return self.turn_seconds[-1]

    def peak_after(self, steps: int) -> int:
        """Return the peak bytes after ``steps`` steps, or at the next recorded step."""
        counts = [count for count in self.peaks if count >= steps]
        return self.peaks[min(counts, default=max(self.peaks))]

    def noise_run(self) -> Observations:
        """Return the observations of a run with other random numbers. It runs only once."""
        if self._noise is None:
            self.close()  # both may not fit in memory
            run = self.start((), 1)
            try:
                run.advance(NOISE_STEPS)
                self._noise = run.observations
            except FitFailed:
                self._noise = self.observations  # without noise data, no difference is tolerated
            finally:
                run.close()
        return self._noise

    def close(self) -> None:
        if self._run is not None:
            self._earlier = self.observations
            self._run.close()
            self._run = None

    def _advance(self, steps: int) -> list[float]:
        assert self._run is not None
        try:
            seconds = self._run.advance(steps)
        except FitFailed as failure:
            self.close()
            hint = " Increase timeout (--timeout)." if failure.kind == "timeout" else ""
            raise BaselineFailed(
                failure.kind, failure.message + hint, failure.details
            ) from failure.__cause__
        self.peaks.setdefault(len(self._run.losses), self._run.peak)
        return seconds


class BaselineFailed(FitFailed):
    """The baseline failed, so trials cannot be compared with it."""

    def __str__(self) -> str:
        return f"The baseline failed ({self.kind}): {self.message}"


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
        trial, run = Trial(switches, pairs_by_start=[[]]), self._start(switches, 0)
        try:
            self._time(trial, run)
            trial.losses, trial.peak = run.losses, run.peak
            self._set_verdict(trial, run)
        except BaselineFailed:
            raise
        except FitFailed as failure:
            trial.verdict, trial.why = failure.kind, failure.message
            trial.details = failure.details[-4000:]
        finally:
            run.close()
        return trial

    def _time(self, trial: Trial, run: Run) -> None:
        (first,) = run.advance(1, self.deadline)
        if not self._is_too_slow(trial, run):
            # Recording gradients takes time, so these updates precede all timed steps.
            run.advance(max(1, COMPARED_UPDATES - len(run.losses)), self.deadline)
            self._take_turns(trial, run, first)
            trial.startup = max(0.0, first - (trial.seconds or 0.0))

    def _is_too_slow(self, trial: Trial, run: Run) -> bool:
        """Take some steps. If the run is too slow, set the verdict and return True."""
        # The whole machine may be slow at the moment, so the baseline takes a turn too.
        turn_seconds = self.baseline.take_turn(self._turn_steps(run))
        reference = max(self.baseline.step_seconds, turn_seconds)
        seconds: list[float] = []
        # The second step may compile again, and short steps are slow at first.
        while len(seconds) < 4 or math.fsum(seconds) < self.baseline.block_seconds:
            seconds += run.advance(1, self.deadline)
            if min(seconds) <= self.objective.give_up_ratio * reference:
                return False
        trial.verdict, trial.why = "too slow", f"stopped after {len(run.losses)} steps"
        trial.ratio, trial.seconds = min(seconds) / reference, min(seconds)
        return True

    def _take_turns(self, trial: Trial, run: Run, startup: float) -> None:
        """Alternate between the baseline and the run until the ratio is precise or time is up."""
        started, steps = time.monotonic(), self._turn_steps(run)

        def take_turn() -> float:
            # A faster run takes more steps in a turn, because workers deliver batches in bursts.
            own_steps = min(MAX_STEPS_PER_BLOCK, round(steps / (trial.ratio or 1.0)))
            return statistics.fmean(run.advance(max(steps, own_steps), self.deadline))

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

        The end of a turn synchronizes the GPU, and loader workers pause between turns.
        """
        block, known = self.baseline.steps_per_block, (run.observations, self.baseline.observations)
        if any(one.facts.device != "cpu" or one.facts.workers for one in known):
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
        elif self.objective.outcome(trial).score > 1 - MIN_GAIN / 3:
            trial.verdict = "no gain"
        else:
            observations = run.observations
            run.close()  # the noise run may need its memory
            baseline = self.baseline
            trial.why = judge(observations, baseline.observations, baseline.noise_run)
            if trial.why:
                trial.verdict = "rejected"


def _is_decided(trial: Trial, rounds: int) -> bool:
    ratio, low, high = trial.interval
    half_width = (high - low) / 2
    return rounds >= MIN_ROUNDS and half_width < max(PRECISE * ratio, CLEAR * abs(1 - ratio))
