"""Trying something on a model and leaving no trace of it."""

from __future__ import annotations

import random
import sys
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

PLAIN = (bool, int, float, complex, str, bytes, type(None), list, dict, set, tuple, deque)
"""Attributes of these types are put back: counters, flags, collected outputs."""

_OWN = frozenset(
    ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set", "_is_full_backward_hook")
)


@contextmanager
def isolated_random(device: torch.device) -> Iterator[None]:
    """Put the random numbers back: Python's, NumPy's, torch's of the CPU and of ``device``."""
    with ExitStack() as stack:
        stack.callback(random.setstate, random.getstate())
        if "numpy" in sys.modules:
            import numpy as np

            stack.callback(np.random.set_state, np.random.get_state())  # noqa: NPY002 - the user's
        stack.callback(torch.set_rng_state, torch.get_rng_state())
        if device.type == "cuda":
            stack.callback(torch.cuda.set_rng_state, torch.cuda.get_rng_state(device), device)
        yield


@contextmanager
def preserved(model: nn.Module) -> Iterator[None]:
    """Let forward and backward passes run on ``model``, and leave it as it was.

    Put back are gradients, which are ``None`` inside, buffers, ``requires_grad``, attributes of
    plain types with the contents of their containers, and the states of torchmetrics. Parameters
    are not copied: whoever runs the passes must not step an optimizer.
    """
    with ExitStack() as stack:
        for parameter in model.parameters():
            stack.callback(_put_back_gradient, parameter, parameter.grad, parameter.requires_grad)
            parameter.grad = None
        for module in model.modules():
            if type(module).__name__ == "FullyShardedDataParallel":
                continue  # its attributes are its own bookkeeping, set up by the first pass
            _preserve_buffers(module, stack)
            _preserve_attributes(module, stack)
        yield


def _put_back_gradient(parameter: Tensor, gradient: Tensor | None, requires_grad: bool) -> None:
    parameter.requires_grad_(requires_grad)
    parameter.grad = gradient


def _preserve_buffers(module: nn.Module, stack: ExitStack) -> None:
    for name, buffer in module._buffers.items():
        stack.callback(module._buffers.__setitem__, name, buffer)
        if buffer is not None:
            stack.callback(_copy_silently, buffer, buffer.detach().clone())


def _preserve_attributes(module: nn.Module, stack: ExitStack) -> None:
    attributes = vars(module)
    states = getattr(module, "_defaults", {})  # of torchmetrics: tensors or lists of tensors
    before = {
        name: value
        for name, value in attributes.items()
        if name not in _OWN and not name.endswith("hooks")
        if isinstance(value, PLAIN) or name in states
    }
    stack.callback(_put_back_attributes, attributes, set(attributes), before)
    for value in before.values():
        if isinstance(value, Tensor):
            stack.callback(_copy_silently, value, value.detach().clone())
        elif isinstance(value, (list, deque, set, dict)):
            stack.callback(_refill, value, value.copy())


def _put_back_attributes(
    attributes: dict[str, Any], names: set[str], before: dict[str, Any]
) -> None:
    # What appeared meanwhile goes, unless it is a cache of tensors or an object of someone's.
    for name in [n for n, v in attributes.items() if n not in names and isinstance(v, PLAIN)]:
        del attributes[name]
    attributes.update(before)


def _copy_silently(target: Tensor, source: Tensor) -> None:
    with torch.no_grad():
        target.data.copy_(source)  # `.data`: autograd need not know


def _refill(container: Any, content: Any) -> None:
    if isinstance(container, (list, deque)):
        container.clear()
        container.extend(content)
    else:
        container.clear()
        container.update(content)


@contextmanager
def replaced(owner: Any, **attributes: Any) -> Iterator[None]:
    """Set attributes of one object, and put back what was there, also if that was its class's."""
    own = vars(owner)
    before = {name: own[name] for name in attributes if name in own}
    try:
        own.update(attributes)
        yield
    finally:
        for name in attributes:
            own.pop(name, None)
        own.update(before)


def do_nothing(closure: Callable[[], Any] | None = None, *args: Any, **kwargs: Any) -> Any:
    """Stand in for an optimizer's or a scheduler's ``step``; a closure is run."""
    return closure() if callable(closure) else None
