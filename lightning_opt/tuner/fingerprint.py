"""A hash of an object and of the code behind it, by which a journal recognizes its search."""

from __future__ import annotations

import hashlib
import pickle
import sys
import sysconfig
import types
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

INSTALLED = (sysconfig.get_paths()["stdlib"], str(Path(__file__).parents[1]))
"""Folders whose code counts by its version, beside every ``site-packages``."""


def fingerprint(value: Any) -> str:
    """Return a hash of ``value``: types, attributes, and the user's code.

    Code is covered by the source files of the modules of all functions and classes in ``value``,
    and of the modules that these import at their top level, except installed packages.

    Raises:
        ValueError: If an attribute cannot be pickled.
    """
    hashed = hashlib.blake2b(digest_size=8)
    hasher = _Hasher(types.SimpleNamespace(write=hashed.update), protocol=5)
    try:
        hasher.dump(value)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ValueError(
            f"There is no fingerprint of this {type(value).__qualname__}, because an attribute "
            f"cannot be pickled: {error}."
        ) from error
    for file in sorted(_source_files(hasher.modules)):
        hashed.update(Path(file).read_bytes())
    return hashed.hexdigest()


class _Hasher(pickle.Pickler):
    """Pickles into a hash. Functions and classes are described, and their modules collected."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.modules: set[str] = set()

    def reducer_override(self, value: Any) -> Any:
        if value is _described:
            return NotImplemented
        if isinstance(value, (types.FunctionType, type)):
            self.modules.add(value.__module__)
            name = value.__module__, value.__qualname__
            if isinstance(value, type):
                return _described, name
            cells = [cell.cell_contents for cell in value.__closure__ or ()]
            defaults = value.__defaults__, value.__kwdefaults__
            return _described, (name, _code(value.__code__), defaults, cells)
        if isinstance(value, torch.Tensor):
            return _described, (str(value.dtype), value.detach().cpu().tolist())
        return NotImplemented


def _described(*parts: Any) -> None:
    """Take the place of a described object in the pickle."""


def _code(code: types.CodeType) -> tuple[Any, ...]:
    constants = [
        _code(one) if isinstance(one, types.CodeType) else repr(one) for one in code.co_consts
    ]
    return code.co_code, constants, code.co_names, code.co_varnames


def _source_files(modules: Iterable[str]) -> Iterator[str]:
    queue, visited = list(modules), set[str]()
    while queue:
        name = queue.pop()
        module = sys.modules.get(name)
        file = str(getattr(module, "__file__", None) or "")
        if name in visited or not Path(file).is_file():
            continue
        visited.add(name)
        if file.startswith(INSTALLED) or "site-packages" in file:
            continue
        yield file
        for value in list(vars(module).values()):
            owner = value.__name__ if isinstance(value, types.ModuleType) else None
            queue.append(owner or str(getattr(value, "__module__", "")))
