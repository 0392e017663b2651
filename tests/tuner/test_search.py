"""The search on simulated machines, compared with an exhaustive one."""

import itertools
import math
import random
from collections.abc import Callable, Iterable, Sequence

import pytest

from lightning_opt.tuner.search import Search, TimeIsUp
from lightning_opt.tuner.trial import Outcome

Names = tuple[str, ...]


class Machine:
    """Costs are products of factors of switches and of pairs, with noise.

    Attributes:
        tried: All configurations measured, in order.
    """

    def __init__(
        self,
        factors: dict[str, float],
        pairs: dict[frozenset[str], float] | None = None,
        exclusive: Sequence[set[str]] = (),
        noise: float = 0.0,
        seed: int = 0,
    ) -> None:
        self.factors, self.pairs, self.exclusive = factors, pairs or {}, exclusive
        self.noise, self.random = noise, random.Random(seed)
        self.tried: list[Names] = []
        self.limit = math.inf
        self.failing: dict[str, Outcome] = {}

    def cost(self, names: Iterable[str]) -> float:
        on = set(names)
        pairs = math.prod(value for pair, value in self.pairs.items() if pair <= on)
        return math.prod(self.factors[name] for name in on) * pairs

    def allows(self, names: Iterable[str]) -> bool:
        return all(len(group & set(names)) < 2 for group in self.exclusive)

    def interacts(self, one: str, other: str) -> bool:
        return frozenset((one, other)) in self.pairs

    def measure(self, configurations: Sequence[Names]) -> Iterable[Outcome]:
        for names in configurations:
            if len(self.tried) >= self.limit:
                raise TimeIsUp
            self.tried.append(names)
            failed = [self.failing[name] for name in names if name in self.failing]
            score = self.cost(names) * math.exp(self.noise * self.random.gauss(0, 1))
            spread = 1 + 2 * self.noise
            yield failed[0] if failed else Outcome(score, score / spread, score * spread)

    def search(self) -> Search:
        return Search(self.measure, tuple(self.factors), self.allows, self.interacts)

    def exhaustive(self) -> float:
        names = list(self.factors)
        every = itertools.chain.from_iterable(
            itertools.combinations(names, size) for size in range(len(names) + 1)
        )
        return min(self.cost(some) for some in every if self.allows(some))


def random_machine(seed: int, switches: int, noise: float) -> Machine:
    """Half of the switches gain; a fifth of the pairs interact."""
    rng = random.Random(seed)
    names = "abcdefgh"[:switches]
    factors = {name: rng.choice([rng.uniform(0.6, 0.97), rng.uniform(0.97, 1.5)]) for name in names}
    pairs = {
        frozenset(pair): rng.uniform(0.85, 1.3)
        for pair in itertools.combinations(names, 2)
        if rng.random() < 0.2
    }
    exclusive = [set(rng.sample(names, 2))]
    return Machine(factors, pairs, exclusive, noise, seed)


@pytest.mark.parametrize(("noise", "share"), [(0.0, 0.95), (0.01, 0.9)])
def test_search_is_near_the_optimum_with_a_quarter_of_the_trials(
    noise: float, share: float
) -> None:
    near, trials, grid = 0, 0, 0
    for seed in range(300):
        machine = random_machine(seed, switches=6, noise=noise)
        found = machine.search().run()
        assert machine.allows(found)
        best = machine.exhaustive()
        # An answer that gains less than 3% is not given.
        near += machine.cost(found) <= 1.05 * best or (not found and best > 0.96)
        trials += len(machine.tried)
        grid += 48  # 2 ** 6 without those that the exclusive pair forbids
    assert near / 300 >= share
    assert trials / grid <= 0.25


def test_multiplying_gains_take_one_extra_trial() -> None:
    machine = Machine({"a": 0.8, "b": 0.9, "c": 1.4, "d": 0.95})
    search = machine.search()
    assert search.run() == ("a", "b", "d")
    assert len(machine.tried) == 5
    assert search.complete


def test_nothing_is_chosen_without_gains() -> None:
    machine = Machine({"a": 1.02, "b": 1.4, "c": 0.985})
    assert machine.search().run() == ()
    assert len(machine.tried) == 3


@pytest.mark.parametrize("interacts_known", [True, False])
@pytest.mark.parametrize(
    ("factors", "pairs", "excluded", "answer"),
    [
        ({"a": 0.7, "b": 0.8, "c": 0.9}, {"ab": 1.5}, "", "ac"),
        ({"a": 0.7, "b": 0.8, "c": 0.75, "d": 0.85}, {"ab": 1.5, "cd": 1.4}, "", "ac"),
        ({"a": 0.7, "b": 0.72, "c": 0.8}, {"ac": 1.3}, "ab", "bc"),
        ({"a": 0.7, "b": 0.98}, {"ab": 1.021}, "", "a"),
        ({"a": 0.8, "b": 0.9, "c": 0.98}, {"ac": 1.035}, "", "ab"),
    ],
    ids=["one spoils", "two spoil", "better company", "adds nothing", "costs a little"],
)
def test_parts_that_spoil_a_combination_are_dropped(
    factors: dict[str, float],
    pairs: dict[str, float],
    excluded: str,
    answer: str,
    interacts_known: bool,
) -> None:
    planted = {frozenset(pair): factor for pair, factor in pairs.items()}
    machine = Machine(factors, planted, [set(excluded)] if excluded else [])
    if not interacts_known:
        machine.interacts = lambda one, other: False  # type: ignore[method-assign]
    assert machine.search().run() == tuple(answer)


@pytest.mark.parametrize("alone", [(0.8, 1.05), (1.04, 1.05)])
def test_interacting_pairs_that_win_together_are_found(alone: tuple[float, float]) -> None:
    machine = Machine({"a": alone[0], "b": alone[1], "c": 1.3}, {frozenset("ab"): 0.7})
    assert machine.search().run() == ("a", "b")


def test_simpler_of_two_similar_configurations_wins() -> None:
    search = Machine({"a": 0.8, "b": 0.9, "c": 0.98}).search()
    assert search.run() == ("a", "b")
    assert search.best() == ("a", "b", "c"), "by less than is worth a switch"


def test_failure_is_retried_only_if_curable() -> None:
    broken = Machine({"a": 0.5, "b": 0.9}, {frozenset("ab"): 1.0})
    broken.failing = {"a": Outcome(math.inf)}
    assert broken.search().run() == ("b",)
    assert ("a", "b") not in broken.tried
    curable = Machine({"a": 0.5, "b": 1.05}, {frozenset("ab"): 1.0})
    measure = curable.measure

    def measured(configurations: Sequence[Names]) -> Iterable[Outcome]:
        for names, outcome in zip(configurations, measure(configurations), strict=True):
            yield Outcome(math.inf, retry=True) if names == ("a",) else outcome

    curable.measure = measured  # type: ignore[method-assign]
    assert curable.search().run() == ("a", "b")


@pytest.mark.parametrize("limit", range(6))
def test_best_so_far_is_the_answer_when_time_is_up(limit: int) -> None:
    machine = Machine({"a": 0.8, "b": 0.9, "c": 1.4, "d": 0.95})
    machine.limit = limit
    search = machine.search()
    assert search.run() == [(), ("a",), ("a",), ("a",), ("a",), ("a", "b", "d")][limit]
    assert search.complete == (limit == 5)


def test_uncertain_gain_is_not_chosen() -> None:
    measure: Callable[..., list[Outcome]] = lambda some: [Outcome(0.93, 0.85, 1.02) for _ in some]  # noqa: E731
    assert Search(measure, ("a",)).run() == ()
    assert Search(lambda some: [Outcome(0.93, 0.91, 0.95) for _ in some], ("a",)).run() == ("a",)


def test_undecided_configurations_are_measured_again() -> None:
    """The most promising first, a limited number of times; a small gain once in any case."""
    search = Search(lambda some: [], ("a", "b", "c"))
    search.outcomes = {
        (): Outcome(1.0, 1.0, 1.0),
        ("a",): Outcome(0.9, 0.7, 1.1),
        ("b",): Outcome(0.86, 0.68, 1.09),
        ("c",): Outcome(1.2, 0.9, 1.5),
        ("a", "b"): Outcome(math.inf, math.inf, math.inf),
    }
    assert search.next_to_remeasure((), {}) == ("b",)
    assert search.next_to_remeasure((), {("b",): 3}) == ("a",)
    assert search.next_to_remeasure((), {("b",): 3, ("a",): 3}) is None
    search.outcomes[("b",)] = Outcome(0.76, 0.75, 0.77)
    assert search.next_to_remeasure(("b",), {}) is None, "a is worse, and b is sure"
    search.outcomes[("a",)] = Outcome(0.75, 0.7, 1.1)
    assert search.next_to_remeasure(("b",), {}) == ("a",)
    search.outcomes[("b",)] = Outcome(0.95, 0.94, 0.96)
    assert search.next_to_remeasure(("b",), {}) == ("b",)
    search.outcomes[("a",)] = Outcome(1.1, 1.0, 1.2)
    assert search.next_to_remeasure(("b",), {("b",): 1}) is None


def test_first_switch_is_tried_first_and_others_beside_it() -> None:
    """Faster computation gains nothing while a step waits for data."""
    machine = Machine({"bf16": 1.0, "data": 0.5, "fused": 1.0}, {frozenset(("bf16", "data")): 0.6})
    search = machine.search()
    search.first = "data"
    assert search.run() == ("bf16", "data")
    assert machine.tried[:3] == [("data",), ("bf16", "data"), ("data", "fused")]
    assert ("bf16",) not in machine.tried


def test_first_switch_may_gain_only_beside_another() -> None:
    """Workers may gain only once torch leaves them a CPU."""
    machine = Machine(
        {"data": 1.0, "fused": 1.0, "threads": 1.0}, {frozenset(("data", "threads")): 0.6}
    )
    search = machine.search()
    search.interacts = lambda one, other: False
    search.first = "data"
    assert search.run() == ("data", "threads")
    assert machine.tried[:3] == [("data",), ("data", "fused"), ("data", "threads")]

    machine.failing["data"] = Outcome(math.inf)
    search = machine.search()
    search.first = "data"
    search.run()
    assert machine.tried[-2:] == [("fused",), ("threads",)], "without what fails"


def test_possible_gains_join_the_union() -> None:
    seen = {("a",): Outcome(0.8, 0.7, 0.9), ("b",): Outcome(1.01, 0.9, 1.1)}
    seen |= {("c",): Outcome(1.01, 1.0, 1.02), ("d",): Outcome(1.05, 0.9, 1.2)}
    tried: list[Names] = []

    def measure(some: Sequence[Names]) -> Iterable[Outcome]:
        for names in some:
            tried.append(names)
            yield seen.get(names, Outcome(0.75, 0.7, 0.8))

    search = Search(measure, ("a", "b", "c", "d"), interacts=lambda one, other: False)
    assert search.run() == ("a", "b")
    assert tried[4:] == [("a", "b")]


def test_interval_beside_others_is_a_share_of_their_gain() -> None:
    """A switch with a certain loss beside a gain of a half does not join the union."""
    machine = Machine({"data": 0.5, "a": 0.8, "b": 1.01})
    search = machine.search()
    search.interacts = lambda one, other: False
    search.first = "data"
    assert search.run() == ("data", "a")
    assert ("data", "a", "b") not in machine.tried


def test_late_switches_are_tried_last_beside_gains() -> None:
    machine = Machine({"compile": 0.8, "fused": 0.9, "threads": 1.1})
    search = machine.search()
    search.late = ("compile",)
    assert search.run() == ("compile", "fused")
    assert machine.tried[:3] == [("fused",), ("threads",), ("compile", "fused")]
    assert ("compile",) not in machine.tried

    machine.failing["fused"] = Outcome(math.inf)
    search = machine.search()
    search.late = ("compile",)
    assert search.run() == ("compile",)
    machine = Machine({"compile": 0.8, "fused": 0.9}, {frozenset(("compile", "fused")): math.inf})
    search = machine.search()
    search.late = ("compile",)
    assert search.run() == ("compile",), "what fails together is tried alone"

    machine = Machine({"compile": 1.2, "fused": 0.95, "layout": 0.96})
    machine.limit = 3
    search = machine.search()
    search.late = ("compile",)
    assert search.run() == ("fused", "layout"), "combined before the time may be up"


@pytest.mark.parametrize("first", ["data", "not there"])
def test_first_switch_without_gain_is_not_in_the_answer(first: str) -> None:
    machine = Machine({"bf16": 0.9, "data": 1.0})
    search = machine.search()
    search.first = first
    assert search.run() == ("bf16",)
