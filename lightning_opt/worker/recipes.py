"""Factories: functions or import paths that create the model, the data and Trainer arguments."""

from __future__ import annotations

import importlib
import importlib.util
import operator
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, TypeAlias
from zlib import crc32

from lightning_opt.trainer.lightning import DEFAULT

Factory: TypeAlias = Callable[[], Any] | str
"""A callable without arguments, ``"package.module:attribute"`` or ``"path/to/file.py:attribute"``.
"""

Settings: TypeAlias = Mapping[str, Any] | Callable[[], Mapping[str, Any]] | str
"""Arguments of a Trainer, or a :data:`Factory` that returns them."""

SEARCHED_MODULES = ("callbacks", "strategies", "plugins", "loggers", "profilers")
"""Modules of Lightning that are searched for a ``class_path`` without a module."""


def check_factory(name: str, given: Any) -> Any:
    """Return ``given`` if it is a factory, else raise. :func:`make` resolves import paths later."""
    import torch

    if isinstance(given, str):
        if not all(given.rpartition(":")[::2]):
            raise ValueError(
                f"{name} as a string must be 'package.module:attribute' or "
                f"'path/to/file.py:attribute', got {given!r}."
            )
    elif isinstance(given, torch.nn.Module) or not callable(given):
        raise TypeError(
            f"{name} must be a function without arguments that makes it, or its import path such "
            f"as 'package.module:attribute', because each process makes its own. Got an object of "
            f"type {type(given).__name__}: write a function that returns it."
        )
    return given


def check_settings(name: str, given: Any) -> Any:
    """Return Trainer settings as a dict or a factory. Raises like :func:`check_factory`."""
    if given is None:
        return {}
    return dict(given) if isinstance(given, Mapping) else check_factory(name, given)


def as_list(given: Any) -> list[Any]:
    """Return a Trainer argument's callbacks or plugins as a list."""
    if given is None:
        return []
    return [given] if isinstance(given, str) or not isinstance(given, Sequence) else list(given)


def make(name: str, factory: Factory) -> Any:
    """Import the factory, if it is a path, and call it."""
    function = import_attribute(factory) if isinstance(factory, str) else factory
    return check_factory(name, function)()


def as_mapping(given: Settings) -> Mapping[str, Any]:
    """Return Trainer arguments as a mapping. A factory is called.

    Raises:
        TypeError: If a factory does not return a mapping.
    """
    settings = given if isinstance(given, Mapping) else make("settings", given)
    if not isinstance(settings, Mapping):
        raise TypeError(
            "settings must be a dict of Trainer arguments or a function that returns one, and it "
            f"returned {type(settings).__name__}."
        )
    return settings


def import_attribute(path: str) -> Any:
    """Import the object at ``"package.module:attribute"`` or ``"path/to/file.py:attribute"``."""
    source, _, attribute = path.rpartition(":")
    module = _module_of_file(source) if source.endswith(".py") else importlib.import_module(source)
    try:
        return operator.attrgetter(attribute)(module)
    except AttributeError as error:
        raise ImportError(f"There is no {attribute!r} in {source!r} (from {path!r}).") from error


def _module_of_file(path: str) -> ModuleType:
    """Import a file once, with its stem as the module's name if that can be imported."""
    file = Path(path).resolve()
    unique = re.sub(r"\W", "_", f"_{file.stem}_{crc32(bytes(file)):x}")
    name = file.stem if file.stem.isidentifier() else unique
    loaded = sys.modules.get(name)
    if loaded is not None and Path(getattr(loaded, "__file__", None) or "").resolve() != file:
        loaded = sys.modules.get(name := unique)  # another module has the name
    if loaded is not None:
        return loaded
    if not file.exists():
        raise ImportError(f"There is no file {str(path)!r}.")
    if str(file.parent) not in sys.path:
        sys.path.insert(0, str(file.parent))  # the file's imports then work as in a script
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def instantiate(value: Any, package: ModuleType = DEFAULT) -> Any:
    """Create objects from ``{"class_path": ..., "init_args": {...}}``, in lists and dicts too.

    Unlike LightningCLI, it converts no types.
    """
    if isinstance(value, Mapping):
        items = {key: instantiate(item, package) for key, item in value.items()}
        if "class_path" not in items or not items.keys() <= {"class_path", "init_args"}:
            return items
        return class_named(items["class_path"], package)(**(items.get("init_args") or {}))
    if isinstance(value, list):
        return [instantiate(item, package) for item in value]
    return value


def class_named(path: str, package: ModuleType = DEFAULT) -> Any:
    """Import the class of a ``class_path``."""
    module, _, name = path.rpartition(".")
    searched = ("lightning_opt", *(f"{package.__name__}.{part}" for part in SEARCHED_MODULES))
    modules: Iterable[str] = (module,) if module else searched
    for module_name in modules:
        result = getattr(importlib.import_module(module_name), name, None)
        if result is not None:
            return result
    raise ImportError(f"There is no class {path!r}; looked in {', '.join(modules)}.")
