"""From counts to suspects: what has grown each time, is large enough, whose it is, and why.

A suspect is named: the kind, the holder, the line of source, and what to do about it.
"""

from __future__ import annotations

import gc
import inspect
import linecache
import re
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FunctionType, MethodType
from typing import Any, Literal

from torch import Tensor

from lightning_opt.memory.leaks.census import (
    Census,
    Garbage,
    growing_containers,
    growing_graph,
    item_size,
    longest_graph,
    newest,
    steady_garbage,
)
from lightning_opt.memory.object_graph import (
    Root,
    Walk,
    backwards,
    describe,
    graph_size,
    is_a,
    owners,
)

Kind = Literal["graph", "hook", "exception", "container", "cycle"]

ADVICE: dict[Kind, str] = {
    "graph": "detach() it, or keep item(): every loss that is kept keeps its graph and activations",
    "hook": "keep the handle that registering returns, and remove() it",
    "exception": "keep str(error) instead, or error.with_traceback(None): a traceback holds the "
    "local variables of every frame",
    "container": "clear it, bound it, or keep numbers on the host; a metric: reset() it, or log "
    "the metric itself, which does that",
    "cycle": "break the cycle with a weakref, or collect more often: "
    "lightning_opt.GarbageCollection",
}

WRONG_AT_ONCE: frozenset[Kind] = frozenset(("graph", "hook", "exception", "cycle"))
"""What no training grows on purpose, not even until the end of an epoch."""

PER_STEP = 0.02
"""Items a step below which a container is no leak: one in fifty steps."""

MOST = 5


@dataclass(frozen=True)
class Suspect:
    """What is taken for a leak.

    Attributes:
        kind: What it is.
        where: Who holds it, as an expression from the module or a module of Python down.
        line: ``file:line`` where it is filled, or None.
        what: What it is made of.
        per_step: Items a step.
        kb_per_step: Kilobytes a step, as far as they can be counted.
        step: When it was found.
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
    """Return what has grown from count to count, the fastest first, five at most.

    Args:
        counts: The oldest first.
        roots: Where to look for names.
        min_rate: Bytes a step that are too few to matter.
        searcher: Who asks; what it holds itself does not count.
    """
    step = counts[-1].step
    walk = Walk(roots)
    suspects = _containers(counts, walk, min_rate, searcher)
    garbage = steady_garbage(counts)
    if garbage >= min_rate:
        last = counts[-1]
        suspects.append(suspect_cycle(last.garbage, garbage, last.step - counts[-2].step, step))
    rate = growing_graph(counts)
    tensor = longest_graph() if rate >= PER_STEP else None
    if tensor is not None:
        chain = walk.path(tensor) or backwards(tensor, [walk.found])
        suspects.append(suspect_graph(chain, walk.name(chain[0]), rate, step))
    largest = max((s.kb_per_step for s in suspects), default=0.0)
    worth = [s for s in suspects if s.kb_per_step >= 0.1 * largest]
    return sorted(worth, key=lambda suspect: -suspect.kb_per_step)[:MOST]


def _containers(
    counts: Sequence[Census], walk: Walk, min_rate: float, searcher: Any
) -> list[Suspect]:
    rates = growing_containers(counts, PER_STEP)
    things = {key: walk.found[key][0] for key in rates if key in walk.found}
    if len(things) < len(rates):
        things |= {id(thing): thing for thing in gc.get_objects() if id(thing) in rates}
    own = {id(held) for held in vars(searcher).values()} | {id(vars(searcher)), id(walk.found)}
    sizes = {key: item_size(thing) for key, thing in things.items() if key not in own}
    heavy = sorted(
        (key for key in sizes if rates[key] * sizes[key] >= min_rate / 2),
        key=lambda key: -rates[key] * sizes[key],
    )
    suspects = []
    for key in heavy[:MOST]:
        chain = walk.path(things[key]) or backwards(things[key], [things, walk.found])
        if any(item is searcher for item in chain):
            continue
        root, size = walk.name(chain[0]), sizes[key]
        suspects.append(suspect_container(chain, root, rates[key], size, counts[-1].step))
    return suspects


def suspect_container(
    chain: Sequence[Any], root: str, rate: float, size: float, step: int
) -> Suspect:
    """Describe a container that grows, which is the last of a chain of holders."""
    container = chain[-1]
    items = [value[1] if type(value) is tuple and is_a(container, dict) else value
             for value in newest(container)]  # fmt: skip
    where = describe(chain, root)
    kind = _kind(where, items)
    line = _line_of_hook(items) if kind == "hook" else None
    return Suspect(
        kind,
        where,
        line or source_line(owners(chain)),
        type(items[-1]).__name__ if items else "items",
        rate,
        rate * size / 1024,
        step,
    )


def suspect_graph(chain: Sequence[Any], root: str, rate: float, step: int) -> Suspect:
    """Describe a tensor whose graph gets longer, which is the last of a chain of holders."""
    tensor = chain[-1]
    node = tensor.grad_fn.name() if tensor.grad_fn is not None else "?"
    what = f"operations (now {graph_size(tensor):,}, the last of them {node})"
    where, line = describe(chain, root), source_line(owners(chain))
    return Suspect("graph", where, line, what, rate, rate, step)


def suspect_cycle(garbage: Garbage, rate: float, steps: int, step: int) -> Suspect:
    """Describe garbage in reference cycles, by the classes that are in it."""
    own = [kind for kind, _ in garbage.types.most_common() if not _is_library(kind)]
    kinds = own or [kind for kind, _ in garbage.types.most_common()]
    names = ", ".join(kind.__qualname__ for kind in kinds[:3]) or "built-in objects"
    return Suspect(
        "cycle",
        f"reference cycles of {names}",
        class_line(kinds[0]) if kinds else None,
        f"objects ({garbage.tensors} tensors among {garbage.objects:,})",
        garbage.objects / steps,
        rate / 1024,
        step,
    )


def class_line(kind: type) -> str | None:
    """Return where a class is written."""
    try:
        return f"{_short(inspect.getsourcefile(kind))}:{inspect.getsourcelines(kind)[1]}"
    except (OSError, TypeError):
        return None


def source_line(holders: Sequence[tuple[Any, str]]) -> str | None:
    """Return the line that fills what leaks: where it is appended to, added to or assigned.

    Args:
        holders: Objects and their attributes, the nearest first. A line of the user's is preferred
            to one in a library, even if it is further away.
    """
    lines = [line for owner, name in holders if (line := _line_of(owner, name)) is not None]
    own = [line for line in lines if not line[2]]
    return next((f"{_short(file)}:{number}" for file, number, _ in [*own, *lines]), None)


def _line_of(owner: Any, attribute: str) -> tuple[str, int, bool] | None:
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
                    return file, number, file.startswith(_LIBRARIES)
    return None


_LIBRARIES = tuple(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib"))


def _files_of(owner: Any) -> list[str]:
    kinds = [owner] if inspect.ismodule(owner) else type(owner).__mro__
    if is_a(owner, FunctionType):
        return [owner.__code__.co_filename]
    files = []
    for kind in kinds:
        try:
            file = inspect.getsourcefile(kind)
        except (OSError, TypeError):
            continue
        if (
            file
            and "lightning/pytorch/core" not in file
            and not file.endswith("nn/modules/module.py")
        ):
            files.append(file)
    return list(dict.fromkeys(files))


def _short(file: str | None) -> str:
    return str(Path(*Path(file).parts[-2:])) if file else "?"


def _kind(where: str, items: Sequence[Any]) -> Kind:
    if "_hooks" in where:
        return "hook"
    if any(is_a(item, BaseException) or _is_error_info(item) for item in items):
        return "exception"
    if any(tensor.grad_fn is not None for item in items for tensor in _tensors(item)):
        return "graph"
    return "container"


def _is_error_info(item: Any) -> bool:
    return is_a(item, tuple) and any(is_a(part, BaseException) for part in item)


def _tensors(item: Any, depth: int = 2) -> list[Tensor]:
    if is_a(item, Tensor):
        return [item]
    if depth and is_a(item, (list, tuple, dict)):
        parts = list(item.values()) if is_a(item, dict) else item
        return [tensor for part in parts[:20] for tensor in _tensors(part, depth - 1)]
    return []


def _line_of_hook(items: Sequence[Any]) -> str | None:
    for item in items:
        function = item.__func__ if is_a(item, MethodType) else item
        code = getattr(function, "__code__", None)
        if code is not None:
            return f"{_short(code.co_filename)}:{code.co_firstlineno}"
    return None


def _is_library(kind: type) -> bool:
    return kind.__module__.partition(".")[0] in ("torch", "collections", "functools", "weakref")
