"""The baseline: the user's unmodified training, with which all trials are compared."""

from __future__ import annotations

import logging
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from lightning_opt.tuner.probe import COMPARED_UPDATES, MAX_PROFILED_STEPS, Observations
from lightning_opt.tuner.search import TimeIsUp
from lightning_opt.tuner.trial import Switches
from lightning_opt.worker.training_process import FitFailed, TrainingProcess

MAX_STEPS_PER_BLOCK = 200
"""Maximum number of steps per block."""

NOISE_STEPS = 16
"""Steps of the run with different random numbers, which measures the noise of the losses."""

GRACE_SECONDS = 2.0
"""Minimum seconds that a trial may take for a request, even after the budget has ended."""


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


StartRun = Callable[[Switches, str], Run]
"""Starts the process of a configuration in a role; see ``Tuning.start``."""


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
    _reference_runs: dict[str, Observations] = field(default_factory=dict)

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
        self._run = run = self.start((), "" if self.turn_seconds else "profile")
        try:
            self._advance(1)
            self.startup = self.startup or time.monotonic() - started
            self._advance(7)  # past the updates whose gradients are recorded
            while not run.observations.facts.steady and len(run.losses) < MAX_PROFILED_STEPS:
                self._advance(len(run.losses))  # TrialWatch writes at powers of two
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
        """Return the peak bytes after ``steps`` steps, or at the next later record."""
        counts = [count for count in self.peaks if count >= steps]
        return self.peaks[min(counts, default=max(self.peaks))]

    def reference_run(self, role: str) -> Observations:
        """Return the observations of a reference run. Each role runs only once.

        Args:
            role: ``"noise"``: train with other random numbers. ``"float32"``: use eager float32.
                If the baseline already trains in eager float32, its observations are returned.
        """
        if role == "float32" and self.observations.facts.eager_float32:
            return self.observations
        if role not in self._reference_runs:
            observed = self._observe(role)
            if observed is None and self._run is not None:
                self.close()  # both runs may not fit in memory
                observed = self._observe(role)
            if observed is None:
                observed = self.observations
                logging.getLogger(__name__).warning(
                    "The reference run %r failed, so trials are compared with the baseline itself.",
                    role,
                )
            self._reference_runs[role] = observed
        return self._reference_runs[role]

    def _observe(self, role: str) -> Observations | None:
        """Run the baseline for some steps; return its observations, or None if it fails."""
        run = self.start((), role)
        try:
            run.advance(NOISE_STEPS if role == "noise" else COMPARED_UPDATES)
            return run.observations
        except FitFailed:
            return None
        finally:
            run.close()

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
