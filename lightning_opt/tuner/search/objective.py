"""What is tuned for: one number for each trial, below 1 where it beats the baseline."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from lightning_opt.tuner.search.search import Outcome
from lightning_opt.tuner.trials.trial import Trial

Name = Literal["throughput", "memory", "time_to_loss"]

OBJECTIVES = ("throughput", "memory", "time_to_loss")

PEAK_NOISE = 0.015
"""Share by which the peak of one and the same run differs from time to time, on a CPU."""

SMOOTHED = 5
"""Steps over which a loss is averaged before it is compared with the target."""


@dataclass(frozen=True)
class Objective:
    """Turns a trial into an outcome of the search.

    Args:
        name: ``"throughput"``, ``"memory"`` or ``"time_to_loss"``.
        max_slowdown: Under ``"memory"``, the time of a step that is still allowed, as a multiple of
            the baseline's.
        min_gain: Share below which a gain is none.
    """

    name: str = "throughput"
    max_slowdown: float = 1.5
    min_gain: float = 0.03

    @property
    def slowest(self) -> float:
        """The ratio of times from which a trial is not worth going on with."""
        return 1.3 * self.max_slowdown if self.name == "memory" else 1.5

    def score(self, trial: Trial) -> tuple[float, float, float]:
        """Return the score of a trial that ran, with its interval."""
        ratio = math.inf if trial.ratio is None else trial.ratio
        low, high = trial.low or 0.0, math.inf if trial.high is None else trial.high
        if self.name == "memory":
            if ratio > self.max_slowdown or trial.peak_ratio is None:
                return math.inf, math.inf, math.inf
            peak = trial.peak_ratio
            return peak, peak * (1 - PEAK_NOISE), peak * (1 + PEAK_NOISE)
        if self.name == "time_to_loss":
            # Without it the trial was too slow to learn its steps.
            steps = 1.0 if trial.steps_ratio is None else trial.steps_ratio
            return ratio * steps, low * steps, high * steps
        return ratio, low, high

    def gains(self, trial: Trial) -> bool:
        """Return whether a trial may gain, so that it is worth a closer look."""
        return self.score(trial)[0] <= 1 - self.min_gain / 3

    def outcome(self, trial: Trial) -> Outcome:
        """Return what the search has to know of a trial."""
        if trial.failed:
            return Outcome(math.inf, math.inf, math.inf, retry=trial.verdict == "out of memory")
        if trial.verdict == "rejected":
            return Outcome(math.inf, math.inf, math.inf)
        score = Outcome(*self.score(trial))
        if score.works or self.name != "memory":
            return score
        # Too slow, but what makes it faster may come beside it.
        near = trial.ratio is not None and trial.ratio < self.slowest
        return Outcome(math.inf, math.inf, math.inf, retry=near)


def target_loss(losses: Sequence[float]) -> float:
    """Return the loss that the baseline has arrived at: the mean of its last third."""
    return statistics.fmean(losses[-max(1, len(losses) // 3) :])


def steps_to(target: float, losses: Sequence[float]) -> int | None:
    """Return the steps until the smoothed loss reaches the target; None if it does not."""
    width = min(SMOOTHED, len(losses))
    for end in range(width, len(losses) + 1):
        if statistics.fmean(losses[end - width : end]) <= target:
            return end
    return None
