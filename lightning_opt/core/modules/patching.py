"""Patches objects of other libraries and of the user, and undoes the patches.

:func:`replaced` sets attributes and stores the previous values. :class:`ReplacedForward` is stored
in the module and holds a reference to the ``forward`` below it. A deep copy of a patched module is
patched too; a pickled one is not.
"""

from __future__ import annotations

import copy
import inspect
import operator
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import MethodType
from typing import Any, ClassVar

import torch
from torch import nn

_NOT_SET = object()


class _Replacement:
    """An attribute that was set, and its previous value."""

    active: ClassVar[list[_Replacement]] = []

    def __init__(self, attributes: dict[str, Any], name: str, value: Any) -> None:
        self.attributes, self.name = attributes, name
        self.previous = attributes.get(name, _NOT_SET)
        attributes[name] = value
        self.active.append(self)

    def undo(self) -> None:
        later = self.active[self.active.index(self) + 1 :]
        self.active.remove(self)
        for other in later:
            if other.attributes is self.attributes and other.name == self.name:
                other.previous = self.previous  # the later value stays set
                return
        if self.previous is _NOT_SET:
            self.attributes.pop(self.name, None)
        else:
            self.attributes[self.name] = self.previous


@contextmanager
def replaced(owner: Any, **attributes: Any) -> Iterator[None]:
    """Set attributes of an object and restore the previous ones at the end.

    Replacements of the same attribute may end in any order.
    """
    made = [_Replacement(vars(owner), name, value) for name, value in attributes.items()]
    try:
        yield
    finally:
        for replacement in made:
            replacement.undo()


class Patches(ExitStack):
    """Patches that last for a run. A pickled copy is empty."""

    def __reduce__(self) -> tuple[Any, ...]:
        return Patches, ()


class ReplacedForward:
    """An object that replaces the ``forward`` of one module and calls the previous one.

    Several may be stacked on a module, and they may be removed in any order. ``shadowed`` is the
    ``forward`` below this one, or None for the class's own method.
    """

    recomputes: ClassVar[bool] = False
    """Whether it recomputes activations in the backward pass."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.shadowed: Any = vars(module).get("forward")

    @property
    def is_compiled(self) -> bool:
        return False

    @property
    def original(self) -> Callable[..., Any]:
        if self.shadowed is not None:
            return self.shadowed  # type: ignore[no-any-return]
        return MethodType(type(self.module).forward, self.module)

    @property
    def __signature__(self) -> inspect.Signature:
        # Keep the original signature: callers inspect it.
        return inspect.signature(self.original)

    @property
    def __code__(self) -> Any:
        return self.original.__code__  # read by torch.export

    def __deepcopy__(self, memo: dict[int, Any]) -> ReplacedForward:
        copied = memo[id(self)] = object.__new__(type(self))
        vars(copied).update(copy.deepcopy(vars(self), memo))
        return copied

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the ``forward`` that this one replaces: loading does not need this package."""
        if self.shadowed is None:  # loads the class's method, as the attributes are loaded later
            return getattr, (self.module, "forward")
        return operator.getitem, ([self.shadowed], 0)

    def apply(self) -> None:
        vars(self.module)["forward"] = self

    def remove(self) -> None:
        """Restore the ``forward`` below. A second call has no effect."""
        if vars(self.module).get("forward") is self:
            if self.shadowed is None:
                del self.module.forward
            else:
                self.module.forward = self.shadowed
            return
        for above in forwards_of(self.module):
            if above.shadowed is self:
                above.shadowed = self.shadowed


def forwards_of(module: nn.Module) -> Iterator[ReplacedForward]:
    """Yield the objects that replace the ``forward`` of ``module``, the latest one first."""
    forward = vars(module).get("forward")
    while isinstance(forward, ReplacedForward):
        yield forward
        forward = forward.shadowed


def do_nothing(closure: Callable[[], Any] | None = None, *args: Any, **kwargs: Any) -> Any:
    """Replacement for the ``step`` of an optimizer or scheduler. It only runs a given closure."""
    return closure() if callable(closure) else None


def takes_hooks(module: nn.Module) -> bool:
    """Return whether hooks can be registered; torch.jit does not allow it."""
    return not isinstance(module, torch.jit.ScriptModule)
