"""Trainer arguments as plain values: how they are joined, compared, and made into objects."""

from __future__ import annotations

import functools
import hashlib
import inspect
import json
from collections.abc import Iterable, Mapping
from typing import Any

from lightning_opt.worker.recipes import Settings, make

LISTS = ("callbacks", "plugins")
"""Arguments that add up; of any other the last one counts."""


class Joined:
    """A function without arguments that returns parts of Trainer arguments, joined.

    Args:
        parts: What is joined, in this order. Functions are called each time.
    """

    def __init__(self, parts: Iterable[Settings]) -> None:
        self.parts = list(parts)

    def __call__(self) -> dict[str, Any]:
        """Return the arguments, each time anew."""
        return join(map(plain, self.parts))


def join(parts: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return Trainer arguments with lists added up and other values replaced by later ones."""
    joined: dict[str, Any] = {}
    for part in parts:
        for name, value in part.items():
            if name in LISTS:
                value = [*joined.get(name, []), *listed(value)]
            joined[name] = value
    return joined


def listed(value: Any) -> list[Any]:
    """Return what may be one thing, a list of things, or None, as a list."""
    if value is None:
        return []
    return list(value) if isinstance(value, (list, tuple)) else [value]


def plain(settings: Settings) -> Mapping[str, Any]:
    """Return the arguments themselves; what a function or its path returns."""
    found = settings if isinstance(settings, Mapping) else make("settings", settings)
    if not isinstance(found, Mapping):
        raise TypeError(
            f"settings must be Trainer arguments or a function that returns them, got {found!r}."
        )
    return found


def classes(settings: Mapping[str, Any]) -> set[str]:
    """Return the names of the classes of all callbacks and plugins."""
    found = [item for name in LISTS for item in listed(settings.get(name))]
    return {
        str(item["class_path"]).rpartition(".")[2]
        if isinstance(item, Mapping)
        else type(item).__name__
        for item in found
        if not isinstance(item, str)
    }


def clash(one: Settings, other: Settings) -> bool:
    """Return whether two parts give an argument other values, or both a callback of a class."""
    first, second = plain(one), plain(other)
    shared = first.keys() & second.keys() - set(LISTS)
    return any(first[name] != second[name] for name in shared) or bool(
        classes(first) & classes(second)
    )


def is_written(value: Any) -> bool:
    """Return whether a value can be written into a configuration file."""
    if isinstance(value, Mapping):
        return all(isinstance(key, str) and is_written(item) for key, item in value.items())
    if isinstance(value, (list, tuple)):
        return all(map(is_written, value))
    return value is None or isinstance(value, (bool, int, float, str))


def fingerprint(value: Any) -> str:
    """Return a short name of a value that stays the same from process to process.

    Functions and classes count by name and source; objects by their class and attributes, as far
    as these are plain.
    """
    text = json.dumps(_described(value), sort_keys=True, default=repr)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _described(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _described(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_described(item) for item in value]
    if is_written(value):
        return value
    if isinstance(value, functools.partial):
        return [_described(value.func), _described(value.args), _described(value.keywords)]
    named = value if hasattr(value, "__qualname__") else type(value)
    try:
        source = inspect.getsource(named)
    except (OSError, TypeError):
        source = ""
    state = {} if named is value else getattr(value, "__dict__", {})
    attributes = {key: item for key, item in state.items() if is_written(item)}
    return [f"{named.__module__}.{named.__qualname__}", source, attributes]
