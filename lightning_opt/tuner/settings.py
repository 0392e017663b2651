"""Trainer arguments as plain values: joining and comparing them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from lightning.pytorch.plugins import Precision

from lightning_opt.kernels.compiling.compile_model import CompileModel
from lightning_opt.worker.recipes import Settings, make_settings, plain

LISTS = ("callbacks", "plugins")
"""Arguments whose values are concatenated; of other arguments the last value counts."""


def join_made(parts: Sequence[Settings]) -> dict[str, Any]:
    """Return Trainer arguments joined from parts, after calling those that are functions."""
    return join(map(plain, parts))


def join(parts: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return Trainer arguments with lists concatenated and other values replaced by later ones."""
    joined: dict[str, Any] = {}
    for part in parts:
        for name, value in part.items():
            if name in LISTS:
                value = [*joined.get(name, []), *listed(value)]
            joined[name] = value
    return joined


def in_float32(settings: Settings) -> dict[str, Any]:
    """Return objects for the Trainer with eager float32; to be called in the training process."""
    if hasattr(torch.compiler, "set_stance"):  # from torch 2.6 on
        torch.compiler.set_stance("force_eager")  # for parts that the model compiles itself
    made = make_settings(settings)
    plugins = [
        plugin for plugin in listed(made.get("plugins")) if not isinstance(plugin, Precision)
    ]
    callbacks = [one for one in listed(made.get("callbacks")) if not isinstance(one, CompileModel)]
    return {**made, "precision": "32-true", "plugins": plugins, "callbacks": callbacks}


def listed(value: Any) -> list[Any]:
    if value is None:
        return []
    return list(value) if isinstance(value, (list, tuple)) else [value]


def classes(settings: Mapping[str, Any]) -> set[str]:
    found = [item for name in LISTS for item in listed(settings.get(name))]
    return {
        str(item["class_path"]).rpartition(".")[2]
        if isinstance(item, Mapping)
        else type(item).__name__
        for item in found
        if not isinstance(item, str)
    }


def clash(one: Settings, other: Settings) -> bool:
    """Return whether two parts differ in an argument, or both add a callback of one class."""
    first, second = plain(one), plain(other)
    shared = first.keys() & second.keys() - set(LISTS)
    return any(first[name] != second[name] for name in shared) or bool(
        classes(first) & classes(second)
    )


def is_written(value: Any) -> bool:
    if isinstance(value, Mapping):
        return all(isinstance(key, str) and is_written(item) for key, item in value.items())
    if isinstance(value, (list, tuple)):
        return all(map(is_written, value))
    return value is None or isinstance(value, (bool, int, float, str))
