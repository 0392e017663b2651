"""Functions that a configuration file can name."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any


def function_named(name: str, given: Callable[..., Any] | str | None) -> Any:
    """Return a function that may be given as its import path; None stays None.

    Args:
        name: Of the argument, for the error.
        given: A function, or a path such as ``"package.module.function"``.

    Raises:
        ValueError: If there is no such function.
    """
    if given is None or (callable(given) and not isinstance(given, str)):
        return given
    module, _, attribute = str(given).rpartition(".")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(
            f"{name} must be a function or its import path such as 'package.module.function', "
            f"got {given!r}: {error}."
        ) from error
    if not callable(found):
        raise ValueError(f"{name} must be a function, and {given!r} is {type(found).__name__}.")
    return found
