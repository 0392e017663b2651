"""Trials and their scores, and the search, which chooses the configurations to try."""

from __future__ import annotations

import contextlib
import math
import statistics
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass, field, replace

from lightning_opt.core.numerics.ratios import compare_pairs
from lightning_opt.profiling.comparing.compare import OFFSET

Switches = tuple[str, ...]
"""A configuration: the names of the switches that are on, in the order of the search space."""

FAILURES = ("out of memory", "error", "died", "timeout", "setup")
"""Verdicts of trials that did not finish."""

OBJECTIVES = {"throughput": "step time", "memory": "peak memory"}
"""The quantity that each objective minimises."""

MIN_GAIN = 0.03
"""Minimum gain of a configuration over the baseline, and of each of its switches, as a share."""

PEAK_NOISE = 0.015
"""Relative difference between the peaks of equal runs, on a CPU."""

TOO_SLOW = 1.5
"""Ratio of step times above which a trial for throughput stops early."""

MAX_EFFECT_TO_ADD = 1.1
"""Maximum effect of a switch that is added to the best configuration. Below 1, it is a gain."""

MAX_OVER_PREDICTED = 1.04
"""Maximum ratio between a configuration's score and the product of its switches' effects. Above it,
the configuration is tried without each of its switches."""

MAX_IMPROVEMENTS = 4
"""Maximum number of rounds in which one switch of the best configuration is changed."""


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
        losses: The loss of each step.
        startup: Seconds of the first step minus the seconds of a later step: mostly compilation.
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
        """Return a copy with earlier rounds added; this trial if it failed or was rejected."""
        if self.failed or self.verdict == "rejected":
            return self
        pooled = replace(self, pairs_by_start=[*earlier.pairs_by_start, *self.pairs_by_start])
        pooled.set_times()
        return pooled


@dataclass(frozen=True)
class Outcome:
    """The score of a configuration.

    Attributes:
        score: The minimised quantity as a share of the baseline's; infinity if the trial failed,
            was rejected or is too slow.
        high: Upper end of the score's interval.
    """

    score: float
    high: float = math.inf


@dataclass(frozen=True)
class Objective:
    """Scores trials.

    Args:
        name: ``"throughput"`` or ``"memory"``.
        max_slowdown: For ``"memory"``: maximum time of a step as a multiple of the baseline's.
    """

    name: str = "throughput"
    max_slowdown: float = 1.5

    @property
    def give_up_ratio(self) -> float:
        """The ratio of step times above which a trial stops early."""
        return TOO_SLOW if self.name == "throughput" else 1.3 * self.max_slowdown

    def outcome(self, trial: Trial) -> Outcome:
        if trial.failed or trial.ratio is None or trial.verdict == "rejected":
            return Outcome(math.inf)
        if self.name == "throughput":
            return Outcome(trial.ratio, trial.high or math.inf)
        if trial.ratio > self.max_slowdown or trial.peak_ratio is None:
            return Outcome(math.inf)
        return Outcome(trial.peak_ratio, trial.peak_ratio * (1 + PEAK_NOISE))


class TimeIsUp(Exception):  # noqa: N818 - it ends the search, and is not an error
    """Raised when the budget is too short for another trial."""


@dataclass
class Search:
    """Finds the best configuration, a set of switches that are on, with few trials.

    Each switch is tried alone. Then all switches that gain are combined, because most gains
    multiply. Then each switch in ``late`` is tried together with this combination. Finally, one
    switch of the best configuration is removed, added or replaced. This is repeated while the score
    improves.

    Args:
        measure: Tries a configuration and returns its outcome. It may raise :class:`TimeIsUp`.
        switches: The names of all switches.
        allows: Returns whether switches can be on together.
        late: Switches to try last, because they start slowly.

    Attributes:
        outcomes: All outcomes so far.
        effects: The score of each switch relative to the combination that it was added to.
        complete: Whether the search ended before the budget ran out.
    """

    measure: Callable[[Switches], Outcome]
    switches: Switches
    allows: Callable[[Iterable[str]], bool] = lambda names: True
    late: Switches = ()
    outcomes: dict[Switches, Outcome] = field(default_factory=dict)
    effects: dict[str, float] = field(default_factory=dict)
    complete: bool = False

    def run(self) -> Switches:
        """Search, and return the best configuration; empty if none is better than the baseline."""
        self.outcomes[()] = Outcome(1.0, 1.0)
        with contextlib.suppress(TimeIsUp):
            self._search()
            self.complete = True
        return self.winner()

    def _search(self) -> None:
        self._try_group([name for name in self.switches if name not in self.late])
        self._try_group(self.late)
        for _ in range(MAX_IMPROVEMENTS):
            best = self._best()
            self._try(self._neighbours(best))
            if self._best() == best:
                return

    def winner(self) -> Switches:
        """Return the best configuration whose gain is certain; empty if there is none.

        Each switch must gain ``MIN_GAIN``, so that the simpler of two similar configurations wins.
        """
        penalised = {
            names: outcome.score * (1 + MIN_GAIN) ** len(names)
            for names, outcome in self.outcomes.items()
            if outcome.score <= 1 - MIN_GAIN and outcome.high < 1
        }
        return min(penalised, key=penalised.__getitem__, default=())

    def next_to_remeasure(self, repeated: Container[Switches]) -> Switches | None:
        """Return the next configuration to measure again, or None.

        Configurations that score no worse than the winner are measured again once, the best first,
        because the best of many measurements is partly luck.
        """
        winner = self.winner()
        limit = self.outcomes[winner].score if winner else 1 - MIN_GAIN
        scores = {
            names: outcome.score
            for names, outcome in self.outcomes.items()
            if outcome.score <= limit and names not in repeated
        }
        return min(scores, key=scores.__getitem__, default=None)

    def _best(self) -> Switches:
        return min(self.outcomes, key=lambda names: (self.outcomes[names].score, len(names)))

    def _try_group(self, group: Sequence[str]) -> None:
        """Try each switch with the earlier switches that gain. Then try all that gain together."""
        gaining = self._gaining()
        for name in group:
            others = [other for other in gaining if self.allows((other, name))]
            names = self._ordered((*others, name))
            self._try([names])
            self.effects[name] = self.outcomes[names].score / self._predicted(others)
        self._try([(name,) for name in group if self.effects[name] == math.inf])
        self._try([self._gaining()])

    def _gaining(self, *chosen: str) -> list[str]:
        """Combine the ``chosen`` switches with all compatible ones that gain, the best first."""
        gaining = list(chosen)
        for name in sorted(self.effects, key=self.effects.__getitem__):
            is_gain = name not in gaining and self.effects[name] <= 1 - MIN_GAIN / 3
            if is_gain and self.allows((*gaining, name)):
                gaining.append(name)
        return gaining

    def _predicted(self, names: Iterable[str]) -> float:
        return math.prod(self.effects[name] for name in names)

    def _ordered(self, names: Iterable[str]) -> Switches:
        wanted = set(names)
        return tuple(name for name in self.switches if name in wanted)

    def _try(self, configurations: Iterable[Iterable[str]]) -> None:
        for names in map(self._ordered, configurations):
            if names and names not in self.outcomes and self.allows(names):
                self.outcomes[names] = self.measure(names)

    def _neighbours(self, best: Switches) -> list[list[str]]:
        """Return variants of the best configuration, with one switch removed, added or replaced.

        A switch that is incompatible with the best configuration is instead combined with all
        compatible switches that gain.
        """
        worse_than_parts = self.outcomes[best].score > MAX_OVER_PREDICTED * self._predicted(best)
        neighbours = [
            [other for other in best if other != name]
            for name in best
            if worse_than_parts or self.effects[name] > 1 - MIN_GAIN
        ]
        for name, effect in self.effects.items():
            if name not in best and effect <= MAX_EFFECT_TO_ADD:
                is_allowed = self.allows((*best, name))
                neighbours.append([*best, name] if is_allowed else self._gaining(name))
        return neighbours
