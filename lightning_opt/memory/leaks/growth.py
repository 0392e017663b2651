"""Detect growth: cheap counters at every sample, and counts of all containers in a search.

A container is identified by ``id``, wherever it is referenced. The longest autograd graph is
counted too, because it can grow without a container.
"""

from __future__ import annotations

import gc
import itertools
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_opt.core.measure.malloc import malloc_info
from lightning_opt.core.measure.memory import resident_memory
from lightning_opt.core.numerics.trend import mann_kendall, theil_sen
from lightning_opt.memory.object_graph import CONTAINERS, Root, Walk, graph_size

PYTHON_BLOCK = 96
"""Bytes of a typical block of Python's own allocator, which counts blocks and not bytes."""

WINDOW = 24
SAMPLES = 8
SIGNIFICANT = 0.01


def read_counters(device: torch.device) -> dict[str, float]:
    """Return memory counters in bytes, without those that this system lacks.

    Resident memory also grows by fragmentation, so alone it justifies a search, not a warning.
    """
    counters = {
        "resident": float(resident_memory()),
        "python": float(PYTHON_BLOCK * sys.getallocatedblocks()),
    }
    heap = malloc_info()
    if heap is not None:
        counters["heap"] = float(heap.used)
    if device.type == "cuda":
        counters["device"] = float(torch.cuda.memory_allocated(device))
    return counters


class MemoryTrend:
    """The newest samples of the counters, taken at the same point of a step each time.

    Args:
        min_rate: Bytes per step below which growth does not matter.
    """

    def __init__(self, min_rate: float) -> None:
        self._min_rate = min_rate
        self._samples: deque[tuple[int, Mapping[str, float]]] = deque(maxlen=WINDOW)
        self.taken = 0

    def add(self, step: int, counters: Mapping[str, float]) -> None:
        """Add one sample."""
        self._samples.append((step, counters))
        self.taken += 1

    def is_due(self) -> bool:
        """Return whether there are enough new samples for a test."""
        return self.taken >= SAMPLES and self.taken % (SAMPLES // 2) == 0

    def growing(self) -> dict[str, float]:
        """Return the counters that grow without flattening, in bytes per step, fastest first."""
        found = {}
        for name in self._samples[0][1] if self._samples else ():
            steps = [float(step) for step, values in self._samples if name in values]
            series = [values[name] for _, values in self._samples if name in values]
            slope = theil_sen(steps, series)
            if slope < self._min_rate or mann_kendall(series)[1] >= SIGNIFICANT:
                continue
            # A cache or an allocator that fills up grows only in the first half.
            half = len(steps) // 2
            if theil_sen(steps[half:], series[half:]) >= max(slope / 4, self._min_rate / 2):
                found[name] = slope
        return dict(sorted(found.items(), key=lambda item: -item[1]))


@dataclass
class Census:
    """The counts of one step.

    Attributes:
        step: The step.
        epoch: The epoch.
        lengths: Length of every container, by ``id``.
        graph_nodes: Operations in the longest autograd graph of any tensor.
    """

    step: int
    epoch: int
    lengths: dict[int, int]
    graph_nodes: int


def take_census(step: int, epoch: int, roots: Sequence[Root]) -> Census:
    """Collect garbage and count all containers. Takes some tenths of a second."""
    gc.collect()
    walk = Walk(roots)  # finds frozen objects, which `gc.get_objects` does not list
    objects = gc.get_objects()
    longest = max(map(graph_size, _tensors_with_graph(objects)), default=0)
    things = itertools.chain(objects, (thing for thing, _ in walk.found.values()))
    lengths = {id(thing): len(thing) for thing in things if type(thing) in CONTAINERS}
    return Census(step, epoch, lengths, longest)


def growing_containers(counts: Sequence[Census], min_rate: float) -> dict[int, float]:
    """Return the ids of containers that grew between all counts, with items per step.

    Args:
        counts: At least two, the oldest first.
        min_rate: Items per step, above 0, below which a container does not matter.
    """
    found = {}
    for key in counts[-1].lengths:
        lengths = [count.lengths.get(key, -1) for count in counts]
        rate = _growth(counts, lengths) if lengths[0] >= 0 else 0.0
        if rate >= min_rate:
            found[key] = rate
    return found


def graph_growth(counts: Sequence[Census]) -> float:
    """Return the growth of the longest graph in operations per step; 0 unless it always grew."""
    return _growth(counts, [count.graph_nodes for count in counts])


def _growth(counts: Sequence[Census], lengths: Sequence[int]) -> float:
    if any(b <= a for a, b in itertools.pairwise(lengths)):
        return 0.0
    return (lengths[-1] - lengths[0]) / (counts[-1].step - counts[0].step)


def longest_graph() -> Tensor | None:
    """Return the tensor with the longest autograd graph."""
    return max(_tensors_with_graph(gc.get_objects()), key=graph_size, default=None)


def _tensors_with_graph(objects: Sequence[object]) -> list[Tensor]:
    kinds = {kind for kind in set(map(type, objects)) if issubclass(kind, Tensor)}
    return [t for t in objects if type(t) in kinds and t.grad_fn is not None]  # type: ignore[attr-defined, misc]
