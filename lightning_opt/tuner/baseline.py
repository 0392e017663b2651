"""The run that all trials are compared with: it stays alive, and takes every second turn."""

from __future__ import annotations

import logging
import statistics
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

from lightning_opt.tuner.facts import Facts
from lightning_opt.tuner.probe import ACCOUNTED, COMPARED_UPDATES, Observed
from lightning_opt.tuner.trial import Switches
from lightning_opt.worker.training_process import FitFailed, Step, TrainingProcess

MAX_BLOCK = 200
"""The most steps of a block, however short a step is."""

NOISE_STEPS = 16
"""Steps of a run with other random numbers, from which the noise of the losses is estimated."""

KEPT_LOSSES = 400
"""Losses in a journal."""


class StartProcess(Protocol):
    def __call__(self, switches: Switches, role: str = "", /) -> tuple[TrainingProcess, Path]:
        """Return the process, and the file of its observations."""


@dataclass
class Baseline:
    """The baseline's measurements, and its process while that runs.

    Args:
        start: Starts a process.
        block_seconds: Approximate duration of a block of steps.

    Attributes:
        startup: Seconds until the end of the first step.
        block: Steps of a block.
        losses: Of all steps so far.
        seconds: Mean time of a step, for each turn.
        peaks: Peak bytes, by the number of steps after which they were read.
        observed: The observations of its process.
    """

    start: StartProcess
    block_seconds: float
    startup: float = 0.0
    block: int = 0
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    peaks: dict[int, int] = field(default_factory=dict)
    observed: Observed = field(default_factory=Observed)
    _process: TrainingProcess | None = None
    _file: Path = Path()
    _other_runs: dict[str, Observed] = field(default_factory=dict)

    @property
    def measured(self) -> bool:
        return bool(self.seconds)

    @property
    def step(self) -> float:
        return statistics.median(self.seconds)

    def ensure_running(self) -> None:
        """Start the process, if it does not run, and warm it up."""
        if self._process is not None:
            return
        started = time.monotonic()
        self._process, self._file = self.start((), "" if self.measured else "account")
        try:
            self._advance(1)
            self.startup = self.startup or time.monotonic() - started
            self._advance(7)  # beyond the updates whose gradients are compared
            self._read()
            while not self.observed.facts.steady and self._taken < ACCOUNTED:
                self._advance((1 << self._taken.bit_length()) - self._taken)  # TrialWatch writes
                self._read()
            steady = min(step.seconds for step in self._advance(2))
            self.block = self.block or max(1, min(MAX_BLOCK, round(self.block_seconds / steady)))
            if not self.measured:
                self.take_turn(self.block)
        except BaseException:
            self.close()
            raise

    def take_turn(self, steps: int) -> float:
        taken = self._advance(steps)
        self.seconds.append(statistics.fmean(step.seconds for step in taken))
        return self.seconds[-1]

    def catch_up(self, steps: int) -> None:
        """Continue until the losses of ``steps`` steps are known, and read the observations."""
        if not self.observed.gradients or len(self.losses) < steps:
            self.ensure_running()  # a journal has no gradients
        if len(self.losses) < steps:
            self._advance(steps - self._taken)
        self._read()

    def peak_after(self, steps: int) -> int:
        """Return the peak after ``steps`` steps, or after the nearest later number known."""
        later = [count for count in self.peaks if count >= steps]
        return self.peaks[min(later, default=max(self.peaks))]

    def other_run(self, role: str) -> Observed:
        """Return the observations of the first steps of another run, which is made once.

        Args:
            role: ``"noise"`` for other random numbers in the model; ``"float32"`` for eager
                float32, for which the baseline's own observations serve if it trains so.
        """
        if role == "float32" and self.observed.facts.eager:
            return self.observed
        if role not in self._other_runs:
            try:
                self._other_runs[role] = self._run(role)
            except FitFailed:
                self.close()  # there may be no memory for two
                try:
                    self._other_runs[role] = self._run(role)
                except FitFailed:
                    self._other_runs[role] = self.observed
                    logging.getLogger(__name__).warning(
                        "A run of the baseline (%s) failed, so its own gradients are used instead.",
                        role,
                    )
        return self._other_runs[role]

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
            hint = " timeout (--timeout) allows more." if failure.kind == "timeout" else ""
            message = f"{failure.message}{hint}"
            raise BaselineFailed(failure.kind, message, failure.details) from failure
        self.losses += [step.loss for step in process.steps[len(self.losses) :]]
        self.peaks.setdefault(self._taken, process.peak_bytes)
        return taken

    def to_dict(self) -> dict[str, Any]:
        """Return the measurements for a journal; the gradients are measured again."""
        kept = {name: getattr(self, name) for name in ("startup", "block", "seconds")}
        more = {"losses": self.losses[:KEPT_LOSSES], "peaks": list(self.peaks.items())}
        return {**kept, **more, "facts": asdict(self.observed.facts)}

    def restore(self, record: dict[str, Any]) -> None:
        for name in ("startup", "block", "losses", "seconds"):
            setattr(self, name, record[name])
        self.peaks = dict(record["peaks"])
        self.observed = Observed(Facts(**record["facts"]))


class BaselineFailed(FitFailed):
    """The baseline could not continue, so nothing can be compared."""
