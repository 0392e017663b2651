"""What a block is given besides tensors: a recomputation must find it as the first run did."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterable, Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, nn.Module)
DEPTH = 5
"""From an object to the tensors of its attributes' items' attributes: so deep are caches."""


def objects_in(tree: Any) -> list[Any]:
    """Return what a recomputation is handed as it is: neither tensors nor plain values."""
    leaves = tree_flatten(tree)[0]
    return [leaf for leaf in leaves if not isinstance(leaf, (Tensor, *PLAIN))]


def contents_of(objects: Iterable[Any]) -> list[Any]:
    """Return what is in objects now, so that it can be compared with what is in them later."""
    return [_content(thing, DEPTH) for thing in objects]


def _content(value: Any, depth: int) -> Any:
    if isinstance(value, Tensor):
        return id(value), value._version, value.shape
    if isinstance(value, PLAIN):
        return value if isinstance(value, (bool, int, str)) else repr(type(value))
    parts = parts_of(value)
    return id(value), [_content(part, depth - 1) for part in parts] if depth else len(parts)


def parts_of(value: Any) -> Collection[Any]:
    """Return what is in a container, or what the attributes of any other object are."""
    if isinstance(value, Mapping):
        return value.values()
    if isinstance(value, (list, tuple, set, frozenset)):
        return value
    return getattr(value, "__dict__", {}).values()  # a dataclass, a cache, a graph


def switch_caches_off(model: nn.Module) -> ExitStack:
    """Have models of ``transformers`` train without the cache of keys and values.

    Their decoders hand one cache to every block, which writes to it; a recomputation would write
    once more. Nothing reads it in training: ``transformers`` does the same for its own gradient
    checkpointing.

    Returns:
        What puts it back; empty if there are no such models.
    """
    undo = ExitStack()
    for module in model.modules():
        if getattr(getattr(module, "config", None), "use_cache", False):
            parameters = inspect.signature(type(module).forward).parameters
            if "use_cache" in parameters:
                hook = module.register_forward_pre_hook(_without_cache, with_kwargs=True)
                undo.callback(hook.remove)
    return undo


def _without_cache(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return args, {**kwargs, "use_cache": False} if module.training else kwargs
