"""Trials (the measurements of one configuration each), and objectives that score them."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass, field, replace

from lightning_opt.core.numerics.ratios import compare_pairs
from lightning_opt.profiling.comparing.result import OFFSET

Switches = tuple[str, ...]
"""A configuration: the names of the switches that are on, in the order of the search space."""

FAILURES = ("out of memory", "error", "died", "timeout", "setup")
"""Verdicts of trials that did not finish."""

OBJECTIVES = {"throughput": "step time", "memory": "peak memory", "batch": "peak memory"}
"""The quantity that each objective minimises."""

PEAK_NOISE = 0.015
"""Relative difference between the peaks of equal runs, on a CPU."""

TOO_SLOW = 1.5
"""Ratio of step times above which a trial for throughput stops early."""


@dataclass
class Trial:
    """The measurements of one configuration.

    Attributes:
        switches: The switches that are on; empty for the baseline.
        verdict: ``"baseline"``, ``"accepted"``, ``"no gain"``, ``"too slow"``, ``"rejected"`` (it
            does not learn the same), or a failure: ``"out of memory"``, ``"error"``, ``"died"``,
            ``"timeout"``, ``"setup"``.
        why: The reason for the verdict; may be empty.
        pairs_by_start: For each start of the processes, one pair per round: seconds per step of
            the baseline, and of this configuration.
        ratio: Time of a step as a share of the baseline's.
        low: Lower end of the ratio's 90% interval.
        high: Upper end.
        seconds: Median time of a step.
        peak: Peak bytes, as in :attr:`TrainingProcess.peak_bytes`.
        peak_ratio: Peak bytes as a share of the baseline's.
        agreement: The smallest cosine between its first gradient of a parameter and the baseline's;
            None if gradients were not compared.
        losses: The loss of each step.
        startup: Seconds of the first step minus those of a later one, mostly compilation.
        cost: Seconds that the trial took.
        details: Traceback or output of a failure.
    """

    switches: Switches
    verdict: str = "accepted"
    why: str = ""
    pairs_by_start: list[list[tuple[float, float]]] = field(default_factory=list)
    ratio: float | None = None
    low: float | None = None
    high: float | None = None
    seconds: float | None = None
    peak: int | None = None
    peak_ratio: float | None = None
    agreement: float | None = None
    losses: list[float] = field(default_factory=list)
    startup: float | None = None
    cost: float = 0.0
    details: str = ""

    @property
    def name(self) -> str:
        return " + ".join(self.switches) or "baseline"

    @property
    def failed(self) -> bool:
        return self.verdict in FAILURES

    @property
    def undecided(self) -> bool:
        """Whether the trial is accepted although its interval contains 1."""
        return self.verdict == "accepted" and (self.high or 0.0) >= 1

    @property
    def interval(self) -> tuple[float, float, float]:
        """Ratio, lower end and upper end; NaN, 0 and infinity before the first round."""
        return self.ratio or math.nan, self.low or 0.0, self.high or math.inf

    def set_times(self) -> None:
        """Compute ratio, interval and seconds from the rounds, as ``compare`` does."""
        interval = compare_pairs(self.pairs_by_start, confidence=0.9, offset=OFFSET)
        if interval is not None:
            self.ratio, self.low, self.high, _ = interval
            self.seconds = statistics.median(
                seconds for pairs in self.pairs_by_start for _, seconds in pairs
            )

    def pooled(self, earlier: Trial) -> Trial:
        """Add the rounds of an earlier trial, unless this one failed or was rejected."""
        if self.failed or self.verdict == "rejected":
            return self
        pooled = replace(self, pairs_by_start=[*earlier.pairs_by_start, *self.pairs_by_start])
        pooled.set_times()
        pooled.why = f"measured {len(pooled.pairs_by_start)} times"
        return pooled


@dataclass(frozen=True)
class Outcome:
    """The score of a configuration.

    Attributes:
        score: The minimised quantity as a share of the baseline's; infinity if the trial failed or
            was rejected.
        high: Upper end of the score's interval.
        retry: Whether the configuration is worth trying with another switch, for example one that
            saves memory.
    """

    score: float
    high: float = math.inf
    retry: bool = False


@dataclass(frozen=True)
class Objective:
    """Scores trials.

    Args:
        name: ``"throughput"``, ``"memory"`` or ``"batch"``.
        max_slowdown: Maximum time of a step as a multiple of the baseline's, except for
            ``"throughput"``.
        min_gain: Minimum gain, as a share.
    """

    name: str = "throughput"
    max_slowdown: float = 1.5
    min_gain: float = 0.03

    @property
    def give_up_ratio(self) -> float:
        """The ratio of step times above which a trial stops early."""
        return TOO_SLOW if self.name == "throughput" else 1.3 * self.max_slowdown

    def outcome(self, trial: Trial) -> Outcome:
        if trial.failed:
            return Outcome(math.inf, retry=trial.verdict == "out of memory")
        if trial.ratio is None or trial.verdict == "rejected":
            return Outcome(math.inf)
        if self.name == "throughput":
            return Outcome(trial.ratio, trial.high or math.inf)
        if trial.ratio > self.max_slowdown or trial.peak_ratio is None:
            return Outcome(math.inf, retry=trial.ratio < self.give_up_ratio)
        return Outcome(trial.peak_ratio, trial.peak_ratio * (1 + PEAK_NOISE))

    def may_gain(self, trial: Trial) -> bool:
        """Return whether a trial may gain enough. If so, its gradients must be compared."""
        return self.outcome(trial).score <= 1 - self.min_gain / 3
