"""Counts what is there, so that two counts tell what has grown: containers, graphs, garbage.

A container is known by its identity: it may be anything that holds others, wherever it is. That is
what a leak in Python comes down to, but for two: a graph of autograd that gets longer, and
reference cycles that nobody collects.
"""

from __future__ import annotations

import gc
import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from lightning_opt.memory.object_graph import (
    CONTAINERS,
    Root,
    Walk,
    deep_size,
    graph_size,
    is_a,
    own_size,
)

NEWEST = 3
"""Items of a container whose size is measured."""


@dataclass
class Garbage:
    """What a collection found.

    Attributes:
        objects: How many.
        bytes: Their size, that of tensors included.
        types: How many of each class, built-in ones left out.
        tensors: How many of them are tensors.
    """

    objects: int = 0
    bytes: int = 0
    types: Counter[type] = field(default_factory=Counter)
    tensors: int = 0


@dataclass
class Census:
    """What was there at one step.

    Attributes:
        step: The step.
        epoch: The epoch.
        lengths: Of every container, by identity.
        graph_nodes: Operations in the longest graph of autograd behind any tensor.
        garbage: What was garbage since the census before.
    """

    step: int
    epoch: int
    lengths: dict[int, int]
    graph_nodes: int
    garbage: Garbage


def take_census(step: int, epoch: int, roots: Sequence[Root]) -> Census:
    """Count everything. Takes some tenths of a second, most of them for collecting garbage."""
    garbage = collect_garbage()
    walk = Walk(roots)  # finds what is frozen, which `gc.get_objects` does not list
    objects = gc.get_objects()
    longest = max(map(graph_size, _with_graph(objects)), default=0)
    there = itertools.chain(objects, (thing for thing, _ in walk.found.values()))
    lengths = {id(thing): len(thing) for thing in there if type(thing) in CONTAINERS}
    return Census(step, epoch, lengths, longest, garbage)


def collect_garbage() -> Garbage:
    """Collect, and tell what was there. Whatever is in ``gc.garbage`` stays.

    Python has to collect twice: to look at what is dead it must be kept alive once more.
    """
    flags, kept = gc.get_debug(), len(gc.garbage)
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        gc.collect()
        dead = gc.garbage[kept:]
        del gc.garbage[kept:]
    finally:
        gc.set_debug(flags)
    garbage = Garbage(
        len(dead),
        own_size(dead),
        Counter(type(thing) for thing in dead if type(thing).__module__ != "builtins"),
        sum(is_a(thing, Tensor) for thing in dead),
    )
    dead.clear()
    gc.collect()
    return garbage


def growing_containers(counts: Sequence[Census], per_step: float) -> dict[int, float]:
    """Return the containers that have grown from count to count, with items a step.

    Args:
        counts: At least two, the oldest first.
        per_step: Items a step that are too few to matter, above 0.
    """
    found = {}
    for key in counts[-1].lengths:
        lengths = [count.lengths.get(key, -1) for count in counts]
        rate = _growth(counts, lengths) if lengths[0] >= 0 else 0.0
        if rate >= per_step:
            found[key] = rate
    return found


def growing_graph(counts: Sequence[Census]) -> float:
    """Return by how many operations a step the longest graph has grown from count to count."""
    return _growth(counts, [count.graph_nodes for count in counts])


def _growth(counts: Sequence[Census], lengths: Sequence[int]) -> float:
    """Return the growth a step of what has had these lengths; 0 unless it grew each time."""
    if any(b <= a for a, b in itertools.pairwise(lengths)):
        return 0.0
    return (lengths[-1] - lengths[0]) / (counts[-1].step - counts[0].step)


def steady_garbage(counts: Sequence[Census]) -> float:
    """Return the bytes of garbage a step, the least of all intervals between counts.

    Small objects without tensors weigh little, and Python gets to them in time: they count as
    nothing.
    """
    rates = [
        after.garbage.bytes / (after.step - before.step) if after.garbage.tensors else 0.0
        for before, after in itertools.pairwise(counts)
    ]
    return min(rates, default=0.0)


def item_size(container: Any) -> float:
    """Return the bytes behind one of the newest items of a container, on average."""
    items = newest(container)
    return deep_size(items, limit=400 * max(1, len(items))) / len(items) if items else 0.0


def newest(container: Any) -> list[Any]:
    """Return the newest items of a container, or any where it knows no order."""
    values: Any = list(container.items()) if is_a(container, Mapping) else list(container)
    return list(values[-NEWEST:])


def longest_graph() -> Tensor | None:
    """Return the tensor with the longest graph of autograd behind it."""
    return max(_with_graph(gc.get_objects()), key=graph_size, default=None)


def _with_graph(objects: Sequence[Any]) -> list[Tensor]:
    kinds = {kind for kind in set(map(type, objects)) if issubclass(kind, Tensor)}
    return [t for t in objects if type(t) in kinds and t.grad_fn is not None]
