"""What came of one configuration."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass, field, replace

from lightning_opt.core.numerics.ratios import compare_pairs
from lightning_opt.profiling.comparing.result import OFFSET

Switches = tuple[str, ...]
"""Names of what is switched on, in the order of the space."""

FAILURES = ("out of memory", "error", "died", "timeout", "setup")
"""Verdicts of trials that did not run to their end."""


@dataclass
class Trial:
    """One configuration that was tried.

    Attributes:
        switches: What was switched on; empty for the baseline.
        verdict: ``"baseline"``, ``"accepted"``, ``"no gain"``, ``"too slow"``, ``"rejected"`` (it
            changes what is learned), or how it failed: ``"out of memory"``, ``"error"``,
            ``"died"``, ``"timeout"``, ``"setup"``.
        why: A sentence on the verdict; may be empty.
        rounds: For each start of the processes, seconds of a step in the baseline's block and in
            its own, in turn.
        ratio: Time of a step as a share of the baseline's, from these.
        low: Lower end of the ratio's interval at 90%.
        high: Upper end.
        seconds: Of a step, median.
        peak: Bytes: of the device, or of the process above what it had before the model.
        peak_ratio: Peak as a share of the baseline's.
        agreement: Cosine between its first gradient and the baseline's, in the module in which they
            differ most; None if it was not compared.
        losses: Of all its steps.
        startup: Seconds of the first step less those of a later one: compilation above all.
        cost: Seconds that the trial took.
        details: Traceback or output of a failure.
    """

    switches: Switches
    verdict: str = "accepted"
    why: str = ""
    rounds: list[list[tuple[float, float]]] = field(default_factory=list)
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

    def __post_init__(self) -> None:
        """Take what a journal gave, which has lists for tuples."""
        self.switches = tuple(self.switches)

    @property
    def name(self) -> str:
        """The switches in words."""
        return " + ".join(self.switches) or "baseline"

    @property
    def failed(self) -> bool:
        """Whether it did not run to its end."""
        return self.verdict in FAILURES

    @property
    def interval(self) -> tuple[float, float, float]:
        """The ratio of times with the ends of its interval; nothing known where it has none."""
        return self.ratio or math.nan, self.low or 0.0, self.high or math.inf

    def set_times(self) -> None:
        """Fill in what follows from the rounds, as :func:`~lightning_opt.compare` sees them."""
        found = compare_pairs(self.rounds, confidence=0.9, offset=OFFSET)
        if found is not None:
            self.ratio, self.low, self.high, _ = found
            self.seconds = statistics.median(own for start in self.rounds for _, own in start)

    def pooled(self, earlier: Trial) -> Trial:
        """Return this trial with the rounds of an earlier one; if it runs and is accepted."""
        if self.failed or self.verdict == "rejected":
            return self
        found = replace(self, rounds=[*earlier.rounds, *self.rounds])
        found.set_times()
        found.why = f"measured {len(found.rounds)} times"
        return found
