"""Trainer arguments as plain values: how they are joined, compared, and made into objects."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from lightning.pytorch.plugins import Precision

from lightning_opt.kernels.compiling.compile_model import CompileModel
from lightning_opt.worker.recipes import Settings, make, make_settings

LISTS = ("callbacks", "plugins")
"""Arguments that add up; of any other the last one counts."""


def join_made(parts: Sequence[Settings]) -> dict[str, Any]:
    """Return Trainer arguments joined from parts, of which functions are called anew."""
    return join(map(plain, parts))


def join(parts: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return Trainer arguments with lists added up and other values replaced by later ones."""
    joined: dict[str, Any] = {}
    for part in parts:
        for name, value in part.items():
            if name in LISTS:
                value = [*joined.get(name, []), *listed(value)]
            joined[name] = value
    return joined


def in_float32(settings: Settings) -> dict[str, Any]:
    """Return Trainer arguments for eager float32, made from others; for the process that trains."""
    if hasattr(torch.compiler, "set_stance"):  # from torch 2.6 on
        torch.compiler.set_stance("force_eager")  # whatever the model compiles itself
    made = make_settings(settings)
    plugins = [
        plugin for plugin in listed(made.get("plugins")) if not isinstance(plugin, Precision)
    ]
    callbacks = [one for one in listed(made.get("callbacks")) if not isinstance(one, CompileModel)]
    return {**made, "precision": "32-true", "plugins": plugins, "callbacks": callbacks}


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
