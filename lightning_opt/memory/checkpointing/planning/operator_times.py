"""What operators take, from times that are noisy: units that run the same ones are one sample."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from typing import TypeAlias, TypeVar

from lightning_opt.core.modules.blocks import Block
from lightning_opt.memory.checkpointing.methods.selective import Place
from lightning_opt.memory.checkpointing.planning.block_profile import Unit

LEVELS = 8
"""At most so many selections are considered between keeping nothing and keeping everything."""
DEAR = 0.02
"""An operator is worth a thought from this share of its block's recomputation time on."""

Seconds: TypeAlias = dict[Place, float]
"""What each operator of a unit takes."""

Found = TypeVar("Found")


def by_kind(units: Sequence[Unit], find: Callable[[Sequence[Unit]], Found]) -> dict[Block, Found]:
    """Return for each unit what is found for all that run the same operators on the same sizes."""
    groups: dict[Hashable, list[Unit]] = defaultdict(list)
    for unit in units:
        operators = (op for profile in unit.profiles for op in profile.operators)
        groups[tuple((op.place, op.nbytes) for op in operators)].append(unit)
    found: dict[Block, Found] = {}
    for like in groups.values():
        found.update(dict.fromkeys((unit.block for unit in like), find(like)))
    return found


def nested_selections(like: Sequence[Unit]) -> list[frozenset[Place]]:
    """Return growing sets of operators to keep, those that save most time a byte first."""
    seconds, again = operator_seconds(like), like[0].profiles[0].again()
    total = sum(seconds[operator.place] for operator in again)
    worth = [
        operator
        for operator in again
        if operator.keepable and operator.nbytes and seconds[operator.place] > DEAR * total
    ]
    worth.sort(key=lambda operator: seconds[operator.place] / operator.nbytes, reverse=True)
    sets = [frozenset(op.place for op in worth[:count]) for count in range(1, len(worth) + 1)]
    stride = math.ceil(len(sets) / LEVELS) or 1
    return sets[::stride]


def mean_by_kind(units: Sequence[Unit], seconds: dict[Block, float]) -> dict[Block, float]:
    """Replace each unit's time by the mean over its like: they differ by noise alone."""
    return by_kind(units, lambda like: sum(seconds[u.block] for u in like) / len(like))


def operator_seconds(like: Sequence[Unit]) -> Seconds:
    """Return the operators' times: the median over units that run the same ones."""
    times: dict[Place, list[float]] = defaultdict(list)
    for unit in like:
        for operator in (op for profile in unit.profiles for op in profile.operators):
            times[operator.place].append(operator.seconds)
    return {place: statistics.median(values) for place, values in times.items()}
