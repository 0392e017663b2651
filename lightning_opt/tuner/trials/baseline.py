"""The run that all others are compared with: it stays alive and takes a block of steps in turn."""

from __future__ import annotations

import functools
import json
import statistics
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar

from lightning_opt.tuner.search.space import Facts, Switches
from lightning_opt.worker.training_process import Fit, FitFailed, Step

T = TypeVar("T")

MOST_STEPS = 200
"""Steps of a block, however short a step is."""


@dataclass
class Baseline:
    """The baseline's process, if it runs, and all that is known of it.

    Args:
        start: Starts a process from switches, a seed and a label; returns it and the file in which
            it writes about itself.
        block_seconds: About how long a block of steps takes.
        horizon_seconds: About how much time may go into the steps whose losses are compared.

    Attributes:
        block: Steps of a block.
        horizon: Steps whose losses are compared.
        losses: Of all steps so far, or of the compared ones if it was read from a journal.
        seconds: Mean of a step, for each block.
        peaks: Bytes, by the number of steps after which they were read.
        seeds: Losses with other seeds, by seed.
        facts: Of model and machine.
        moved: Parameters that its updates have changed, after powers of two of steps.
    """

    start: Callable[[Switches, int, str], tuple[Fit, Path]]
    block_seconds: float
    horizon_seconds: float
    block: int = 0
    horizon: int = 0
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    peaks: dict[int, int] = field(default_factory=dict)
    seeds: dict[int, list[float]] = field(default_factory=dict)
    facts: Facts = field(default_factory=Facts)
    moved: dict[int, list[str]] = field(default_factory=dict)
    _fit: Fit | None = None
    _file: Path | None = None
    _taken: int = 0

    @property
    def known(self) -> bool:
        """Whether it has run, now or in an earlier search."""
        return bool(self.losses)

    @property
    def alive(self) -> bool:
        """Whether its process waits for steps to take."""
        return self._fit is not None

    @property
    def step(self) -> float:
        """Seconds of a step."""
        return statistics.median(self.seconds)

    def ensure(self) -> None:
        """Start the process, if it does not run, and warm it up."""
        if self._fit is not None:
            return
        self._fit, self._file = self.start((), 0, "baseline")
        self._taken = 0
        fresh = not self.known
        try:
            self._advance(1)
            second = self._advance(1)[0].seconds
            if not self.block:
                self.block = max(1, min(MOST_STEPS, round(self.block_seconds / second)))
                horizon = round(self.horizon_seconds / second)
                self.horizon = max(12, min(60, horizon))
            self._advance(max(self.block, 6))  # facts are written after the 8th step
        except BaseException:
            self.close()
            raise
        if fresh:
            self.take()
            self.read_facts()

    def take(self) -> float:
        """Take one block, and return the seconds of a step in it."""
        steps = self._advance(self.block)
        self.seconds.append(statistics.fmean(step.seconds for step in steps))
        return self.seconds[-1]

    def reach(self, steps: int) -> None:
        """Go on until the losses of so many steps are known."""
        if len(self.losses) < steps:
            self.ensure()
        while len(self.losses) < steps:
            self._advance(steps - len(self.losses))

    def peak_after(self, steps: int) -> int:
        """Return the peak after as many steps, or the nearest number of steps that is known."""
        later = [count for count in self.peaks if count >= steps]
        return self.peaks[min(later, default=max(self.peaks))]

    def read_facts(self) -> None:
        """Read what the process has written about itself."""
        if self._file is not None and self._file.exists():
            written = json.loads(self._file.read_text())
            self.moved = moved_from(written)
            self.facts = facts_from(written)

    def run_seeds(
        self, count: int, add: Callable[[int, list[float]], None], *, together: bool = True
    ) -> list[list[float]]:
        """Return the losses with so many other seeds, which are run if they were not.

        Args:
            count: How many.
            add: Told of each that was run.
            together: Side by side, and beside the baseline; otherwise each has the device alone.
        """
        missing = [seed for seed in range(1, count + 1) if seed not in self.seeds]
        if together:
            self._run_seeds(missing, add)
        else:
            self.close()
            for seed in missing:
                self._run_seeds([seed], add)
        return [self.seeds[seed] for seed in range(1, count + 1)]

    def _run_seeds(self, missing: Sequence[int], add: Callable[[int, list[float]], None]) -> None:
        fits = {seed: self.start((), seed, f"seed {seed}")[0] for seed in missing}
        actions = [functools.partial(fit.advance, self.horizon) for fit in fits.values()]
        try:
            for seed, steps in zip(fits, side_by_side(actions, fits.values()), strict=True):
                self.seeds[seed] = [step.loss for step in steps]
                add(seed, self.seeds[seed])
        finally:
            close_all(fits.values())

    def close(self) -> None:
        """End the process; what is known stays."""
        if self._fit is not None:
            self.read_facts()
            self._fit.close()
            self._fit = None

    def _advance(self, steps: int) -> list[Step]:
        assert self._fit is not None
        try:
            taken = self._fit.advance(steps)
        except FitFailed as failure:
            self.close()
            raise BaselineFailed(failure.kind, failure.message, failure.details) from failure
        if len(taken) < steps:
            needed = self._taken + steps
            self.close()
            raise BaselineFailed(
                "error",
                f"The baseline's training ended by itself before {needed} steps. Leave max_steps, "
                "max_epochs and max_time out of base.",
            )
        self.losses += [step.loss for step in taken[max(0, len(self.losses) - self._taken) :]]
        self._taken += steps
        self.peaks.setdefault(self._taken, self._fit.peak_bytes)
        return taken

    def to_dict(self) -> dict[str, Any]:
        """Return what a later search needs of it."""
        facts = {name.name: getattr(self.facts, name.name) for name in fields(Facts)}
        return {
            "block": self.block,
            "horizon": self.horizon,
            "losses": [str(loss) for loss in self.losses[: max(60, self.horizon)]],
            "seconds": self.seconds,
            "peaks": {str(steps): peak for steps, peak in self.peaks.items()},
            "facts": facts,
            "moved": {str(steps): names for steps, names in self.moved.items()},
        }

    def restore(self, record: dict[str, Any]) -> None:
        """Take over what :meth:`to_dict` gave."""
        self.block, self.horizon = record["block"], record["horizon"]
        self.losses = [float(loss) for loss in record["losses"]]
        self.seconds = list(record["seconds"])
        self.peaks = {int(steps): peak for steps, peak in record["peaks"].items()}
        self.facts, self.moved = facts_from(record["facts"]), moved_from(record)


class BaselineFailed(FitFailed):
    """The baseline could not go on, so that there is nothing to compare with."""


def facts_from(written: dict[str, Any]) -> Facts:
    """Return the facts among what was written."""
    known = {name.name for name in fields(Facts)} & written.keys()
    values = {name: written[name] for name in known}
    return Facts(**{**values, "optimizers": tuple(written.get("optimizers", ()))})


def moved_from(written: dict[str, Any]) -> dict[int, list[str]]:
    """Return which parameters had moved after how many steps."""
    return {int(steps): list(names) for steps, names in written.get("moved", {}).items()}


def close_all(fits: Iterable[Fit]) -> None:
    """End several trainings at once."""
    fits = list(fits)
    for fit in fits:
        fit.ask_to_end()
    for fit in fits:
        fit.close()


def side_by_side(actions: Sequence[Callable[[], T]], fits: Iterable[Fit | None]) -> list[T]:
    """Return what the actions return, each done in a thread.

    Args:
        actions: What to do.
        fits: The processes that they wait for; they are killed if this is interrupted, so that no
            thread goes on waiting.
    """
    if not actions:
        return []
    pool = ThreadPoolExecutor(len(actions))
    try:
        return [future.result() for future in [pool.submit(action) for action in actions]]
    except BaseException as error:
        for fit in fits:
            if fit is not None:
                fit.__exit__(type(error), error, None)
        raise
    finally:
        pool.shutdown()
