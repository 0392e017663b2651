"""A short hash of an object and the code that it uses."""

from __future__ import annotations

import functools
import hashlib
import pickle
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from lightning_opt.data.encoding import is_plain, raw

_LRU_CACHE = type(functools.lru_cache(abs))


def fingerprint(value: Any) -> str:
    """Return a hash of ``value``, 16 hexadecimal digits.

    It covers the type, the length, all attributes, and the code of methods and of functions and
    classes among the attributes (transforms), with everything this code refers to: other functions
    and classes, global variables, modules. Of Python and installed packages it covers the version,
    and of every file that an attribute names the size and modification time. It covers neither
    files with computed names nor imports within functions.

    Raises:
        ValueError: If an attribute cannot be pickled.
    """
    hashed = hashlib.blake2b(digest_size=8)
    length = len(value) if hasattr(value, "__len__") else None
    try:
        _Hasher(hashed).dump((value, length, sys.version_info[:2]))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ValueError(
            f"There is no fingerprint of this {type(value).__qualname__}, because an attribute "
            f"cannot be pickled: {error}."
        ) from error
    return hashed.hexdigest()


class _Hasher(pickle.Pickler):
    """Pickles into a hash instead of a file; code is described by its content."""

    def __init__(self, hashed: Any, seen: set[int] | None = None) -> None:
        sink: Any = types.SimpleNamespace(write=hashed.update)
        super().__init__(sink, protocol=5)
        self._seen: set[int] = set() if seen is None else seen

    def reducer_override(self, value: Any) -> Any:
        if value is _stand_in:
            return NotImplemented
        if isinstance(value, (type, types.FunctionType)):
            return _stand_in, (self._describe(value),)
        if isinstance(value, _LRU_CACHE):
            return _stand_in, (value.__wrapped__,)
        if is_plain(value):
            data = pickle.PickleBuffer(raw(value))
            return _stand_in, ((value.dtype, tuple(value.shape), data),)
        if isinstance(value, torch.Generator):
            return _stand_in, (value.get_state(),)
        return NotImplemented

    def _describe(self, made: type | types.FunctionType) -> tuple[Any, ...]:
        """Describe a class or function: its version if installed, else its code."""
        name = (made.__module__, made.__qualname__)
        if _is_installed(made.__module__):
            return (*name, _version(made.__module__))
        if id(made) in self._seen:
            return name
        self._seen.add(id(made))
        if isinstance(made, type):
            members = [
                (key, self._describe(function))
                for key, member in sorted(vars(made).items())
                if isinstance(function := _behind(member), types.FunctionType)
            ]
            return (*name, members, [self._describe(base) for base in made.__bases__])
        cells = [self._show(_content(cell)) for cell in made.__closure__ or ()]
        used = _used(made.__code__, made.__globals__)
        found = [(key, self._show(value)) for key, value in used]
        defaults = made.__defaults__, made.__kwdefaults__
        return (*name, _code(made.__code__), defaults, cells, found)

    def _show(self, value: Any) -> Any:
        """Describe a value that code refers to, also if it cannot be pickled."""
        if isinstance(value, types.ModuleType):
            return value.__name__, _version(value.__name__)
        if isinstance(value, (set, frozenset)):
            return sorted(map(repr, value))  # in an order that is the same in each process
        hashed = hashlib.blake2b(digest_size=16)
        try:
            _Hasher(hashed, self._seen).dump(value)
        except (pickle.PicklingError, AttributeError, TypeError, RecursionError):
            # A lock, an open file, or a very long chain of calls.
            return type(value).__qualname__
        return hashed.digest()


def _stand_in(*parts: Any) -> None:
    pass


def _behind(member: Any) -> Any:
    """Return the function of a method or property; other values unchanged."""
    if isinstance(member, (staticmethod, classmethod)):
        member = member.__func__
    return member.fget if isinstance(member, property) else member


def _code(code: types.CodeType) -> tuple[Any, ...]:
    constants = []
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            constants.append(_code(constant))
        elif isinstance(constant, frozenset):
            constants.append(tuple(sorted(map(repr, constant))))
        else:
            constants.append((repr(constant),))
    return code.co_code, constants, code.co_names, code.co_varnames


def _used(code: types.CodeType, known: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the global variables that code names, and those of the user's modules."""
    for name in code.co_names:
        if name not in known:
            continue
        value = known[name]
        yield name, value
        if isinstance(value, types.ModuleType) and not _is_installed(value.__name__):
            inside = vars(value)
            yield from ((f"{name}.{key}", inside[key]) for key in code.co_names if key in inside)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _used(constant, known)


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not bound yet
        return None


def _is_installed(module: str | None) -> bool:
    """Return whether a module is Python's or an installed package's: a version describes it."""
    top = (module or "").partition(".")[0]
    if top in sys.stdlib_module_names and top != "__main__":
        return True
    file = getattr(sys.modules.get(top), "__file__", None)
    return file is not None and "site-packages" in Path(file).parts


def _version(module: str | None) -> str:
    top = sys.modules.get((module or "").partition(".")[0])
    return str(getattr(top, "__version__", ""))
