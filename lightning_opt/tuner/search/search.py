"""Which configurations to try, in which order, and when to stop: decisions alone, from outcomes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from lightning_opt.tuner.trial import Switches

HOPELESS = 1.15
"""Score alone from which a switch is not tried with others that it interacts with."""

SURPRISE = 1.04
"""How far above the product of its parts a combination has to be for its parts to be doubted."""

SURE = 0.8
"""Score below which an answer is not measured a second time."""

ROUNDS = 4
"""How often at most the neighbours of the best are tried."""

STARTS = 3
"""How many more times something undecided is measured."""

TIE = 0.01
"""Difference in score that is no reason to try anything further."""


@dataclass(frozen=True)
class Outcome:
    """What came of a configuration.

    Attributes:
        score: Against the baseline, below 1 is better; infinity if it did not run or is not
            accepted.
        low: Lower end of the score's interval.
        high: Upper end.
        retry: Whether it failed in a way that another switch may cure, as out of memory.
    """

    score: float
    low: float = 0.0
    high: float = math.inf
    retry: bool = False


class TimeIsUp(Exception):  # noqa: N818 - no error: it ends the search with what is known
    """The budget does not allow another trial."""


@dataclass
class Search:
    """Finds the best configuration with few trials.

    Each switch is tried alone. What gains is put together at once, since most gains multiply. Then
    the best is tried with one more switch, with another one instead, or without one, where that may
    surprise or the parts promise it: switches may gain nothing alone but do so beside what was
    found (``interacts``), and the whole may be worse than the product of its parts.

    Args:
        measure: Yields the outcomes of several configurations, in order, which may be measured
            side by side. It may raise :class:`TimeIsUp`.
        switches: Names, those that are thought to gain most first.
        allows: Whether switches can be on at once.
        interacts: Whether the effect of two together may be far from the product.
        min_gain: Share that a configuration must gain to be preferred to the baseline.
        first: What matters most: the others are tried beside it, even where it gains nothing by
            itself.
        late: Switches that take long to start: tried last, and beside all that gains.

    Attributes:
        outcomes: All that was measured.
        complete: Whether the search ended by itself.
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
    _beside: dict[str, Switches] = field(default_factory=dict)

    def run(self) -> Switches:
        """Return the best configuration; empty where none beats the baseline."""
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
        self._try_beside(name for name in self.switches if name not in self.late)
        self._try(self._unions())  # the late ones may take the rest of the time, and gain nothing
        self._try_beside(self.late)
        self._try((name,) for name in self.late if self._alone(name).score == math.inf)
        self._try(self._unions())
        for _ in range(ROUNDS):
            before = self.best()
            self._try(self._neighbours(before))
            if self.best() == before:
                return

    def best(self) -> Switches:
        """Return the configuration with the lowest score so far, the baseline included."""
        scored = {names: outcome.score for names, outcome in self.outcomes.items()}
        return min(scored, key=lambda names: (scored[names], len(names)))

    def winner(self) -> Switches:
        """Return the best configuration whose gain is sure, or nothing.

        Each switch has to gain ``min_gain``, by which the simpler of two that are alike wins.
        """
        gains = {
            names: outcome.score * (1 + self.min_gain) ** len(names)
            for names, outcome in self.outcomes.items()
            if outcome.score <= 1 - self.min_gain and outcome.high < 1
        }
        return min(gains, key=gains.__getitem__, default=())

    def undecided(self, best: Switches, measured: Mapping[Switches, int]) -> Switches | None:
        """Return what is to be measured again, or None.

        A small gain for the first time; then, the most promising first, what may well be better
        than the answer, but not surely.

        Args:
            best: The answer so far.
            measured: How many times configurations were measured again.
        """
        score = self.outcomes[best].score
        if best and score >= SURE and not measured.get(best):
            return best
        target = score * (1 - TIE) if best else 1 - self.min_gain
        may = [
            names
            for names, outcome in self.outcomes.items()
            if names
            and names != best
            and outcome.low < target
            and outcome.score <= target * (1 + TIE)
            and measured.get(names, 0) < STARTS
        ]
        return min(may, key=lambda names: self.outcomes[names].score, default=None)

    def _try_beside(self, names: Iterable[str]) -> None:
        """Try each beside what gains so far."""
        gaining = self._gaining()
        for name in names:
            beside = [other for other in gaining if other != name and self.allows((other, name))]
            self._beside.setdefault(name, tuple(beside))
        self._try((*beside, name) for name, beside in self._beside.items())

    def _alone(self, name: str) -> Outcome:
        """Return what came of a switch alone, or beside others as a share of what they gain."""
        alone, beside = self.outcomes.get((name,)), self._beside.get(name, ())
        both = self.outcomes.get(self._ordered((*beside, name)))
        if alone or not both:
            return alone or Outcome(1.0, 1.0)
        others = self._product(beside)
        return replace(both, score=both.score / others, low=both.low / others)

    def _product(self, names: Iterable[str]) -> float:
        return math.prod(self._alone(name).score for name in names)

    def _ordered(self, names: Iterable[str]) -> Switches:
        wanted = set(names)
        return tuple(name for name in self.switches if name in wanted)

    def _try(self, wanted: Iterable[Iterable[str]]) -> None:
        """Measure what is allowed and has not been measured."""
        ordered = (self._ordered(names) for names in wanted)
        new = [
            names
            for names in dict.fromkeys(ordered)
            if names and names not in self.outcomes and self.allows(names)
        ]
        if new:
            # One by one: what came before the time was up is kept.
            for names, outcome in zip(new, self.measure(new), strict=True):
                self.outcomes[names] = outcome

    def _gaining(self) -> list[str]:
        """Return the switches that gain alone, or may well, the best first."""
        alone = {name: self._alone(name) for name in self.switches}
        found = [
            name
            for name, outcome in alone.items()
            if outcome.score <= 1 - self.min_gain / 3
            or (outcome.score <= 1 + 2 * TIE and outcome.low < 1 - self.min_gain)
            or (name == self.first and outcome.score < HOPELESS)
        ]
        return sorted(found, key=lambda name: alone[name].score)

    def _unions(self) -> list[Switches]:
        """Return all gains at once; and for two that exclude each other the next best such."""
        gaining = self._gaining()
        # The second best of two that exclude each other may go with more of the others.
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
        """Return the best with one more, with one other and without one; and pairs of losers."""
        spoilt = self.outcomes[best].score > SURPRISE * self._product(best)
        outside = [
            name
            for name in self.switches
            if name not in best and (self._alone(name).retry or self._alone(name).score < HOPELESS)
        ]
        found = [
            tuple(other for other in best if other != name)
            for name in best
            if len(best) > 1 and (spoilt or self._alone(name).score > 1 - self.min_gain)
        ]
        for name in outside:
            rest = [other for other in best if self.allows([name, other])]
            clashing = [other for other in best if other not in rest]
            meets = any(self.interacts(name, other) for other in rest)
            # In the place of another one it may be near, and get on better with the rest.
            gain = self._alone(name).score / self._product(clashing)
            promising = gain <= (1 + 5 * TIE if clashing else 1 - 2 * TIE)
            if len(clashing) < 2 and (meets or promising) and (rest or not clashing):
                found.append((*rest, name))
        for one, other in itertools.combinations(outside, 2):
            curable = self._alone(one).retry or self._alone(other).retry
            if self.interacts(one, other) and (curable or self._product((one, other)) < HOPELESS):
                found += [(one, other), (*best, one, other)]
        return found
