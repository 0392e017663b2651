"""Factories: functions or import paths that create the model, the data and Trainer arguments."""

from __future__ import annotations

import importlib
import importlib.util
import operator
import re
import sys
from argparse import ArgumentError
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
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

ENTRY = {"class_path", "init_args", "dict_kwargs"}
"""Keys of an object in a LightningCLI configuration. ``dict_kwargs`` are for ``**kwargs``."""


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


def class_names(given: Any) -> list[str]:
    """Return the names of an object's class and bases, or of a configuration entry's class."""
    if isinstance(given, Mapping):
        return [str(given["class_path"]).rpartition(".")[2]]
    return [base.__name__ for base in type(given).__mro__]


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
    module = import_source(source)
    try:
        return operator.attrgetter(attribute)(module)
    except AttributeError as error:
        raise ImportError(f"There is no {attribute!r} in {source!r} (from {path!r}).") from error


def import_source(path: str) -> ModuleType:
    """Import a module by name, or a file once.

    A file's module is named after its stem, unless another module has that name.
    """
    if not path.endswith(".py"):
        return importlib.import_module(path)
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
    """Create objects from ``{"class_path": ..., "init_args": {...}}``, in lists and dicts too."""
    if isinstance(value, Mapping):
        items = {key: instantiate(item, package) for key, item in value.items()}
        if "class_path" not in items or not items.keys() <= ENTRY:
            return items
        kind = class_named(items["class_path"], package)
        arguments, keywords = items.get("init_args") or {}, items.get("dict_kwargs") or {}
        has_dicts = any(isinstance(argument, Mapping) for argument in arguments.values())
        if has_dicts and isinstance(kind, type) and importlib.util.find_spec("jsonargparse"):
            with suppress(ArgumentError):  # arguments of `**kwargs`, or a wrong annotation
                return create(kind, items)
        return kind(**arguments, **keywords)
    if isinstance(value, list):
        return [instantiate(item, package) for item in value]
    return value


def create(kind: type, entry: Mapping[str, Any]) -> Any:
    """Create an object as LightningCLI does, which converts dicts to dataclasses.

    Args:
        kind: The class.
        entry: Its entry in a configuration. The class path is ignored, as it differs by process.
    """
    from jsonargparse import ArgumentParser

    parser = ArgumentParser(exit_on_error=False)
    parser.add_subclass_arguments(kind, "made", fail_untyped=False)
    made = {**entry, "class_path": f"{kind.__module__}.{kind.__qualname__}"}
    return parser.instantiate_classes(parser.parse_object({"made": made})).made


def class_named(path: str, package: ModuleType = DEFAULT) -> Any:
    """Import the class of a ``class_path``."""
    module, _, name = path.rpartition(".")
    searched = ["lightning_opt", *(f"{package.__name__}.{part}" for part in SEARCHED_MODULES)]
    modules = [module] if module else searched
    for module_name in modules:
        result = getattr(importlib.import_module(module_name), name, None)
        if result is not None:
            return result
    raise ImportError(f"There is no class {path!r}; looked in {', '.join(modules)}.")
