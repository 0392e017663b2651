"""How far a search is, in lines for a person at a terminal."""

from __future__ import annotations

import sys
import time

from lightning_opt.tuner.trial import Switches, Trial


class Progress:
    """Writes to standard error what is tried, and what came of it.

    Args:
        budget: Seconds that the search may take.
        enabled: False says nothing.
    """

    def __init__(self, budget: float, enabled: bool = True) -> None:
        self._enabled, self._end = enabled, time.monotonic() + budget

    def say(self, text: str) -> None:
        """Write a line."""
        if self._enabled:
            sys.stderr.write(text + "\n")
            sys.stderr.flush()

    def begin(self, switches: Switches) -> None:
        """Say what is tried now."""
        name = " + ".join(switches) or "baseline"
        left = self._end - time.monotonic()
        self.say(f"trying {name} ({f'at most {left:.0f} s left' if left > 0 else 'the last'})")

    def end(self, trial: Trial, known: bool = False) -> None:
        """Say what came of a trial, and whether it was read from the journal."""
        times = "" if trial.ratio is None else f", {trial.ratio:.3f} of the time"
        peak = "" if trial.peak_ratio is None else f", {trial.peak_ratio:.3f} of the memory"
        source = ", from the journal" if known else ""
        self.say(f"{trial.name}: {trial.verdict}{times}{peak}{source}")
