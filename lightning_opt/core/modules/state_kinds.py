"""Decides which attributes of a module are state that a training step may change."""

from __future__ import annotations

import functools
import random
import sys
from collections import deque
from typing import Any

import numpy as np
import torch
from torch import Tensor

PLAIN = (bool, int, float, complex, str, bytes, type(None), list, dict, set, tuple, deque)
"""Types of attributes that are restored: counters, flags, collected outputs."""

_CONTAINERS = (list, dict, set, deque)
GENERATORS = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)
_STANDARD = sys.stdlib_module_names - {"__main__"}
_FRAMEWORKS = {"lightning", "lightning_opt", "pytorch_lightning", "torch"}
INTERNALS = frozenset(("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"))


def has_user_state(kind: type) -> bool:
    return any(not base.__module__.startswith("torch.") for base in kind.__mro__[:-1])


@functools.cache
def kind_of(kind: Any) -> str:
    if issubclass(kind, GENERATORS):
        return "generator"
    if issubclass(kind, Tensor):
        return "tensor"
    if issubclass(kind, np.ndarray):
        return "array"
    if issubclass(kind, _CONTAINERS) and _is_refillable(kind):
        return "container"
    if issubclass(kind, PLAIN):
        return "tuple" if issubclass(kind, tuple) else "plain"
    is_environment = hasattr(kind, "step") and hasattr(kind, "reset")  # of reinforcement learning
    return "object" if is_environment or _is_user_class(kind) else ""


def _is_user_class(kind: type) -> bool:
    """Return whether a class and its bases are user-defined, such as a moving average."""
    names = {base.__module__.partition(".")[0] for base in kind.__mro__[:-1]}
    if names & _FRAMEWORKS or kind.__module__ in _STANDARD:
        return False
    return "site-packages" not in str(getattr(sys.modules.get(kind.__module__), "__file__", ""))


def _is_refillable(kind: Any) -> bool:
    """Return whether a container changes by Python's own methods, unlike a frozen configuration."""
    builtin_bases = [
        base for base in kind.__mro__ if base.__module__ in ("builtins", "collections")
    ]
    return all(
        any(getattr(kind, name, None) is getattr(base, name, None) for base in builtin_bases)
        for name in ("__setitem__", "clear", "extend", "update")
    )
