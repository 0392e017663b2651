"""The search on simulated machines, compared with an exhaustive one."""

import itertools
import math
import random
from collections.abc import Iterable, Sequence
from typing import Any

import pytest

from lightning_opt.tuner.search import Outcome, Search, TimeIsUp

Names = tuple[str, ...]


class Machine:
    """A cost is the product of one factor per switch and per pair, with noise.

    Attributes:
        tried: All configurations measured, in order.
        limit: Number of trials that the budget allows.
        failing: Switches whose configurations fail.
    """

    def __init__(
        self,
        factors: dict[str, float],
        pairs: dict[str, float] | None = None,
        exclusive: str = "",
        noise: float = 0.0,
        seed: int = 0,
    ) -> None:
        self.factors, self.exclusive = factors, set(exclusive)
        self.pairs = {frozenset(pair): factor for pair, factor in (pairs or {}).items()}
        self.noise, self.random = noise, random.Random(seed)
        self.tried: list[Names] = []
        self.limit = math.inf
        self.failing: set[str] = set()

    def cost(self, names: Iterable[str]) -> float:
        on = set(names)
        pairs = math.prod(factor for pair, factor in self.pairs.items() if pair <= on)
        return math.prod(self.factors[name] for name in on) * pairs

    def allows(self, names: Iterable[str]) -> bool:
        return len(self.exclusive & set(names)) < 2

    def measure(self, names: Names) -> Outcome:
        if len(self.tried) >= self.limit:
            raise TimeIsUp
        self.tried.append(names)
        if self.failing & set(names):
            return Outcome(math.inf)
        score = self.cost(names) * math.exp(self.noise * self.random.gauss(0, 1))
        return Outcome(score, score * (1 + 2 * self.noise))

    def search(self, **settings: Any) -> Search:
        return Search(self.measure, tuple(self.factors), self.allows, **settings)

    def exhaustive(self) -> float:
        names = list(self.factors)
        every = itertools.chain.from_iterable(
            itertools.combinations(names, size) for size in range(len(names) + 1)
        )
        return min(self.cost(some) for some in every if self.allows(some))


def random_machine(seed: int, noise: float) -> Machine:
    """Half of the switches gain; a fifth of the pairs interact."""
    rng = random.Random(seed)
    names = "abcdef"
    factors = {name: rng.choice([rng.uniform(0.6, 0.97), rng.uniform(0.97, 1.5)]) for name in names}
    pairs = {
        "".join(pair): rng.uniform(0.85, 1.3)
        for pair in itertools.combinations(names, 2)
        if rng.random() < 0.2
    }
    return Machine(factors, pairs, "".join(rng.sample(names, 2)), noise, seed)


@pytest.mark.parametrize(("noise", "share"), [(0.0, 0.98), (0.01, 0.97)])
def test_search_is_near_the_optimum_with_a_fifth_of_the_trials(noise: float, share: float) -> None:
    near, trials = 0, 0
    for seed in range(300):
        machine = random_machine(seed, noise)
        found = machine.search().run()
        assert machine.allows(found)
        best = machine.exhaustive()
        # A configuration that gains less than 3% is not chosen.
        near += machine.cost(found) <= 1.05 * best or (not found and best > 0.96)
        trials += len(machine.tried)
    assert near / 300 >= share
    assert trials / 300 <= 48 / 5  # 2 ** 6 without those that the exclusive pair forbids


@pytest.mark.parametrize(
    ("factors", "pairs", "excluded", "best"),
    [
        ({"a": 1.02, "b": 1.4, "c": 0.985}, {}, "", ""),
        ({"a": 0.8, "b": 1.05, "c": 1.3}, {"ab": 0.7}, "", "ab"),
        ({"a": 0.7, "b": 0.8, "c": 0.9}, {"ab": 1.5}, "", "ac"),
        ({"a": 0.7, "b": 0.8, "c": 0.75, "d": 0.85}, {"ab": 1.5, "cd": 1.4}, "", "ac"),
        ({"a": 0.7, "b": 0.72, "c": 0.8}, {"ac": 1.3}, "ab", "bc"),
        ({"a": 0.7, "b": 0.98}, {"ab": 1.021}, "", "a"),
        ({"a": 0.8, "b": 0.9, "c": 0.98}, {"ac": 1.035}, "", "ab"),
    ],
    ids=[
        "no gain",
        "gains only in a pair",
        "one pair is slow",
        "two pairs are slow",
        "one is replaced",
        "second adds nothing",
        "third costs a little",
    ],
)
def test_best_configuration_is_found(
    factors: dict[str, float], pairs: dict[str, float], excluded: str, best: str
) -> None:
    assert Machine(factors, pairs, excluded).search().run() == tuple(best)


def test_failed_switch_is_not_combined() -> None:
    broken = Machine({"a": 0.5, "b": 0.9})
    broken.failing = {"a"}
    assert broken.search().run() == ("b",)
    assert ("a", "b") not in broken.tried


@pytest.mark.parametrize("limit", [0, 1, 4, 5])
def test_best_so_far_is_chosen_when_time_is_up(limit: int) -> None:
    machine = Machine({"a": 0.8, "b": 0.9, "c": 1.4, "d": 0.95})
    machine.limit = limit
    search = machine.search()
    assert search.run() == {0: (), 1: ("a",), 4: ("a",), 5: ("a", "b", "d")}[limit]
    assert search.complete == (limit == 5)


def test_uncertain_gain_is_not_chosen() -> None:
    assert Search(lambda names: Outcome(0.93, 1.02), ("a",)).run() == ()
    assert Search(lambda names: Outcome(0.93, 0.95), ("a",)).run() == ("a",)


def test_best_configurations_are_measured_again_once() -> None:
    """Those that score no worse than the winner; without a winner, those that gain."""

    def next_one(*repeated: str, **scores: tuple[float, float]) -> Names | None:
        search = Search(lambda names: Outcome(1.0), tuple(scores))
        search.outcomes = {(name,): Outcome(*ends) for name, ends in scores.items()}
        search.outcomes |= {(): Outcome(1.0, 1.0), tuple(scores): Outcome(math.inf)}
        return search.next_to_remeasure([(name,) for name in repeated])

    undecided = {"a": (0.9, 1.1), "b": (0.86, 1.09), "c": (1.2, 1.5)}
    assert next_one(**undecided) == ("b",)
    assert next_one("b", **undecided) == ("a",)
    assert next_one("a", "b", **undecided) is None
    decided = undecided | {"b": (0.76, 0.77)}
    assert next_one(**decided) == ("b",)
    assert next_one("b", **decided) is None, "a is worse"
    assert next_one("b", **decided | {"a": (0.75, 1.1)}) == ("a",)


LATE: Sequence[tuple[dict[str, float], dict[str, Any], str]] = (
    ({"compile": 0.8, "fused": 0.9, "threads": 1.2}, {}, "compile fused"),
    ({"compile": 0.8, "fused": math.inf}, {}, "compile"),
    ({"compile": 0.8, "fused": 0.9}, {("compile", "fused"): math.inf}, "compile"),
)


@pytest.mark.parametrize(("factors", "pairs", "best"), LATE)
def test_late_switches_are_tried_last_on_top_of_gains(
    factors: dict[str, float], pairs: dict[str, Any], best: str
) -> None:
    machine = Machine(factors, pairs)
    search = machine.search(late=("compile",))
    assert search.run() == tuple(best.split())
    assert search.effects["compile"] in (pytest.approx(0.8), math.inf), (
        "the effect of compile alone"
    )
    first_late = next(i for i, names in enumerate(machine.tried) if "compile" in names)
    assert first_late >= len(factors) - 1


def test_gains_are_combined_before_late_switches() -> None:
    machine = Machine({"compile": 1.2, "fused": 0.95, "layout": 0.96})
    machine.limit = 3
    assert machine.search(late=("compile",)).run() == ("fused", "layout")
