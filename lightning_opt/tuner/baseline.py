"""The run that all trials are compared with. Its process stays alive and alternates with theirs."""

from __future__ import annotations

import logging
import statistics
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

from lightning_opt.tuner.facts import Facts
from lightning_opt.tuner.probe import COMPARED_UPDATES, MAX_PROFILED_STEPS, Observed
from lightning_opt.tuner.trial import Switches
from lightning_opt.worker.training_process import FitFailed, Step, TrainingProcess

MAX_STEPS_PER_BLOCK = 200
"""Maximum number of steps per block."""

NOISE_STEPS = 16
"""Steps of the run with other random numbers, which estimates the noise of the losses."""

MAX_JOURNAL_LOSSES = 400
"""Maximum number of losses in a journal."""


class StartProcess(Protocol):
    def __call__(self, switches: Switches, role: str = "", /) -> tuple[TrainingProcess, Path]:
        """Return the process of a configuration, and the file of its observations.

        ``role`` is ``""`` or a special purpose; see ``Tuning._start``.
        """


@dataclass
class Baseline:
    """The baseline's measurements, and its process while it runs.

    Args:
        start: Starts a process.
        block_seconds: Approximate duration of a block of steps.

    Attributes:
        startup: Seconds until the end of the first step.
        steps_per_block: Number of steps in a block.
        losses: The loss of each step so far.
        turn_seconds: Mean seconds per step of each turn.
        peaks: Peak bytes, by the number of steps after which they were read.
        observed: The observations of its process.
    """

    start: StartProcess
    block_seconds: float
    startup: float = 0.0
    steps_per_block: int = 0
    losses: list[float] = field(default_factory=list)
    turn_seconds: list[float] = field(default_factory=list)
    peaks: dict[int, int] = field(default_factory=dict)
    observed: Observed = field(default_factory=Observed)
    _process: TrainingProcess | None = None
    _file: Path = Path()
    _reference_runs: dict[str, Observed] = field(default_factory=dict)

    @property
    def measured(self) -> bool:
        return bool(self.turn_seconds)

    @property
    def step_seconds(self) -> float:
        return statistics.median(self.turn_seconds)

    def ensure_running(self) -> None:
        """Start and warm up the process unless it is running."""
        if self._process is not None:
            return
        started = time.monotonic()
        self._process, self._file = self.start((), "" if self.measured else "profile")
        try:
            self._advance(1)
            self.startup = self.startup or time.monotonic() - started
            self._advance(7)  # past the updates whose gradients are compared
            self._read()
            while not self.observed.facts.steady and self._taken < MAX_PROFILED_STEPS:
                self._advance((1 << self._taken.bit_length()) - self._taken)  # TrialWatch writes
                self._read()
            step_seconds = min(step.seconds for step in self._advance(2))
            self.steps_per_block = self.steps_per_block or max(
                1, min(MAX_STEPS_PER_BLOCK, round(self.block_seconds / step_seconds))
            )
            if not self.measured:
                self.take_turn(self.steps_per_block)
        except BaseException:
            self.close()
            raise

    def take_turn(self, steps: int) -> float:
        taken = self._advance(steps)
        self.turn_seconds.append(statistics.fmean(step.seconds for step in taken))
        return self.turn_seconds[-1]

    def catch_up(self, steps: int) -> None:
        """Advance until ``steps`` losses are known, then read the observations."""
        if not self.observed.gradients or len(self.losses) < steps:
            self.ensure_running()  # journals do not contain gradients
        if len(self.losses) < steps:
            self._advance(steps - self._taken)
        self._read()

    def peak_after(self, steps: int) -> int:
        """Return the peak after ``steps`` steps, or after the next larger number recorded."""
        candidates = [count for count in self.peaks if count >= steps]
        return self.peaks[min(candidates, default=max(self.peaks))]

    def reference_run(self, role: str) -> Observed:
        """Return the observations of the first steps of a reference run; each role runs once.

        Args:
            role: ``"noise"`` for other random numbers in the model; ``"float32"`` for eager
                float32; if the baseline trains in it, the baseline's own observations are returned.
        """
        if role == "float32" and self.observed.facts.eager_float32:
            return self.observed
        if role not in self._reference_runs:
            try:
                self._reference_runs[role] = self._run(role)
            except FitFailed:
                self.close()  # both runs may not fit in memory
                try:
                    self._reference_runs[role] = self._run(role)
                except FitFailed:
                    self._reference_runs[role] = self.observed
                    logging.getLogger(__name__).warning(
                        "A run of the baseline (%s) failed, so its own gradients are used instead.",
                        role,
                    )
        return self._reference_runs[role]

    def _run(self, role: str) -> Observed:
        process, file = self.start((), role)
        try:
            steps = process.advance(NOISE_STEPS if role == "noise" else COMPARED_UPDATES)
            return Observed.read(file, [step.loss for step in steps])
        finally:
            process.close()

    def close(self) -> None:
        if self._process is not None:
            self._read()
            self._process.close()
            self._process = None

    @property
    def _taken(self) -> int:
        return 0 if self._process is None else len(self._process.steps)

    def _read(self) -> None:
        if self._process is not None and self._file.exists():
            self.observed = Observed.read(self._file, self.losses)

    def _advance(self, steps: int) -> list[Step]:
        process = self._process
        assert process is not None
        try:
            taken = process.advance(steps)
        except FitFailed as failure:
            self.close()
            hint = " Increase timeout (--timeout)." if failure.kind == "timeout" else ""
            raise BaselineFailed(failure.kind, failure.message + hint, failure.details) from failure
        self.losses += [step.loss for step in process.steps[len(self.losses) :]]
        self.peaks.setdefault(self._taken, process.peak_bytes)
        return taken

    def to_dict(self) -> dict[str, Any]:
        """Return the measurements for a journal; the gradients are measured again."""
        return {
            "startup": self.startup,
            "steps_per_block": self.steps_per_block,
            "turn_seconds": self.turn_seconds,
            "losses": self.losses[:MAX_JOURNAL_LOSSES],
            "peaks": list(self.peaks.items()),
            "facts": asdict(self.observed.facts),
        }

    def restore(self, record: dict[str, Any]) -> None:
        for name in ("startup", "steps_per_block", "losses", "turn_seconds"):
            setattr(self, name, record[name])
        self.peaks = dict(record["peaks"])
        self.observed = Observed(Facts(**record["facts"]))


class BaselineFailed(FitFailed):
    """The baseline failed, so trials cannot be compared with it."""
