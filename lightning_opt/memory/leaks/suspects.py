"""Detect growth and describe suspects.

Cheap counters are sampled during the run. In a search, the containers and autograd graphs that the
run's objects reference are counted several times. Those that grew every time are reported as
suspects, with their paths.
"""

from __future__ import annotations

import gc
import itertools
import re
import sys
import sysconfig
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import BuiltinFunctionType, CodeType, FrameType, ModuleType
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lightning_opt.core.measure.memory import malloc_info, resident_memory
from lightning_opt.core.modules.batches import tensors_of
from lightning_opt.core.numerics.ratios import mann_kendall, theil_sen
from lightning_opt.memory.meters import storage_bytes

# --- growth ---------------------------------------------------------------------------------------

PYTHON_BLOCK_BYTES = 96
"""Typical size of a block of Python's allocator, which reports the number of blocks only."""

MAX_SAMPLES = 24
MIN_SAMPLES = 8
MAX_P_VALUE = 0.01


def read_counters(device: torch.device) -> dict[str, float]:
    """Return the memory counters that this system provides, in bytes.

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
        self.samples_taken = 0

    def add(self, step: int, counters: Mapping[str, float]) -> None:
        self._samples.append((step, counters))
        self.samples_taken += 1

    def is_due(self) -> bool:
        """Return whether there are enough new samples for a test."""
        return self.samples_taken >= MIN_SAMPLES and self.samples_taken % (MIN_SAMPLES // 2) == 0

    def growing(self) -> dict[str, float]:
        """Return the counters that grow without flattening, in bytes per step, fastest first."""
        slopes = {}
        steps = [float(step) for step, _ in self._samples]
        for name in self._samples[0][1] if self._samples else ():
            series = [values[name] for _, values in self._samples]
            slope = theil_sen(steps, series)
            if slope < self._min_bytes_per_step or mann_kendall(series)[1] >= MAX_P_VALUE:
                continue
            # A cache that fills up grows only in the first half of the samples.
            half = len(steps) // 2
            late_slope = theil_sen(steps[half:], series[half:])
            if late_slope >= max(slope / 4, self._min_bytes_per_step / 2):
                slopes[name] = slope
        return dict(sorted(slopes.items(), key=lambda item: -item[1]))


# --- objects and the references between them ------------------------------------------------------

CONTAINERS = frozenset((list, dict, set, deque, OrderedDict, defaultdict))
"""Types whose length is computed without running user code."""

MAX_OBJECTS = 300_000
"""Maximum number of objects in a walk."""

CONSTANTS = (type, ModuleType, CodeType, BuiltinFunctionType, str, bytes, int, float, type(None))
"""Types of objects that a walk does not visit."""

Root = tuple[str, Any]


class Walk:
    """All objects reachable from some roots, each with the object that first referenced it.

    It keeps all of them alive, so delete it soon.

    Args:
        roots: Pairs of a name and an object.
        excluded: An object that is not visited.
        excluded_types: Types whose objects are not visited, except the roots.
        limit: Maximum number of objects.
    """

    def __init__(
        self,
        roots: Sequence[Root],
        excluded: Any = None,
        excluded_types: tuple[type, ...] = CONSTANTS,
        limit: int = MAX_OBJECTS,
    ) -> None:
        self._names = {id(root): name for name, root in roots}
        self._found: dict[int, tuple[Any, int | None]] = {
            id(root): (root, None) for _, root in roots
        }
        # Skip module namespaces, which every function references.
        skipped = {id(vars(module)) for module in list(sys.modules.values()) if module is not None}
        skipped.add(id(excluded))
        queue = deque(root for _, root in roots)
        while queue and len(self._found) < limit:
            holder = queue.popleft()
            for held in _referents(holder):
                key = id(held)
                if key not in self._found and key not in skipped and not is_a(held, excluded_types):
                    self._found[key] = held, id(holder)
                    queue.append(held)

    def objects(self) -> list[Any]:
        return [obj for obj, _ in self._found.values()]

    def tensors(self) -> list[Tensor]:
        return [obj for obj in self.objects() if is_a(obj, Tensor)]

    def get(self, key: int) -> Any:
        """Return the object with this ``id``."""
        return self._found[key][0]

    def describe(self, obj: Any) -> str:
        """Return the path to an object, such as ``LitModel.layer._forward_hooks``."""
        chain = []
        key: int | None = id(obj)
        while key is not None:
            link, key = self._found[key]
            chain.append(link)
        chain.reverse()
        text, holder = self._names[id(chain[0])], chain[0]
        for held in chain[1:]:
            if held is not getattr(holder, "__dict__", None):
                text += _path_segment(holder, held)
                holder = held
        # Write submodules as attributes.
        return re.sub(r"\._(?:modules|parameters|buffers)\['(.*?)'\]", r".\1", text)


def _referents(obj: Any) -> Iterable[Any]:
    if is_a(obj, ModuleType):
        return list(vars(obj).values())
    if is_a(obj, FrameType):  # skips the frames of its callers
        return list(obj.f_locals.values())
    return gc.get_referents(obj)


def is_a(obj: Any, kinds: type | tuple[type, ...]) -> bool:
    """Return whether the type of ``obj`` is a subclass of ``kinds``.

    Unlike ``isinstance`` this does not read ``obj.__class__``, which raises for a weak proxy
    whose object is gone.
    """
    return issubclass(type(obj), kinds)


def _path_segment(holder: Any, held: Any) -> str:
    for name, value in list(getattr(holder, "__dict__", {}).items()):
        if value is held:
            return f".{name}"
    if is_a(holder, dict):
        entries = list(holder.items())
    else:
        entries = list(enumerate(holder)) if is_a(holder, (list, tuple, deque)) else []
    key = next((key for key, value in entries if value is held), None)
    return f"[{key!r}]" if is_a(key, (str, int)) else f" -> {type(held).__name__}"


def graph_size(tensor: Tensor, limit: int = 20_000) -> int:
    """Return the number of operations in the autograd graph of a tensor, up to a limit."""
    seen: set[Any] = set()
    stack = [tensor.grad_fn]
    while stack and len(seen) < limit:
        node = stack.pop()
        if node is not None and node not in seen:
            seen.add(node)
            stack.extend(next_node for next_node, _ in node.next_functions)
    return len(seen)


TENSOR_BYTES = 500
"""Size of a tensor without its storage."""

GRAPH_NODE_BYTES = 1000
"""Estimated size of an autograd node, whose saved tensors are not accessible."""


def mean_size(objects: Sequence[Any]) -> float:
    """Return the mean bytes of objects, including all that they reference.

    Modules and parameters that they reference do not count.
    """
    walk = Walk(
        [("", obj) for obj in objects],
        excluded_types=(*CONSTANTS, nn.Module, nn.Parameter),
        limit=400 * len(objects),
    )
    tensors = walk.tensors()
    total = sum(sys.getsizeof(obj, 64) for obj in walk.objects())
    total += TENSOR_BYTES * len(tensors) + storage_bytes(tensors)
    total += GRAPH_NODE_BYTES * sum(graph_size(tensor, 1000) for tensor in tensors)
    return total / len(objects)


# --- a search -------------------------------------------------------------------------------------


@dataclass
class Census:
    """The lengths of all containers by ``id``, and the operations in the longest graph."""

    step: int
    epoch: int
    lengths: dict[int, int]
    graph_nodes: int


def take_census(step: int, epoch: int, walk: Walk) -> Census:
    lengths = {id(obj): len(obj) for obj in walk.objects() if type(obj) in CONTAINERS}
    return Census(step, epoch, lengths, max(map(graph_size, walk.tensors()), default=0))


def _growth(censuses: Sequence[Census], lengths: Sequence[int]) -> float:
    """Return the growth per step; 0 unless every length exceeds the previous one."""
    if any(b <= a for a, b in itertools.pairwise(lengths)):
        return 0.0
    return (lengths[-1] - lengths[0]) / (censuses[-1].step - censuses[0].step)


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

_FOLDERS = "|".join(map(re.escape, (sysconfig.get_path("stdlib"), str(Path(__file__).parents[2]))))
_INSTALLED = re.compile(rf"^({_FOLDERS})[/\\]|[/\\](site|dist)-packages[/\\]")
"""Matches files of installed libraries, and of this one."""


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
            f"{self.kind}: {self.where} grows by {self.per_step:.3g} {self.items} per step, "
            f"{self.kb_per_step:.3g} KB per step."
        )


def user_modules() -> list[Root]:
    """Return the names and objects of the user's Python modules, with the globals of a notebook."""
    return [
        (name, module)
        for name, module in [*sys.modules.items()]
        if ((file := getattr(module, "__file__", None)) or name == "__main__")
        and not _INSTALLED.search(file or "")
    ]


def find_suspects(
    censuses: Sequence[Census], walk: Walk, min_bytes_per_step: float
) -> list[Suspect]:
    """Return at most five objects that grew between all censuses, the fastest first.

    ``walk`` belongs to the last census. Growth below ``min_bytes_per_step`` is ignored.
    """
    step = censuses[-1].step
    suspects = []
    for key in censuses[-1].lengths:
        lengths = [census.lengths.get(key, 0) for census in censuses]
        rate = _growth(censuses, lengths) if key in censuses[0].lengths else 0.0
        if rate < MIN_ITEMS_PER_STEP:
            continue
        container = walk.get(key)
        items = _newest(container)
        bytes_per_step = rate * mean_size(items)
        if bytes_per_step >= min_bytes_per_step / 2:
            with_graph = any(tensor.grad_fn is not None for tensor in tensors_of(items))
            kind: Kind = "graph" if with_graph else "container"
            where, item_type = walk.describe(container), type(items[-1]).__name__
            suspects.append(Suspect(kind, where, item_type, rate, bytes_per_step / 1024, step))
    rate = _growth(censuses, [census.graph_nodes for census in censuses])
    if rate >= MIN_ITEMS_PER_STEP:
        tensor = max(walk.tensors(), key=graph_size)
        items_text = f"operations (now {graph_size(tensor):,})"
        kb_per_step = rate * GRAPH_NODE_BYTES / 1024
        where = walk.describe(tensor)
        suspects.append(Suspect("graph", where, items_text, rate, kb_per_step, step))
    largest = max((suspect.kb_per_step for suspect in suspects), default=0.0)
    relevant = [suspect for suspect in suspects if suspect.kb_per_step >= 0.1 * largest]
    return sorted(relevant, key=lambda suspect: -suspect.kb_per_step)[:MAX_SUSPECTS]


def _newest(container: Any) -> list[Any]:
    """Return the newest items of a container, or any items of a set."""
    items = container.values() if is_a(container, dict) else container
    return list(items)[-MEASURED_ITEMS:]
