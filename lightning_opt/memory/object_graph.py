"""Follow references between Python objects, and describe the path to an object."""

from __future__ import annotations

import functools
import gc
import itertools
import re
import sys
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from types import (
    BuiltinFunctionType,
    CellType,
    CodeType,
    FrameType,
    FunctionType,
    MethodType,
    ModuleType,
)
from typing import Any

import torch
from torch import Tensor, nn

CONTAINERS = frozenset((list, dict, set, deque, OrderedDict, defaultdict))
"""Types whose length is computed without running user code."""

MAX_OBJECTS = 300_000
"""Maximum number of objects in a walk."""

_OPAQUE = (type, ModuleType, CodeType, BuiltinFunctionType, str, bytes, int, float)

Root = tuple[str, Any]


class Walk:
    """All objects reachable from some roots, each with the object that first referenced it.

    It holds references to all of them, so delete it soon. ``roots`` are pairs of a name and an
    object.
    """

    def __init__(self, roots: Sequence[Root]) -> None:
        self._names = {id(root): name for name, root in roots}
        self._skipped = {id(vars(m)) for m in list(sys.modules.values()) if m is not None}
        self._skipped -= {id(root) for _, root in roots}
        self.found: dict[int, tuple[Any, int | None]] = {}
        queue: deque[Any] = deque()
        for _, root in roots:
            if id(root) not in self.found:
                self.found[id(root)] = (root, None)
                queue.append(root)
        while queue and len(self.found) < MAX_OBJECTS:
            thing = queue.popleft()
            for held in referents(thing):
                key = id(held)
                if key not in self.found and key not in self._skipped:
                    self.found[key] = (held, id(thing))
                    queue.append(held)

    def path(self, thing: Any) -> list[Any]:
        """Return the objects from a root to ``thing``, both included; empty if it was not found."""
        chain = []
        key: int | None = id(thing)
        while key is not None and key in self.found:
            held, key = self.found[key]
            chain.append(held)
        return chain[::-1]

    def name(self, root: Any) -> str:
        return self._names.get(id(root)) or _title(root)


def referents(thing: Any) -> list[Any]:
    """Return the objects that ``thing`` references, without classes, modules and constants."""
    if is_a(thing, FunctionType):
        held: Iterable[Any] = (*(thing.__closure__ or ()), *(thing.__defaults__ or ()))
    elif is_a(thing, FrameType):
        held = list(thing.f_locals.values())
    elif is_a(thing, Tensor):
        held = [*(getattr(thing, "_backward_hooks", None) or {}).values(), *vars(thing).values()]
    else:
        held = gc.get_referents(thing)
    return [item for item in held if not is_a(item, _OPAQUE) and item is not None]


def is_a(thing: Any, kinds: type | tuple[type, ...]) -> bool:
    """Return whether the type of ``thing`` is a subclass of ``kinds``.

    Unlike ``isinstance`` this does not read ``thing.__class__``, which raises for a weak proxy
    whose object is gone.
    """
    return issubclass(type(thing), kinds)


def describe(chain: Sequence[Any], root: str) -> str:
    """Return a chain as an expression, such as ``LitModel.layer._forward_hooks``."""
    text = root
    for index, (holder, held) in enumerate(itertools.pairwise(chain)):
        before = chain[index - 1] if index else None
        holder = _module_of(holder)
        if type(holder) is dict and before is not None and _dict_of(before) is holder:
            continue  # the attribute is in the text already
        if _dict_of(holder) is held:
            key = _key(held, chain[index + 2]) if index + 2 < len(chain) else None
            text += f".{key}" if key is not None else ".__dict__"
        else:
            text += _step(holder, held)
    # Write submodules as attributes.
    return re.sub(r"\._(?:modules|parameters|buffers)\['(.*?)'\]", r".\1", text)


def _module_of(thing: Any) -> Any:
    name = thing.get("__name__") if type(thing) is dict else None
    module = sys.modules.get(name) if isinstance(name, str) else None
    return module if module is not None and vars(module) is thing else thing


def _title(thing: Any) -> str:
    if is_a(thing, (ModuleType, type, FunctionType)):
        return str(getattr(thing, "__qualname__", None) or thing.__name__)
    if is_a(thing, functools._lru_cache_wrapper):
        return f"the cache of {thing.__wrapped__.__qualname__}"
    return type(thing).__name__


def _step(holder: Any, held: Any) -> str:
    if is_a(holder, Mapping):
        key = _key(holder, held)
        return f"[{key!r}]" if is_a(key, (str, int)) else "[...]"
    if is_a(holder, (list, tuple, deque)):
        return next((f"[{i}]" for i, item in enumerate(holder) if item is held), "[...]")
    if is_a(holder, CellType):
        return ""
    if is_a(holder, FunctionType):
        cells = dict(
            zip(map(id, holder.__closure__ or ()), holder.__code__.co_freevars, strict=False)
        )
        return f" closure {cells.get(id(held), '')}"
    if is_a(holder, MethodType):
        return ".__self__"
    name = _attribute(holder, held)
    return f".{name}" if name is not None else f" -> {type(held).__name__}"


def _attribute(holder: Any, held: Any) -> str | None:
    key = _key(_dict_of(holder) or {}, held)
    return str(key) if key is not None else None


def _dict_of(thing: Any) -> Any:
    return getattr(thing, "__dict__", None)


def _key(mapping: Mapping[Any, Any], value: Any) -> Any:
    return next((key for key, item in list(mapping.items()) if item is value), None)


def graph_size(tensor: Tensor, limit: int = 20_000) -> int:
    """Return the number of operations in the autograd graph of a tensor, up to a limit."""
    seen: set[Any] = set()
    stack = [tensor.grad_fn]
    while stack and len(seen) < limit:
        node = stack.pop()
        if node is not None and node not in seen:
            seen.add(node)
            stack.extend(following for following, _ in node.next_functions)
    return len(seen)


def deep_size(things: Iterable[Any], limit: int = 400) -> int:
    """Return the bytes of some objects and everything that they reference.

    Modules, classes and parameters do not count. A node of autograd counts as 1 KB, an estimate:
    its saved tensors are not accessible.
    """
    total = 0
    seen: set[Any] = set()
    queue = deque(things)
    while queue and len(seen) < limit:
        thing = queue.popleft()
        if id(thing) in seen or is_a(thing, (nn.Module, nn.Parameter, *_OPAQUE[:4])):
            continue
        seen.add(id(thing))
        total += _size(thing, seen)
        if is_a(thing, Tensor) and thing.grad_fn is not None:
            total += 1000 * graph_size(thing, 1000)
        queue.extend(referents(thing))
    return total


def is_dense(thing: Any) -> bool:
    return type(thing) in (Tensor, nn.Parameter) and thing.layout == torch.strided


def _size(thing: Any, seen: set[Any]) -> int:
    """Return the bytes of an object, and of its storage if that is not in ``seen``."""
    size = sys.getsizeof(thing, 64)
    if is_dense(thing):
        storage = ("storage", thing.untyped_storage().data_ptr())
        if storage not in seen:
            seen.add(storage)
            size += 500 + thing.untyped_storage().nbytes()
    return size
