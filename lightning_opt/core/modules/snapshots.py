"""Snapshots of a module's state by name, to find the state that each training step changes."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from lightning_opt.core.modules.preserve import (
    MAX_ATTRIBUTE_BYTES,
    MAX_DEPTH,
    MAX_SEARCHED_ENTRIES,
)
from lightning_opt.core.modules.state_kinds import INTERNALS, has_user_state, kind_of

Snapshot = dict[str, Any]

ROUNDING = 1e-6
"""A change by less than this share of a value counts as rounding."""


def snapshot(module: nn.Module, excluded: type[nn.Module]) -> Snapshot:
    """Copy the state that ``StepState`` covers, except random numbers and parameters.

    Submodules of the type ``excluded`` are skipped.
    """
    visited: set[int] = set()
    return {
        name: value
        for path, owner in module.named_modules()
        if not isinstance(owner, excluded)
        for key, entry in _state_of(owner)
        for name, value in _values(f"{path}.{key}" if path else key, entry, visited, 1)
    }


def _state_of(owner: nn.Module) -> Iterator[tuple[str, Any]]:
    yield from owner._buffers.items()
    if has_user_state(type(owner)):
        for name, value in vars(owner).items():
            if name not in INTERNALS and "_hooks" not in name:
                yield name, value


def _values(name: str, value: Any, visited: set[int], depth: int) -> Iterator[tuple[str, Any]]:
    kind = kind_of(type(value))  # type: ignore[arg-type]
    if kind == "plain":
        yield name, value
    elif kind == "tensor":
        if value.layout is torch.strided and value.nbytes <= MAX_ATTRIBUTE_BYTES:
            yield name, value.detach().clone()
    elif kind == "array":
        if value.dtype.kind in "biuf" and value.nbytes <= MAX_ATTRIBUTE_BYTES:
            yield name, torch.tensor(value)
    elif kind in ("container", "tuple", "object") and id(value) not in visited:
        visited.add(id(value))
        entries = getattr(value, "__dict__", {})
        if kind != "object":
            yield f"len({name})", len(value)
            entries = value if isinstance(value, dict) else dict(enumerate(value))
        if len(entries) <= MAX_SEARCHED_ENTRIES and depth < MAX_DEPTH:
            for key, entry in entries.items():
                yield from _values(f"{name}.{key}", entry, visited, depth + 1)


def advanced(once: Snapshot, twice: Snapshot, parts: Snapshot) -> list[str]:
    """Return the names of values that change with each step, rather than with each sample.

    Args:
        once: The snapshot after one step on some samples.
        twice: The snapshot after another step on the same samples.
        parts: The snapshot after steps on parts of these samples, instead of one step.
    """
    names = []
    for name in once.keys() & twice.keys() & parts.keys():
        change = _distance(once[name], twice[name])
        difference = _distance(once[name], parts[name])
        if change > ROUNDING * _size(once[name]) and difference >= 0.05 * change:
            names.append(name)
    return names


def _distance(value: Any, other: Any) -> float:
    if not (_is_number(value) and _is_number(other)):
        return 0.0 if type(value) is type(other) and value == other else math.inf
    if not (isinstance(value, Tensor) or isinstance(other, Tensor)):
        return float(abs(value - other))
    a, b = torch.as_tensor(value), torch.as_tensor(other)
    return float((a.double() - b.double()).norm()) if a.shape == b.shape else math.inf


def _size(value: Any) -> float:
    if not _is_number(value):
        return 0.0
    return float(value.double().norm() if isinstance(value, Tensor) else abs(value))


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float, Tensor)) and not isinstance(value, bool)
