"""What operators take, from times that are noisy: units that run the same ones are one sample."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Hashable, Sequence
from typing import TypeAlias

from lightning_opt.core.blocks import Block
from lightning_opt.memory.checkpointing.methods.selective import Operator, Place
from lightning_opt.memory.checkpointing.planning.block_profile import Unit

LEVELS = 8
"""At most so many selections are considered between keeping nothing and keeping everything."""
DEAR = 0.02
"""An operator is worth a thought from this share of its block's recomputation time on."""

Seconds: TypeAlias = dict[Place, float]
"""What each operator of a unit takes."""


def alike(units: Sequence[Unit]) -> list[list[Unit]]:
    """Return the units in groups that run the same operators on the same sizes."""
    groups: dict[Hashable, list[Unit]] = defaultdict(list)
    for unit in units:
        operators = (op for profile in unit.profiles for op in profile.operators)
        groups[tuple((op.place, op.nbytes) for op in operators)].append(unit)
    return list(groups.values())


def nested_selections(runs: Sequence[Sequence[Operator]]) -> list[frozenset[Place]]:
    """Return growing sets of operators to keep, those that save most time a byte first."""
    seconds: dict[Place, float] = defaultdict(float)
    for run in runs:
        for operator in run:
            seconds[operator.place] += operator.seconds
    total = sum(seconds.values())
    worth = [
        operator
        for operator in runs[0]
        if operator.keepable and operator.nbytes and seconds[operator.place] > DEAR * total
    ]
    worth.sort(key=lambda operator: seconds[operator.place] / operator.nbytes, reverse=True)
    sets = [frozenset(op.place for op in worth[:count]) for count in range(1, len(worth) + 1)]
    stride = math.ceil(len(sets) / LEVELS) or 1
    return sets[::stride]


def mean_by_kind(units: Sequence[Unit], seconds: dict[Block, float]) -> dict[Block, float]:
    """Replace each unit's time by the mean over its like: they differ by noise alone."""
    found: dict[Block, float] = {}
    for like in alike(units):
        mean = sum(seconds[unit.block] for unit in like) / len(like)
        found.update((unit.block, mean) for unit in like)
    return found


def operator_seconds(units: Sequence[Unit]) -> dict[Block, Seconds]:
    """Return the operators' times for each unit: the median over its like."""
    found: dict[Block, Seconds] = {}
    for like in alike(units):
        times: dict[Place, list[float]] = defaultdict(list)
        for unit in like:
            for operator in (op for profile in unit.profiles for op in profile.operators):
                times[operator.place].append(operator.seconds)
        medians = {place: statistics.median(values) for place, values in times.items()}
        found.update((unit.block, medians) for unit in like)
    return found
