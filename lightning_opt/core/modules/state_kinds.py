"""Finds the attributes of a module that a training step may change, and takes snapshots of them."""

from __future__ import annotations

import functools
import math
import random
import sys
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

MAX_SEARCHED_ENTRIES = 100
"""Containers with more entries are not searched for inner containers, tensors and generators."""

MAX_DEPTH = 5
"""Maximum depth at which nested containers and objects are searched."""

MAX_ATTRIBUTE_BYTES = 64 * 2**20
"""Larger tensor attributes, such as data sets, are not copied on the first batch. All buffers are
copied then."""

PLAIN = (bool, int, float, complex, str, bytes, type(None), list, dict, set, tuple, deque)
"""Types of attributes that are restored: counters, flags, collected outputs."""

_CONTAINERS = (list, dict, set, deque)
GENERATORS = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)
_STANDARD = sys.stdlib_module_names - {"__main__"}
_FRAMEWORKS = {"lightning", "lightning_opt", "pytorch_lightning", "torch"}
INTERNALS = frozenset(("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"))


def has_user_state(kind: type) -> bool:
    return any(not base.__module__.startswith("torch.") for base in kind.__mro__[:-1])


@functools.cache
def kind_of(kind: Any) -> str:
    if issubclass(kind, GENERATORS):
        return "generator"
    if issubclass(kind, Tensor):
        return "tensor"
    if issubclass(kind, np.ndarray):
        return "array"
    if issubclass(kind, _CONTAINERS) and _is_refillable(kind):
        return "container"
    if issubclass(kind, PLAIN):
        return "tuple" if issubclass(kind, tuple) else "plain"
    is_environment = hasattr(kind, "step") and hasattr(kind, "reset")  # reinforcement learning
    return "object" if is_environment or _is_user_class(kind) else ""


def _is_user_class(kind: type) -> bool:
    """Return whether a class and its bases are user-defined, such as a moving average."""
    names = {base.__module__.partition(".")[0] for base in kind.__mro__[:-1]}
    if names & _FRAMEWORKS or kind.__module__ in _STANDARD:
        return False
    return "site-packages" not in str(getattr(sys.modules.get(kind.__module__), "__file__", ""))


def _is_refillable(kind: Any) -> bool:
    """Return whether a container can be changed by Python's own methods, as a frozen one cannot."""
    builtin = [base for base in kind.__mro__ if base.__module__ in ("builtins", "collections")]
    return all(
        any(getattr(kind, name, None) is getattr(base, name, None) for base in builtin)
        for name in ("__setitem__", "clear", "extend", "update")
    )


def state_attributes(attributes: Mapping[str, Any]) -> Iterator[tuple[str, Any, str]]:
    """Yield name, value and kind of the attributes that are state."""
    for name, value in attributes.items():
        kind = kind_of(type(value))  # type: ignore[arg-type]
        if kind and name not in INTERNALS and "_hooks" not in name:
            yield name, value, kind


def searched_entries(owner: Any) -> Iterator[tuple[Any, Any, str]]:
    """Yield key, value and kind of a container's entries, or of an object's attributes.

    It yields nothing if there are too many.
    """
    is_container = isinstance(owner, (*_CONTAINERS, tuple))
    entries = owner if is_container else getattr(owner, "__dict__", {})
    if len(entries) <= MAX_SEARCHED_ENTRIES:
        for key, value in entries.items() if isinstance(entries, dict) else enumerate(entries):
            yield key, value, kind_of(type(value))  # type: ignore[arg-type]


def hidden_modules(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield name and module of the unregistered modules in attributes.

    A teacher is often kept in a list or in a plain object, so that checkpoints exclude it.
    """
    for path, owner in module.named_modules():
        for key, value in vars(owner).items() if has_user_state(type(owner)) else ():
            if key not in INTERNALS:
                yield from _modules_in(f"{path}.{key}".lstrip("."), value)


def _modules_in(name: str, value: Any, depth: int = 2) -> Iterator[tuple[str, nn.Module]]:
    if isinstance(value, nn.Module):
        yield name, value
    elif depth and kind_of(type(value)) in ("container", "tuple", "object"):  # type: ignore[arg-type]
        for key, entry, _ in searched_entries(value):
            yield from _modules_in(f"{name}.{key}", entry, depth - 1)


# --- snapshots by name ----------------------------------------------------------------------------

Snapshot = dict[str, Any]

ROUNDING = 1e-6
"""A change by less than this share of a value counts as rounding."""


def snapshot(module: nn.Module, excluded: type[nn.Module]) -> Snapshot:
    """Copy the numbers of the state that ``StepState`` covers, except random ones and parameters.

    Submodules of the type ``excluded`` are skipped.
    """
    visited: set[int] = set()
    return {
        name: value
        for path, owner in module.named_modules()
        if not isinstance(owner, excluded)
        for key, entry, kind in _state_of(owner)
        for name, value in _values(f"{path}.{key}".lstrip("."), entry, kind, visited, 1)
    }


def _state_of(owner: nn.Module) -> Iterator[tuple[str, Any, str]]:
    for name, value in owner._buffers.items():
        yield name, value, kind_of(type(value))  # type: ignore[arg-type]
    if has_user_state(type(owner)):
        yield from state_attributes(vars(owner))


def _values(
    name: str, value: Any, kind: str, visited: set[int], depth: int
) -> Iterator[tuple[str, Any]]:
    if isinstance(value, (int, float)):
        yield name, float(value)
    elif kind == "tensor":
        if value.layout is torch.strided and value.nbytes <= MAX_ATTRIBUTE_BYTES:
            yield name, value.detach().clone()
    elif kind == "array":
        if value.dtype.kind in "biuf" and value.nbytes <= MAX_ATTRIBUTE_BYTES:
            yield name, torch.tensor(value)
    elif kind in ("container", "tuple", "object") and id(value) not in visited:
        visited.add(id(value))
        if kind != "object":
            yield f"len({name})", len(value)
        if depth < MAX_DEPTH:
            for key, entry, inner in searched_entries(value):
                yield from _values(f"{name}.{key}", entry, inner, visited, depth + 1)


def advanced(once: Snapshot, twice: Snapshot, parts: Snapshot) -> list[str]:
    """Return the names of values that change once per step, and not once per sample.

    Args:
        once: The snapshot after one step on some samples.
        twice: The snapshot after another step on the same samples.
        parts: The snapshot after steps on parts of these samples, instead of one step.
    """
    names = []
    for name in once.keys() & twice.keys() & parts.keys():
        value = once[name]
        change, difference = _distance(value, twice[name]), _distance(value, parts[name])
        if change > ROUNDING * _distance(value, 0 * value) and difference >= 0.05 * change:
            names.append(name)
    return names


def _distance(value: float | Tensor, other: float | Tensor) -> float:
    if not (isinstance(value, Tensor) or isinstance(other, Tensor)):
        return float(abs(value - other))
    a, b = torch.as_tensor(value).double(), torch.as_tensor(other).double()
    return float((a - b).norm()) if a.shape == b.shape else math.inf
