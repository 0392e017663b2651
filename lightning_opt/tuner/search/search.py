"""Which configurations to try, in which order, and when to stop: decisions alone, from outcomes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from lightning_opt.tuner.trial import Switches

HOPELESS = 1.15
"""Score alone from which a switch is not tried with others that it interacts with."""

SURPRISE = 1.04
"""How far above the product of its parts a combination has to be for its parts to be doubted."""

SURE = 0.9
"""Score below which an answer is not measured a second time."""

STARTS = 3
"""How many more times something undecided is measured."""

TIE = 0.01
"""Difference in score that is not worth another switch, and no reason to try anything further."""


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

    @property
    def works(self) -> bool:
        """Whether the configuration ran and is accepted."""
        return math.isfinite(self.score)


class TimeIsUp(Exception):  # noqa: N818 - no error: it ends the search with what is known
    """The budget does not allow another trial."""


@dataclass
class Search:
    """Finds the best configuration with few trials.

    Each switch is tried alone. What gains is put together at once, since most gains multiply; where
    the whole is worse than the product of its parts, the parts are left out one by one. Then come
    switches that gain nothing alone but may do so beside what was found (``interacts``), and mates
    of the same kind. At last what adds nothing is left out again.

    Args:
        measure: Yields the outcomes of several configurations, in order, which may be measured
            side by side. It may raise :class:`TimeIsUp`.
        switches: Names, those that are thought to gain most first.
        allows: Whether switches can be on at once.
        interacts: Whether the effect of two together may be far from the product.
        min_gain: Share that a configuration must gain to be preferred to the baseline.

    Attributes:
        outcomes: All that was measured.
        complete: Whether the search ended by itself.
    """

    measure: Callable[[Sequence[Switches]], Iterable[Outcome]]
    switches: Switches
    allows: Callable[[Iterable[str]], bool] = lambda names: True
    interacts: Callable[[str, str], bool] = lambda one, other: True
    min_gain: float = 0.03
    outcomes: dict[Switches, Outcome] = field(default_factory=dict)
    complete: bool = False

    def run(self) -> Switches:
        """Return the best configuration; empty where none beats the baseline."""
        self.outcomes[()] = Outcome(1.0, 1.0, 1.0)
        try:
            self._try(self._singles())
            self._combine()
            for _ in range(2):
                before = self.best()
                self._try(self._neighbours(before))
                if self.best() == before:
                    break
            self._simplify()
            self.complete = True
        except TimeIsUp:
            pass
        return self.winner()

    def best(self) -> Switches:
        """Return the configuration with the lowest score so far, the baseline included."""
        scored = {names: outcome.score for names, outcome in self.outcomes.items()}
        return min(scored, key=lambda names: (scored[names], len(names)))

    def winner(self) -> Switches:
        """Return the simplest of the best, or nothing if that gains too little or too uncertainly.

        Of configurations within :data:`TIE` of the best, the one with the fewest switches.
        """
        gains = {
            names: outcome
            for names, outcome in self.outcomes.items()
            if outcome.score <= 1 - self.min_gain and outcome.high < 1
        }
        if not gains:
            return ()
        bound = min(outcome.score for outcome in gains.values()) * (1 + TIE)
        near = [names for names, outcome in gains.items() if outcome.score <= bound]
        return min(near, key=lambda names: (len(names), gains[names].score))

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

    def _score(self, names: Iterable[str]) -> float:
        """Return the score as measured, or as the product of the switches' own."""
        ordered = self._ordered(names)
        if not ordered:
            return 1.0
        if (outcome := self.outcomes.get(ordered)) is not None:
            return outcome.score
        return math.prod(self.outcomes[(name,)].score for name in ordered)

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

    def _singles(self) -> list[Switches]:
        return [(name,) for name in self.switches]

    def _gaining(self) -> list[str]:
        """Return the switches that gain alone, the best first."""
        gains = {name: self._score([name]) for name in self.switches}
        found = [name for name, score in gains.items() if score <= 1 - self.min_gain / 3]
        return sorted(found, key=gains.__getitem__)

    def _union(self, start: Iterable[str], more: Iterable[str]) -> Switches:
        """Return the start with as many of the others as are allowed beside it."""
        names = list(start)
        for name in more:
            if name not in names and self.allows([*names, name]):
                names.append(name)
        return self._ordered(names)

    def _combine(self) -> None:
        """Try all gains at once, and drop one after the other while that helps."""
        gaining = self._gaining()
        # The second best of two that exclude each other may go with more of the others.
        starts = [name for name in gaining if not self.allows([*gaining[:1], name])]
        unions = [self._union([start], gaining) for start in [*gaining[:1], *starts]]
        unions.sort(key=lambda names: math.prod(self._score([name]) for name in names))
        self._try(unions[:2])
        if not unions:
            return
        names = min(unions[:2], key=self._score)
        while len(names) > 1:
            product = math.prod(self._score([name]) for name in names)
            if self._score(names) <= SURPRISE * product:
                return
            fewer = [self._without(names, name) for name in names]
            self._try(fewer)
            better = min(fewer, key=self._score)
            if self._score(better) >= self._score(names):
                return
            names = better

    def _without(self, names: Switches, name: str) -> Switches:
        return tuple(other for other in names if other != name)

    def _hopeful(self, name: str) -> bool:
        alone = self.outcomes[(name,)]
        return alone.retry or alone.score < HOPELESS

    def _neighbours(self, best: Switches) -> list[Switches]:
        """Return what may surprise: one more or one other switch, or a pair of losers."""
        outside = [name for name in self.switches if name not in best and self._hopeful(name)]
        found: list[Switches] = []
        for name in outside:
            meets = [other for other in best if self.interacts(name, other)]
            clashing = [other for other in best if not self.allows([name, other])]
            if meets and not clashing:
                found.append((*best, name))
            elif len(clashing) == 1 and len(best) > 1:
                # A mate in its place, if it is near or may get on better with the rest.
                rest = self._without(best, clashing[0])
                near = self._score([name]) <= self._score(clashing) * (1 + 5 * TIE)
                if near or any(self.interacts(name, other) for other in rest):
                    found.append((*rest, name))
        for index, one in enumerate(outside):
            for other in outside[index + 1 :]:
                pair = (one, other)
                curable = any(self.outcomes[(name,)].retry for name in pair)
                product = self._score([one]) * self._score([other])
                if self.interacts(*pair) and (curable or product < HOPELESS):
                    found += [pair, (*best, *pair)] if best else [pair]
        return found

    def _simplify(self) -> None:
        """Try the best without what seems to add nothing to it."""
        while len(best := self.best()) > 1:
            idle = [name for name in best if self._score([name]) > 1 - self.min_gain]
            self._try(self._without(best, name) for name in idle)
            if self.best() == best:
                return
