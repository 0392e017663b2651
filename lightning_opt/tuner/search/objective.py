"""What is tuned for: one number for each trial, below 1 where it beats the baseline."""

from __future__ import annotations

import math
from dataclasses import dataclass

from lightning_opt.tuner.search.search import Outcome
from lightning_opt.tuner.trial import Trial

OBJECTIVES = {"throughput": "time of a step", "memory": "peak memory", "batch": "peak memory"}
"""Names of what can be tuned for, and what is then to be small."""

PEAK_NOISE = 0.015
"""Share by which the peak of one and the same run differs from time to time, on a CPU."""

NEVER = Outcome(math.inf, math.inf, math.inf)


@dataclass(frozen=True)
class Objective:
    """Turns a trial into an outcome of the search.

    Args:
        name: ``"throughput"``, ``"memory"`` or ``"batch"``.
        max_slowdown: Unless ``"throughput"``, the time of a step that is still allowed, as a
            multiple of the baseline's.
        min_gain: Share below which a gain is none.
    """

    name: str = "throughput"
    max_slowdown: float = 1.5
    min_gain: float = 0.03

    @property
    def slowest(self) -> float:
        """The ratio of times from which a trial is not worth going on with."""
        return 1.3 * self.max_slowdown if self.name != "throughput" else 1.5

    def score(self, trial: Trial) -> Outcome:
        """Return the score of a trial that ran, whether or not it is accepted."""
        if trial.ratio is None:
            return NEVER
        if self.name == "throughput":
            return Outcome(*trial.interval)
        if trial.ratio > self.max_slowdown or trial.peak_ratio is None:
            # Too slow, but what makes it faster may come beside it.
            return Outcome(math.inf, math.inf, math.inf, retry=trial.ratio < self.slowest)
        peak = trial.peak_ratio
        return Outcome(peak, peak * (1 - PEAK_NOISE), peak * (1 + PEAK_NOISE))

    def gains(self, trial: Trial) -> bool:
        """Return whether a trial may gain, so that it is worth a closer look."""
        return self.score(trial).score <= 1 - self.min_gain / 3

    def outcome(self, trial: Trial) -> Outcome:
        """Return what the search has to know of a trial."""
        if trial.failed:
            return Outcome(math.inf, math.inf, math.inf, retry=trial.verdict == "out of memory")
        return NEVER if trial.verdict == "rejected" else self.score(trial)
