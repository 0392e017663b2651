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

    Attributes:
        deadline: When it is over, by ``time.monotonic``.
    """

    def __init__(self, budget: float, enabled: bool = True) -> None:
        self._enabled, self.deadline = enabled, time.monotonic() + budget

    def say(self, text: str) -> None:
        """Write a line."""
        if self._enabled:
            sys.stderr.write(text + "\n")
            sys.stderr.flush()

    def begin(self, switches: Switches, best: Trial) -> None:
        """Say what is tried now, how much time is left, and what is best so far."""
        left, name = self.deadline - time.monotonic(), " + ".join(switches) or "baseline"
        time_left = f"{left:.0f} s left" if left > 0 else "the last"
        so_far = f"; best so far: {best.name}, {_ratios(best)}" if best.switches else ""
        self.say(f"trying {name} ({time_left}{so_far})")

    def end(self, trial: Trial, known: bool = False) -> None:
        """Say what came of a trial, and whether it was read from the journal."""
        said = [trial.verdict, _ratios(trial), "from the journal" * known]
        self.say(f"{trial.name}: {', '.join(filter(None, said))}")


def _ratios(trial: Trial) -> str:
    shares = {"time": trial.ratio, "memory": trial.peak_ratio}
    return ", ".join(f"{share:.3f} of the {of}" for of, share in shares.items() if share)
