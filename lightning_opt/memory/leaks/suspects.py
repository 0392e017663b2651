"""Detect growth and describe suspects.

Cheap counters are sampled during the run. In a search, all containers and autograd graphs are
counted several times. Those that grew every time are suspects, with the path that leads to them.
"""

from __future__ import annotations

import gc
import itertools
import sys
import sysconfig
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from lightning_opt.core.measure.memory import malloc_info, resident_memory
from lightning_opt.core.numerics.ratios import mann_kendall, theil_sen
from lightning_opt.memory import object_graph
from lightning_opt.memory.object_graph import Root, Walk, graph_size, is_a

PYTHON_BLOCK_BYTES = 96
"""Typical size of a block of Python's allocator, which reports the number of blocks only."""

MAX_SAMPLES = 24
MIN_SAMPLES = 8
MAX_P_VALUE = 0.01


def read_counters(device: torch.device) -> dict[str, float]:
    """Return the memory counters that this system has, in bytes.

    Resident memory also grows by fragmentation, so its growth starts a search but is not reported.
    """
    counters = {
        "resident": float(resident_memory()),
        "python": float(PYTHON_BLOCK_BYTES * sys.getallocatedblocks()),
    }
    heap = malloc_info()
    if heap is not None:
        counters["heap"] = float(heap.used)
    if device.type == "cuda":
        counters["device"] = float(torch.cuda.memory_allocated(device))
    return counters


class MemoryTrend:
    """The newest samples of the counters; growth below ``min_bytes_per_step`` is ignored."""

    def __init__(self, min_bytes_per_step: float) -> None:
        self._min_bytes_per_step = min_bytes_per_step
        self._samples: deque[tuple[int, Mapping[str, float]]] = deque(maxlen=MAX_SAMPLES)
        self.taken = 0

    def add(self, step: int, counters: Mapping[str, float]) -> None:
        self._samples.append((step, counters))
        self.taken += 1

    def is_due(self) -> bool:
        """Return whether there are enough new samples for a test."""
        return self.taken >= MIN_SAMPLES and self.taken % (MIN_SAMPLES // 2) == 0

    def growing(self) -> dict[str, float]:
        """Return the counters that grow without flattening, in bytes per step, fastest first."""
        slopes = {}
        for name in self._samples[0][1] if self._samples else ():
            steps = [float(step) for step, values in self._samples if name in values]
            series = [values[name] for _, values in self._samples if name in values]
            slope = theil_sen(steps, series)
            if slope < self._min_bytes_per_step or mann_kendall(series)[1] >= MAX_P_VALUE:
                continue
            # A cache that is being filled grows in the first half of the samples only.
            half = len(steps) // 2
            if theil_sen(steps[half:], series[half:]) >= max(
                slope / 4, self._min_bytes_per_step / 2
            ):
                slopes[name] = slope
        return dict(sorted(slopes.items(), key=lambda item: -item[1]))


@dataclass
class Census:
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
    lengths = {id(thing): len(thing) for thing in things if type(thing) in object_graph.CONTAINERS}
    return Census(step, epoch, lengths, longest)


def growing_containers(counts: Sequence[Census], min_items_per_step: float) -> dict[int, float]:
    """Return the ids of containers that grew between all counts, with items per step."""
    rates = {}
    for key in counts[-1].lengths:
        lengths = [count.lengths.get(key, -1) for count in counts]
        rate = _growth(counts, lengths) if lengths[0] >= 0 else 0.0
        if rate >= min_items_per_step:
            rates[key] = rate
    return rates


def graph_growth(counts: Sequence[Census]) -> float:
    """Return the growth of the longest graph in operations per step; 0 unless all counts grew."""
    return _growth(counts, [count.graph_nodes for count in counts])


def _growth(counts: Sequence[Census], lengths: Sequence[int]) -> float:
    if any(b <= a for a, b in itertools.pairwise(lengths)):
        return 0.0
    return (lengths[-1] - lengths[0]) / (counts[-1].step - counts[0].step)


def longest_graph() -> Tensor | None:
    return max(_tensors_with_graph(gc.get_objects()), key=graph_size, default=None)


def _tensors_with_graph(objects: Sequence[object]) -> list[Tensor]:
    kinds = {kind for kind in set(map(type, objects)) if issubclass(kind, Tensor)}
    return [t for t in objects if type(t) in kinds and t.grad_fn is not None]  # type: ignore[attr-defined, misc]


Kind = Literal["graph", "container"]

ADVICE: dict[Kind, str] = {
    "graph": "detach() it, or keep item(): a stored loss keeps its graph and activations alive",
    "container": "clear it, bound it, or keep numbers on the host. A metric: reset() it, or log "
    "the metric itself. Hooks: remove() the handle. Exceptions: keep str(error), as tracebacks "
    "hold local variables",
}

MIN_ITEMS_PER_STEP = 0.02
"""Minimum growth of a leaking container: one item in fifty steps."""

MAX_SUSPECTS = 5
"""Maximum number of suspects of one search."""

MEASURED_ITEMS = 3
"""Number of newest items of a container whose size is measured."""

BASE_CLASSES = ("lightning/pytorch/core", "pytorch_lightning/core", "nn/modules/module.py")

_LIBRARIES = tuple(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib"))


@dataclass(frozen=True)
class Suspect:
    """A probable leak.

    ``where`` is an expression that leads to the object from the module or a Python module.
    ``items`` describes the items, and ``per_step`` is the number of items added per step.
    """

    kind: Kind
    where: str
    items: str
    per_step: float
    kb_per_step: float
    step: int

    @property
    def advice(self) -> str:
        return ADVICE[self.kind]

    def __str__(self) -> str:
        return (
            f"{self.kind}: {self.where} grows by {self.per_step:.3g} {self.items} a step, "
            f"{self.kb_per_step:.3g} KB a step."
        )


def user_modules() -> list[Root]:
    """Return the names and namespaces of imported Python modules outside of installed libraries."""
    own = str(Path(__file__).parents[2])
    files = {name: getattr(module, "__file__", None) for name, module in [*sys.modules.items()]}
    return [
        (name, vars(sys.modules[name]))
        for name, file in files.items()
        if file and not file.startswith((*_LIBRARIES, own))
    ]


def find_suspects(
    counts: Sequence[Census], roots: Sequence[Root], min_bytes_per_step: float, searcher: Any
) -> list[Suspect]:
    """Return at most five objects that grew between all counts, the fastest first.

    Paths start at ``roots``. Growth below ``min_bytes_per_step`` is ignored, and so are
    objects held by ``searcher``, the caller.
    """
    walk = Walk(roots)
    suspects = _container_suspects(counts, walk, min_bytes_per_step, searcher)
    rate = graph_growth(counts)
    tensor = longest_graph() if rate >= MIN_ITEMS_PER_STEP else None
    if tensor is not None:
        chain = walk.path(tensor) or [tensor]
        suspects.append(_graph_suspect(chain, walk.name(chain[0]), rate, counts[-1].step))
    largest = max((s.kb_per_step for s in suspects), default=0.0)
    relevant = [s for s in suspects if s.kb_per_step >= 0.1 * largest]
    return sorted(relevant, key=lambda suspect: -suspect.kb_per_step)[:MAX_SUSPECTS]


def _container_suspects(
    counts: Sequence[Census], walk: Walk, min_bytes_per_step: float, searcher: Any
) -> list[Suspect]:
    rates = growing_containers(counts, MIN_ITEMS_PER_STEP)
    things = {key: walk.found[key][0] for key in rates if key in walk.found}
    if len(things) < len(rates):
        things |= {id(thing): thing for thing in gc.get_objects() if id(thing) in rates}
    searcher_ids = {id(held) for held in vars(searcher).values()} | {
        id(vars(searcher)),
        id(walk.found),
    }
    sizes = {key: _item_size(thing) for key, thing in things.items() if key not in searcher_ids}
    largest_first = sorted(
        (key for key in sizes if rates[key] * sizes[key] >= min_bytes_per_step / 2),
        key=lambda key: -rates[key] * sizes[key],
    )
    suspects = []
    for key in largest_first[:MAX_SUSPECTS]:
        chain = walk.path(things[key]) or [things[key]]
        if not any(item is searcher for item in chain):
            where = object_graph.describe(chain, walk.name(chain[0]))
            kb_per_step = rates[key] * sizes[key] / 1024
            suspects.append(_container_suspect(chain, where, rates[key], kb_per_step, counts))
    return suspects


def _container_suspect(
    chain: Sequence[Any], where: str, rate: float, kb_per_step: float, counts: Sequence[Census]
) -> Suspect:
    container = chain[-1]
    items = [value[1] if type(value) is tuple and is_a(container, dict) else value
             for value in _newest(container)]  # fmt: skip
    with_graph = any(tensor.grad_fn is not None for item in items for tensor in _tensors(item))
    kind: Kind = "graph" if with_graph else "container"
    item_type = type(items[-1]).__name__ if items else "items"
    return Suspect(kind, where, item_type, rate, kb_per_step, counts[-1].step)


def _graph_suspect(chain: Sequence[Any], root: str, rate: float, step: int) -> Suspect:
    tensor = chain[-1]
    node = tensor.grad_fn.name() if tensor.grad_fn is not None else "?"
    operations = f"operations (now {graph_size(tensor):,}, the last of them {node})"
    where = object_graph.describe(chain, root)
    return Suspect("graph", where, operations, rate, rate, step)


def _item_size(container: Any) -> float:
    items = _newest(container)
    return (
        object_graph.deep_size(items, limit=400 * max(1, len(items))) / len(items) if items else 0.0
    )


def _newest(container: Any) -> list[Any]:
    """Return the newest items of a container, or any items of an unordered one."""
    values: Any = list(container.items()) if is_a(container, Mapping) else list(container)
    return list(values[-MEASURED_ITEMS:])


def _tensors(item: Any, depth: int = 2) -> list[Tensor]:
    if is_a(item, Tensor):
        return [item]
    if depth and is_a(item, (list, tuple, dict)):
        parts = list(item.values()) if is_a(item, dict) else item
        return [tensor for part in parts[:20] for tensor in _tensors(part, depth - 1)]
    return []
