"""Checks of constructor arguments. Each error names the given value and the allowed ones."""

from __future__ import annotations

import difflib
import inspect
import math
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeVar

Choice = TypeVar("Choice")


def check_positive(name: str, value: float) -> float:
    if not (is_number(value) and math.isfinite(value) and value > 0):
        raise ValueError(f"{name} must be a finite number above 0, got {value!r}.")
    return value


def check_fraction(name: str, value: float) -> float:
    if not (is_number(value) and 0 <= value < 1):
        raise ValueError(f"{name} must be a number of at least 0 and below 1, got {value!r}.")
    return value


def check_share(name: str, value: float) -> float:
    if not (is_number(value) and 0 < value <= 1):
        raise ValueError(f"{name} must be above 0 and at most 1, got {value!r}.")
    return value


def check_between(name: str, value: float, low: float, high: float) -> float:
    if not (is_number(value) and low <= value <= high):
        raise ValueError(f"{name} must be a number from {low} to {high}, got {value!r}.")
    return value


def check_at_least(name: str, value: int, lowest: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < lowest:
        raise ValueError(f"{name} must be a whole number of at least {lowest}, got {value!r}.")
    return value


def check_one_of(name: str, value: Choice, allowed: Sequence[Choice]) -> Choice:
    if value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, allowed))}, got {value!r}.")
    return value


def is_number(value: Any) -> bool:
    """Return whether ``value`` is an int or a float, and not a bool."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def did_you_mean(name: object, known: Iterable[str]) -> str:
    """Return ``"; did you mean '...'?"`` with the closest known name, or ``"."`` without one."""
    matches = difflib.get_close_matches(str(name), list(known), n=1)
    return f"; did you mean {matches[0]!r}?" if matches else "."


def changed_arguments(part: object, resolved: Mapping[str, Any] = MappingProxyType({})) -> str:
    """Return the constructor's arguments that differ from their defaults, as ``name=value, ...``.

    Values are read from attributes of the same name, if they exist.

    Args:
        part: The object.
        resolved: By argument, the value that replaces a default of None.
    """
    found = []
    for name, parameter in inspect.signature(type(part)).parameters.items():
        schedule = getattr(part, "_schedule", None)  # has `every_n_steps`
        value = getattr(part, name, getattr(schedule, name, parameter.default))
        is_plain = isinstance(value, (bool, int, float, str))
        usual = parameter.default, resolved.get(name)
        if is_plain and repr(value) not in map(repr, usual):  # `repr`, because 1 differs from 1.0
            found.append(f"{name}={value!r}")
    return ", ".join(found)
