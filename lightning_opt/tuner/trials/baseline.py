"""The run that all others are compared with: it stays alive and takes a block of steps in turn."""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch

from lightning_opt.tuner.search.space import Facts
from lightning_opt.tuner.trial import Switches
from lightning_opt.tuner.trials.probe import ACCOUNTED, LOOKED_AT
from lightning_opt.worker.training_process import Fit, FitFailed, Step

MOST_STEPS = 200
"""Steps of a block, however short a step is."""

DRAWN = 16
"""Steps of a run with other random numbers: as many say how far losses of equal batches differ."""

KEPT = 400
"""Losses that a journal keeps."""


class Start(Protocol):
    """Starts a process from switches."""

    def __call__(self, switches: Switches, role: str = "", /) -> tuple[Fit, Path]:
        """Return the process, and the file in which it writes about itself."""


@dataclass
class Observed:
    """What a trial's process has written about itself.

    Attributes:
        facts: Of the model and the machine.
        gradients: Samples of the first ones, one mapping a step.
        moved: How far each parameter is from its start, after powers of two of steps.
        losses: Of its steps, which it has told before.
    """

    facts: Facts = field(default_factory=Facts)
    gradients: list[dict[str, torch.Tensor]] = field(default_factory=list)
    moved: dict[int, dict[str, float]] = field(default_factory=dict)
    losses: Sequence[float] = ()

    @classmethod
    def read(cls, file: Path, losses: Sequence[float] = ()) -> Observed:
        """Return what is in the file; nothing where there is none yet."""
        if not file.exists():
            return cls()
        written = torch.load(file, weights_only=True)
        return cls(Facts(**written["facts"]), written["gradients"], written["moved"], losses)


@dataclass
class Baseline:
    """The baseline's process, if it runs, and all that is known of it.

    Args:
        start: Starts a process from switches and, for :meth:`another`, a role; returns it
            and the file in which it writes about itself.
        block_seconds: About how long a block of steps takes.

    Attributes:
        startup: Seconds until the first step was done.
        block: Steps of a block.
        losses: Of all steps so far.
        seconds: Mean of a step, for each turn.
        peaks: Bytes, by the number of steps after which they were read.
        observed: What it has written about itself.
    """

    start: Start
    block_seconds: float
    startup: float = 0.0
    block: int = 0
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    peaks: dict[int, int] = field(default_factory=dict)
    observed: Observed = field(default_factory=Observed)
    _fit: Fit | None = None
    _file: Path = Path()
    _taken: int = 0
    _others: dict[str, Observed] = field(default_factory=dict)

    @property
    def known(self) -> bool:
        """Whether it has run, now or in an earlier search."""
        return bool(self.seconds)

    @property
    def step(self) -> float:
        """Seconds of a step."""
        return statistics.median(self.seconds)

    def ensure(self) -> None:
        """Start the process, if it does not run, and warm it up."""
        if self._fit is not None:
            return
        begun = time.monotonic()
        self._fit, self._file = self.start((), "" if self.known else "account")
        self._taken = 0
        try:
            self._advance(1)
            self.startup = self.startup or time.monotonic() - begun
            self._advance(7)  # beyond the steps whose gradients are looked at
            self._read()
            while not self.observed.facts.steady and self._taken < ACCOUNTED:
                self._advance((1 << self._taken.bit_length()) - self._taken)  # it writes then
                self._read()
            steady = min(step.seconds for step in self._advance(2))
            self.block = self.block or max(1, min(MOST_STEPS, round(self.block_seconds / steady)))
            if not self.known:
                self.take()
        except BaseException:
            self.close()
            raise

    def take(self, steps: int = 0) -> float:
        """Take some steps, by default a block, and return the mean seconds of one."""
        taken = self._advance(steps or self.block)
        self.seconds.append(statistics.fmean(step.seconds for step in taken))
        return self.seconds[-1]

    def catch_up(self, steps: int) -> None:
        """Go on until the losses of so many steps are known, and read what was written."""
        if not self.observed.gradients or len(self.losses) < steps:
            self.ensure()  # what is known from a journal lacks the gradients
        while len(self.losses) < steps:
            self._advance(steps - len(self.losses))
        self._read()

    def peak_after(self, steps: int) -> int:
        """Return the peak after as many steps, or the nearest number of steps that is known."""
        later = [count for count in self.peaks if count >= steps]
        return self.peaks[min(later, default=max(self.peaks))]

    def another(self, role: str) -> Observed:
        """Return what the first steps of another run of it tell, which is begun once.

        Args:
            role: ``"noise"`` for other random numbers in the model, ``"float32"`` for eager
                float32, which are its own if it trains so; also where that finds no memory.
        """
        if role == "float32" and self.observed.facts.eager:
            return self.observed
        if role not in self._others:
            try:
                self._others[role] = self._run(role)
            except FitFailed:
                self.close()  # it may have found no room beside
                try:
                    self._others[role] = self._run(role)
                except FitFailed:
                    self._others[role] = self.observed
                    logging.getLogger(__name__).warning(
                        "A run of the baseline (%s) failed, so its own gradients stand for it.",
                        role,
                    )
        return self._others[role]

    def _run(self, role: str) -> Observed:
        fit, file = self.start((), role)
        try:
            steps = fit.advance(DRAWN if role == "noise" else LOOKED_AT)
            return Observed.read(file, [step.loss for step in steps])
        finally:
            fit.close()

    def close(self) -> None:
        """End the process; what is known stays."""
        if self._fit is not None:
            self._read()
            self._fit.close()
            self._fit = None

    def _read(self) -> None:
        if self._fit is not None and self._file.exists():
            self.observed = Observed.read(self._file, self.losses)

    def _advance(self, steps: int) -> list[Step]:
        assert self._fit is not None
        try:
            taken = self._fit.advance(steps)
        except FitFailed as failure:
            self.close()
            late = " timeout (--timeout) allows more." if failure.kind == "timeout" else ""
            message = f"{failure.message}{late}"
            raise BaselineFailed(failure.kind, message, failure.details) from failure
        if len(taken) < steps:
            self.close()
            raise BaselineFailed(
                "error",
                f"The baseline's training ended by itself before {self._taken + steps} steps.",
            )
        self.losses += [step.loss for step in taken[max(0, len(self.losses) - self._taken) :]]
        self._taken += steps
        self.peaks.setdefault(self._taken, self._fit.peak_bytes)
        return taken

    def to_dict(self) -> dict[str, Any]:
        """Return what a later search needs of it; the gradients are read anew."""
        kept = {name: getattr(self, name) for name in ("startup", "block", "seconds")}
        more = {"losses": self.losses[:KEPT], "peaks": list(self.peaks.items())}
        return {**kept, **more, "facts": asdict(self.observed.facts)}

    def restore(self, record: dict[str, Any]) -> None:
        """Take over what :meth:`to_dict` gave."""
        for name in ("startup", "block", "losses", "seconds"):
            setattr(self, name, record[name])
        self.peaks = dict(record["peaks"])
        self.observed = Observed(Facts(**record["facts"]))


class BaselineFailed(FitFailed):
    """The baseline could not go on, so that there is nothing to compare with."""
