"""How far a search is, for a person at a terminal: a bar with the time left, or plain lines."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import IO, Any

from lightning_opt.tuner.search.space import Switches
from lightning_opt.tuner.trials.trial import Trial


class Progress:
    """Writes one line a trial, and below them a bar where rich and a terminal are there.

    Args:
        budget: Seconds that the search may take.
        enabled: False says nothing.
        file: Where to; standard error by default.
    """

    def __init__(self, budget: float, enabled: bool = True, file: IO[str] | None = None) -> None:
        self._file = sys.stderr if file is None else file
        self._enabled, self._budget = enabled, budget
        self._begun = time.monotonic()
        self._expected, self._done, self._cost = 1, 0, 0.0
        self._bar: Any = None
        self._task: Any = None
        if enabled and self._file.isatty():
            self._bar = _rich_bar(self._file)
            if self._bar is not None:
                self._bar.start()
                self._task = self._bar.add_task("tuning", total=1.0, left="")

    def expect(self, trials: int) -> None:
        """Say how many trials there will be, as far as is known."""
        self._expected = max(trials, 1)

    def begin(self, group: Sequence[Switches], settled: str = "") -> None:
        """Say what is tried now."""
        names = settled or ", ".join(" + ".join(switches) or "baseline" for switches in group)
        if self._bar is not None:
            self._bar.update(self._task, description=names, left=self._left())

    def say(self, text: str) -> None:
        """Write a line."""
        if not self._enabled:
            return
        if self._bar is not None:
            self._bar.console.print(text, markup=False, highlight=False)
        else:
            self._file.write(text + "\n")
            self._file.flush()

    def end(self, trial: Trial, known: bool = False) -> None:
        """Say what came of a trial.

        Args:
            trial: The trial.
            known: Whether it was read from the journal.
        """
        self._done += 1
        self._expected = max(self._expected, self._done)
        if not known:
            self._cost += trial.cost
        times = "" if trial.ratio is None else f", {trial.ratio:.3f} of the time"
        peak = "" if trial.peak_ratio is None else f", {trial.peak_ratio:.3f} of the memory"
        source = ", from the journal" if known else ""
        self.say(f"{trial.name}: {trial.verdict}{times}{peak}{source} ({self._left()})")
        if self._bar is not None:
            self._bar.update(self._task, completed=self._done / (self._expected + 1))

    def _left(self) -> str:
        budget = max(0.0, self._budget - (time.monotonic() - self._begun))
        if self._done and self._cost:
            left = min(budget, self._cost / self._done * (self._expected - self._done))
        else:
            left = budget
        return f"at most {budget:.0f} s left" if left >= budget else f"about {left:.0f} s left"

    def close(self) -> None:
        """Take the bar away."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


def _rich_bar(file: IO[str]) -> Any:
    try:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn
    except ImportError:  # rich is optional; lines say the same
        return None
    return Progress(
        SpinnerColumn(),
        BarColumn(),
        TextColumn("{task.description}", markup=False),
        TextColumn("{task.fields[left]}"),
        console=Console(file=file),
        transient=True,
    )
