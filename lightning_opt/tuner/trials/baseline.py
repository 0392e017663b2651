"""The run that all others are compared with: it stays alive and takes a block of steps in turn."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from lightning_opt.tuner.search.space import Facts
from lightning_opt.tuner.trial import Switches
from lightning_opt.tuner.trials.probe import LOOKED_AT
from lightning_opt.worker.training_process import Fit, FitFailed, Step

MOST_STEPS = 200
"""Steps of a block, however short a step is."""

KEPT = 400
"""Losses that a journal keeps."""


@dataclass
class Observed:
    """What a trial's process has written about itself.

    Attributes:
        facts: Of the model and the machine.
        gradients: Samples of the first ones, one mapping a step.
        moved: How far each parameter is from its start, after powers of two of steps.
    """

    facts: Facts = field(default_factory=Facts)
    gradients: list[dict[str, torch.Tensor]] = field(default_factory=list)
    moved: dict[int, dict[str, float]] = field(default_factory=dict)

    @classmethod
    def read(cls, file: Path) -> Observed:
        """Return what is in the file; nothing where there is none yet."""
        if not file.exists():
            return cls()
        written = torch.load(file, weights_only=True)
        return cls(Facts(**written["facts"]), written["gradients"], written["moved"])


@dataclass
class Baseline:
    """The baseline's process, if it runs, and all that is known of it.

    Args:
        start: Starts a process from switches and whether it is to draw other random numbers;
            returns it and the file in which it writes about itself.
        block_seconds: About how long a block of steps takes.

    Attributes:
        startup: Seconds until the first step was done.
        block: Steps of a block.
        losses: Of all steps so far.
        seconds: Mean of a step, for each block.
        peaks: Bytes, by the number of steps after which they were read.
        observed: What it has written about itself.
    """

    start: Callable[[Switches, bool], tuple[Fit, Path]]
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
    _noise: list[dict[str, torch.Tensor]] | None = None

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
        self._fit, self._file = self.start((), False)
        self._taken = 0
        try:
            self._advance(1)
            self.startup = self.startup or time.monotonic() - begun
            second = self._advance(1)[0].seconds
            self.block = self.block or max(1, min(MOST_STEPS, round(self.block_seconds / second)))
            self._advance(max(self.block, 6))  # beyond the steps whose gradients are looked at
            if not self.known:
                self.take()
            self.observed = Observed.read(self._file)
        except BaseException:
            self.close()
            raise

    def take(self) -> float:
        """Take one block, and return the seconds of a step in it."""
        steps = self._advance(self.block)
        self.seconds.append(statistics.fmean(step.seconds for step in steps))
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

    def noise(self) -> list[dict[str, torch.Tensor]]:
        """Return the first gradients with other random numbers in the model, measured once."""
        if self._noise is None:
            fit, file = self.start((), True)
            try:
                fit.advance(LOOKED_AT)
                self._noise = Observed.read(file).gradients
            except FitFailed as failure:
                raise BaselineFailed(failure.kind, failure.message, failure.details) from failure
            finally:
                fit.close()
        return self._noise

    def close(self) -> None:
        """End the process; what is known stays."""
        if self._fit is not None:
            self._read()
            self._fit.close()
            self._fit = None

    def _read(self) -> None:
        if self._fit is not None and self._file.exists():
            self.observed = Observed.read(self._file)

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
                f"The baseline's training ended by itself before {self._taken + steps} steps. "
                "Leave max_steps, max_epochs and max_time out of base.",
            )
        self.losses += [step.loss for step in taken[max(0, len(self.losses) - self._taken) :]]
        self._taken += steps
        self.peaks.setdefault(self._taken, self._fit.peak_bytes)
        return taken

    def to_dict(self) -> dict[str, Any]:
        """Return what a later search needs of it; the gradients are read anew."""
        return {
            "startup": self.startup,
            "block": self.block,
            "losses": self.losses[:KEPT],
            "seconds": self.seconds,
            "peaks": list(self.peaks.items()),
            "facts": asdict(self.observed.facts),
        }

    def restore(self, record: dict[str, Any]) -> None:
        """Take over what :meth:`to_dict` gave."""
        for name in ("startup", "block", "losses", "seconds"):
            setattr(self, name, record[name])
        self.peaks = dict(record["peaks"])
        self.observed = Observed(Facts(**record["facts"]))


class BaselineFailed(FitFailed):
    """The baseline could not go on, so that there is nothing to compare with."""
