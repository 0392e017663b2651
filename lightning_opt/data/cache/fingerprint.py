"""A short name of what a dataset is made of, which changes when that changes."""

from __future__ import annotations

import hashlib
import pickle
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_opt.data.encoding import raw

PATHS = 100_000
"""Strings that are tried as names of files."""


def fingerprint(dataset: Any, items: Any = None) -> str:
    """Return 16 hexadecimal digits that stand for ``dataset``.

    They cover its type, its length, all values of its attributes, the code of its methods and of
    functions and classes among the attributes (transforms) where these are neither Python's nor
    installed packages, and name, size and time of modification of every file that an attribute
    names. They do not cover global variables that the code reads, nor files whose names it makes
    up.

    Args:
        dataset: A map-style dataset.
        items: A few of its items, which go in too.

    Raises:
        ValueError: If an attribute cannot be pickled.
    """
    hashed = hashlib.blake2b(digest_size=8)
    length = len(dataset) if hasattr(dataset, "__len__") else None
    try:
        _Hasher(hashed).dump((dataset, length, items, torch.__version__))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ValueError(
            f"There is no fingerprint of this {type(dataset).__qualname__}, because an attribute "
            f"cannot be pickled: {error}. Give key=, a name that you change whenever the items do."
        ) from error
    for path in sorted(_paths(dataset)):
        try:
            status = Path(path).stat()
        except (OSError, ValueError):
            continue
        hashed.update(f"{path}\0{status.st_size}\0{status.st_mtime_ns}\0".encode())
    return hashed.hexdigest()


class _Hasher(pickle.Pickler):
    """Pickles into a hash instead of a file, and what is code by what it does."""

    def __init__(self, hashed: Any) -> None:
        super().__init__(_Sink(hashed), protocol=5)
        self._seen: set[int] = set()

    def reducer_override(self, value: Any) -> Any:
        if value is _stand_in:
            return NotImplemented
        if isinstance(value, types.FunctionType):
            return _stand_in, (self._describe(value),)
        if isinstance(value, type):
            return _stand_in, (self._describe_class(value),)
        if type(value) is Tensor and value.device.type == "cpu" and not value.is_quantized:
            if value.layout is not torch.strided:
                return NotImplemented
            data = pickle.PickleBuffer(raw(value))
            return _stand_in, ((value.dtype, tuple(value.shape), data),)
        if isinstance(value, torch.Generator):
            return _stand_in, (value.get_state(),)
        return NotImplemented

    def _describe(self, function: types.FunctionType) -> tuple[Any, ...]:
        name = (function.__module__, function.__qualname__)
        if _is_installed(function.__module__) or id(function) in self._seen:
            return name
        self._seen.add(id(function))
        cells = tuple(_content(cell) for cell in function.__closure__ or ())
        return (*name, _code(function.__code__), function.__defaults__, cells)

    def _describe_class(self, kind: type) -> tuple[Any, ...]:
        name = (kind.__module__, kind.__qualname__)
        if _is_installed(kind.__module__) or id(kind) in self._seen:
            return name
        self._seen.add(id(kind))
        members = [
            (key, self._describe(member))
            for key, value in sorted(vars(kind).items())
            for member in _functions(value)
        ]
        return (*name, members, [self._describe_class(base) for base in kind.__bases__])


class _Sink:
    def __init__(self, hashed: Any) -> None:
        self._hashed = hashed

    def write(self, data: Any) -> int:
        self._hashed.update(data)
        return len(data)


def _stand_in(*parts: Any) -> None:
    """Stand in the hash for what is described by ``parts``."""


def _functions(member: Any) -> list[types.FunctionType]:
    if isinstance(member, (staticmethod, classmethod)):
        member = member.__func__
    if isinstance(member, property):
        return [f for f in (member.fget,) if isinstance(f, types.FunctionType)]
    return [member] if isinstance(member, types.FunctionType) else []


def _code(code: types.CodeType) -> tuple[Any, ...]:
    constants = tuple(
        _code(constant) if isinstance(constant, types.CodeType) else repr(constant)
        for constant in code.co_consts
    )
    return code.co_code, constants, code.co_names, code.co_varnames


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not bound yet
        return None


def _is_installed(module: str | None) -> bool:
    """Return whether a module is Python's or of an installed package, whose code stays."""
    top = (module or "").partition(".")[0]
    if top in sys.stdlib_module_names and top != "__main__":
        return True
    file = getattr(sys.modules.get(top), "__file__", None)
    return file is not None and "site-packages" in Path(file).parts


def _paths(dataset: Any) -> Iterator[str]:
    left = PATHS
    queue = [vars(dataset) if hasattr(dataset, "__dict__") else dataset]
    while queue and left:
        value = queue.pop()
        if isinstance(value, (str, Path)):
            left -= 1
            if 0 < len(str(value)) < 1024:
                yield str(value)
        elif isinstance(value, dict):
            queue += value.values()
        elif isinstance(value, (list, tuple)):
            queue += value
        elif isinstance(value, torch.utils.data.Dataset):
            queue.append(vars(value))
