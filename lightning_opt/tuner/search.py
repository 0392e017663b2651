"""The search: which configurations to try, in which order, and when to stop."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from lightning_opt.tuner.trial import Outcome, Switches

HOPELESS = 1.15
"""A switch whose own score is at least this is not tried together with others."""

MAX_OVER_PREDICTED = 1.04
"""If a combination's score exceeds the product of its switches' scores by this factor, dropping
switches is tried."""

CERTAIN_SCORE = 0.8
"""Best configurations with scores below this are not measured again."""

MAX_IMPROVEMENTS = 4
"""Maximum number of times that the neighbours of the best configuration are tried."""

MAX_REPEATS = 3
"""Maximum number of repeated measurements per configuration."""

TIE = 0.01
"""Differences in score up to this do not matter."""


class TimeIsUp(Exception):  # noqa: N818 - a way to end the search, not an error
    """The budget does not allow another trial."""


@dataclass
class Search:
    """Finds the best configuration with few trials.

    Each switch is tried alone. All gains are then combined at once, since most gains multiply. Then
    neighbours of the best configuration are tried: one switch is added, replaced or dropped. A
    neighbour is tried if its switches' own scores predict a gain, if switches interact (one without
    a gain of its own may gain together with another), or if the best configuration is worse than
    the product of its switches' scores.

    Args:
        measure: Yields the outcomes of several configurations, in order. It may raise
            :class:`TimeIsUp`.
        switches: Names, those with the largest expected gain first.
        allows: Whether switches can be on together.
        interacts: Whether the effect of two switches together may be far from the product of
            their separate scores.
        min_gain: Minimum share that a configuration must gain over the baseline.
        first: The most important switch: others are tried together with it, even if it gains
            nothing alone.
        late: Switches that start slowly: tried last, together with all switches that gain.

    Attributes:
        outcomes: All outcomes so far.
        complete: Whether the search ended before the budget.
    """

    measure: Callable[[Sequence[Switches]], Iterable[Outcome]]
    switches: Switches
    allows: Callable[[Iterable[str]], bool] = lambda names: True
    interacts: Callable[[str, str], bool] = lambda one, other: True
    min_gain: float = 0.03
    first: str = ""
    late: Switches = ()
    outcomes: dict[Switches, Outcome] = field(default_factory=dict)
    complete: bool = False
    _tried_with: dict[str, Switches] = field(default_factory=dict)

    def run(self) -> Switches:
        """Return the best configuration; empty if none beats the baseline."""
        self.outcomes[()] = Outcome(1.0, 1.0, 1.0)
        try:
            self._search()
            self.complete = True
        except TimeIsUp:
            pass
        return self.winner()

    def _search(self) -> None:
        if self.first:
            self._try([(self.first,)])
        self._try_with_gains(name for name in self.switches if name not in self.late)
        self._try(self._unions())  # before late switches, which may take the rest of the time
        self._try_with_gains(self.late)
        self._try((name,) for name in self.late if self._alone(name).score == math.inf)
        self._try(self._unions())
        for _ in range(MAX_IMPROVEMENTS):
            before = self.best()
            self._try(self._neighbours(before))
            if self.best() == before:
                return

    def best(self) -> Switches:
        scored = {names: outcome.score for names, outcome in self.outcomes.items()}
        return min(scored, key=lambda names: (scored[names], len(names)))

    def winner(self) -> Switches:
        """Return the best configuration whose gain is certain; empty if there is none.

        Each switch has to gain ``min_gain``, so that the simpler of two similar ones wins.
        """
        gains = {
            names: outcome.score * (1 + self.min_gain) ** len(names)
            for names, outcome in self.outcomes.items()
            if outcome.score <= 1 - self.min_gain and outcome.high < 1
        }
        return min(gains, key=gains.__getitem__, default=())

    def next_to_remeasure(self, best: Switches, repeats: Mapping[Switches, int]) -> Switches | None:
        """Return the next configuration to measure again, or None.

        First the best configuration itself, once, if its gain is small. Then configurations that
        may be better, the most promising first.

        Args:
            best: The best configuration so far.
            repeats: How often each configuration was measured again.
        """
        score = self.outcomes[best].score
        if best and score >= CERTAIN_SCORE and not repeats.get(best):
            return best
        target = score * (1 - TIE) if best else 1 - self.min_gain
        candidates = [
            names
            for names, outcome in self.outcomes.items()
            if names
            and names != best
            and outcome.low < target
            and outcome.score <= target * (1 + TIE)
            and repeats.get(names, 0) < MAX_REPEATS
        ]
        return min(candidates, key=lambda names: self.outcomes[names].score, default=None)

    def _try_with_gains(self, names: Iterable[str]) -> None:
        gaining = self._gaining()
        for name in names:
            others = [other for other in gaining if other != name and self.allows((other, name))]
            self._tried_with.setdefault(name, tuple(others))
        self._try((*others, name) for name, others in self._tried_with.items())

    def _alone(self, name: str) -> Outcome:
        """Return the outcome of a switch alone, or of adding it to those it was tried with."""
        alone, others = self.outcomes.get((name,)), self._tried_with.get(name, ())
        together = self.outcomes.get(self._ordered((*others, name)))
        if alone or not together:
            return alone or Outcome(1.0, 1.0)
        product = self._product(others)
        return replace(together, score=together.score / product, low=together.low / product)

    def _product(self, names: Iterable[str]) -> float:
        return math.prod(self._alone(name).score for name in names)

    def _ordered(self, names: Iterable[str]) -> Switches:
        wanted = set(names)
        return tuple(name for name in self.switches if name in wanted)

    def _try(self, configurations: Iterable[Iterable[str]]) -> None:
        ordered = (self._ordered(names) for names in configurations)
        new = [
            names
            for names in dict.fromkeys(ordered)
            if names and names not in self.outcomes and self.allows(names)
        ]
        if new:
            # Stored one by one, so that TimeIsUp loses no earlier outcome.
            for names, outcome in zip(new, self.measure(new), strict=True):
                self.outcomes[names] = outcome

    def _gaining(self) -> list[str]:
        alone = {name: self._alone(name) for name in self.switches}
        gaining = [
            name
            for name, outcome in alone.items()
            if outcome.score <= 1 - self.min_gain / 3
            or (outcome.score <= 1 + 2 * TIE and outcome.low < 1 - self.min_gain)
            or (name == self.first and outcome.score < HOPELESS)
        ]
        return sorted(gaining, key=lambda name: alone[name].score)

    def _unions(self) -> list[Switches]:
        """Return the two best unions of switches that gain.

        Each starts from the best switch, or from one that excludes it, since the second best of two
        that exclude each other may be compatible with more of the others.
        """
        gaining = self._gaining()
        starts = [name for name in gaining if not self.allows([*gaining[:1], name])]
        unions = []
        for start in [*gaining[:1], *starts]:
            names = [start]
            for name in gaining:
                if name not in names and self.allows([*names, name]):
                    names.append(name)
            unions.append(self._ordered(names))
        return sorted(unions, key=self._product)[:2]

    def _neighbours(self, best: Switches) -> list[Switches]:
        """Return configurations that differ from the best by a switch or an interacting pair."""
        worse_than_parts = self.outcomes[best].score > MAX_OVER_PREDICTED * self._product(best)
        outside = [
            name
            for name in self.switches
            if name not in best and (self._alone(name).retry or self._alone(name).score < HOPELESS)
        ]
        neighbours = [
            tuple(other for other in best if other != name)
            for name in best
            if len(best) > 1 and (worse_than_parts or self._alone(name).score > 1 - self.min_gain)
        ]
        for name in outside:
            rest = [other for other in best if self.allows([name, other])]
            excluded = [other for other in best if other not in rest]
            interacts = any(self.interacts(name, other) for other in rest)
            # Slightly worse alone than the switch it replaces, it may be better in combination.
            gain = self._alone(name).score / self._product(excluded)
            promising = gain <= (1 + 5 * TIE if excluded else 1 - 2 * TIE)
            if len(excluded) < 2 and (interacts or promising) and (rest or not excluded):
                neighbours.append((*rest, name))
        for one, other in itertools.combinations(outside, 2):
            curable = self._alone(one).retry or self._alone(other).retry
            if self.interacts(one, other) and (curable or self._product((one, other)) < HOPELESS):
                neighbours += [(one, other), (*best, one, other)]
        return neighbours
