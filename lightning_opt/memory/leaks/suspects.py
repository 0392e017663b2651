"""Describe suspects: containers and graphs that grew between all counts, and their holders.

A suspect has a kind, the path of its holder, the line of source that fills it, and advice.
"""

from __future__ import annotations

import gc
import inspect
import linecache
import re
import sysconfig
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FunctionType, MethodType
from typing import Any, Literal

from torch import Tensor

from lightning_opt.memory.leaks.growth import (
    Census,
    graph_growth,
    growing_containers,
    longest_graph,
)
from lightning_opt.memory.object_graph import (
    Root,
    Walk,
    deep_size,
    describe,
    graph_size,
    is_a,
    owners,
    referrer_chain,
)

Kind = Literal["graph", "hook", "container"]

ADVICE: dict[Kind, str] = {
    "graph": "detach() it, or keep item(): every loss that is kept keeps its graph and activations",
    "hook": "keep the handle that registering returns, and remove() it",
    "container": "clear it, bound it, or keep numbers on the host; a metric: reset() it, or log "
    "the metric itself, which does that; exceptions: keep str(error), because a traceback holds "
    "the local variables of every frame",
}

ALWAYS_WRONG: frozenset[Kind] = frozenset(("graph", "hook"))
"""Kinds that no training grows on purpose, not even until the end of an epoch."""

PER_STEP = 0.02
"""Items per step below which a container is no leak: one in fifty steps."""

MOST = 5
"""Maximum number of suspects of one search."""

NEWEST = 3
"""Number of newest items of a container whose size is measured."""

_LIBRARIES = tuple(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib"))


@dataclass(frozen=True)
class Suspect:
    """A probable leak.

    Attributes:
        kind: ``"graph"``, ``"hook"`` or ``"container"``.
        where: The growing object, as an expression from the module or a Python module down.
        line: ``file:line`` that fills it, or None.
        what: Type of the items.
        per_step: Items per step.
        kb_per_step: Estimated kilobytes per step.
        step: The step at which it was found.
    """

    kind: Kind
    where: str
    line: str | None
    what: str
    per_step: float
    kb_per_step: float
    step: int

    @property
    def advice(self) -> str:
        """What to do about it."""
        return ADVICE[self.kind]

    def __str__(self) -> str:
        place = f" ({self.line})" if self.line else ""
        return (
            f"{self.kind}: {self.where}{place} grows by {self.per_step:.3g} {self.what} a step, "
            f"{self.kb_per_step:.3g} KB a step."
        )


def find_suspects(
    counts: Sequence[Census], roots: Sequence[Root], min_rate: float, searcher: Any
) -> list[Suspect]:
    """Return at most five objects that grew between all counts, the fastest first.

    Args:
        counts: The oldest first.
        roots: Named objects from which paths start.
        min_rate: Bytes per step below which growth does not matter.
        searcher: The caller; objects that it holds are ignored.
    """
    walk = Walk(roots)
    suspects = _container_suspects(counts, walk, min_rate, searcher)
    rate = graph_growth(counts)
    tensor = longest_graph() if rate >= PER_STEP else None
    if tensor is not None:
        chain = walk.path(tensor) or referrer_chain(tensor, [walk.found])
        suspects.append(_graph_suspect(chain, walk.name(chain[0]), rate, counts[-1].step))
    largest = max((s.kb_per_step for s in suspects), default=0.0)
    relevant = [s for s in suspects if s.kb_per_step >= 0.1 * largest]
    return sorted(relevant, key=lambda suspect: -suspect.kb_per_step)[:MOST]


def _container_suspects(
    counts: Sequence[Census], walk: Walk, min_rate: float, searcher: Any
) -> list[Suspect]:
    rates = growing_containers(counts, PER_STEP)
    things = {key: walk.found[key][0] for key in rates if key in walk.found}
    if len(things) < len(rates):
        things |= {id(thing): thing for thing in gc.get_objects() if id(thing) in rates}
    own = {id(held) for held in vars(searcher).values()} | {id(vars(searcher)), id(walk.found)}
    sizes = {key: _item_size(thing) for key, thing in things.items() if key not in own}
    heavy = sorted(
        (key for key in sizes if rates[key] * sizes[key] >= min_rate / 2),
        key=lambda key: -rates[key] * sizes[key],
    )
    suspects = []
    for key in heavy[:MOST]:
        chain = walk.path(things[key]) or referrer_chain(things[key], [things, walk.found])
        if not any(item is searcher for item in chain):
            where = describe(chain, walk.name(chain[0]))
            kb_per_step = rates[key] * sizes[key] / 1024
            suspects.append(_container_suspect(chain, where, rates[key], kb_per_step, counts))
    return suspects


def _container_suspect(
    chain: Sequence[Any], where: str, rate: float, kb_per_step: float, counts: Sequence[Census]
) -> Suspect:
    container = chain[-1]
    items = [value[1] if type(value) is tuple and is_a(container, dict) else value
             for value in _newest(container)]  # fmt: skip
    kind: Kind = "container"
    line = None
    if "_hooks" in where:
        kind, line = "hook", _line_of_function(items)
    elif any(tensor.grad_fn is not None for item in items for tensor in _tensors(item)):
        kind = "graph"
    what = type(items[-1]).__name__ if items else "items"
    line = line or _source_line(owners(chain))
    return Suspect(kind, where, line, what, rate, kb_per_step, counts[-1].step)


def _graph_suspect(chain: Sequence[Any], root: str, rate: float, step: int) -> Suspect:
    tensor = chain[-1]
    node = tensor.grad_fn.name() if tensor.grad_fn is not None else "?"
    what = f"operations (now {graph_size(tensor):,}, the last of them {node})"
    where, line = describe(chain, root), _source_line(owners(chain))
    return Suspect("graph", where, line, what, rate, rate, step)


def _item_size(container: Any) -> float:
    """Return the mean size of the container's newest items in bytes."""
    items = _newest(container)
    return deep_size(items, limit=400 * max(1, len(items))) / len(items) if items else 0.0


def _newest(container: Any) -> list[Any]:
    """Return the newest items of a container, or any items of an unordered one."""
    values: Any = list(container.items()) if is_a(container, Mapping) else list(container)
    return list(values[-NEWEST:])


def _source_line(holders: Sequence[tuple[Any, str]]) -> str | None:
    """Return the line that appends to, adds to or assigns one of the attributes.

    Args:
        holders: Objects and attribute names, the nearest first. A line of the user's code is
            preferred to one in a library, even if it is further away.
    """
    lines = [line for owner, name in holders if (line := _line_of(owner, name)) is not None]
    own = [line for line in lines if not line[0].startswith(_LIBRARIES)]
    return next((f"{_short(file)}:{number}" for file, number in [*own, *lines]), None)


def _line_of(owner: Any, attribute: str) -> tuple[str, int] | None:
    fills = re.compile(
        rf"\b{re.escape(attribute)}(\[[^\]]*\])*\s*"
        r"(\.(append|appendleft|extend|add|put|put_nowait|update|setdefault|insert)\(|\[.*\]\s*=|\+=)"
    )
    sets = re.compile(rf"\b{re.escape(attribute)}\b[^=(]*=(?!=)")
    adds = re.compile(rf"{sets.pattern}.*\b{re.escape(attribute)}\b")
    for pattern in (fills, adds, sets):
        for file in _files_of(owner):
            for number, text in enumerate(linecache.getlines(file), 1):
                if pattern.search(text):
                    return file, number
    return None


def _files_of(owner: Any) -> list[str]:
    if is_a(owner, FunctionType):
        return [owner.__code__.co_filename]
    files = []
    for kind in [owner] if inspect.ismodule(owner) else type(owner).__mro__:
        try:
            file = inspect.getsourcefile(kind)
        except (OSError, TypeError):
            continue
        base_class = file and ("lightning/pytorch/core" in file or "nn/modules/module.py" in file)
        if file and not base_class:
            files.append(file)
    return list(dict.fromkeys(files))


def _short(file: str) -> str:
    return str(Path(*Path(file).parts[-2:]))


def _tensors(item: Any, depth: int = 2) -> list[Tensor]:
    if is_a(item, Tensor):
        return [item]
    if depth and is_a(item, (list, tuple, dict)):
        parts = list(item.values()) if is_a(item, dict) else item
        return [tensor for part in parts[:20] for tensor in _tensors(part, depth - 1)]
    return []


def _line_of_function(items: Sequence[Any]) -> str | None:
    for item in items:
        function = item.__func__ if is_a(item, MethodType) else item
        code = getattr(function, "__code__", None)
        if code is not None:
            return f"{_short(code.co_filename)}:{code.co_firstlineno}"
    return None
