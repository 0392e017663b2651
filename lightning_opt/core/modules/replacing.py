"""Objects in the place of a module's ``forward``, which can be taken off in any order.

Two features may replace the same module's ``forward``, one on top of the other. Whoever is undone
first may lie below the other, so it is taken out of the chain and not only off its end.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import MethodType
from typing import Any

from torch import nn


class Replacement:
    """What is set as a module's ``forward``, and calls what was there before.

    Attributes:
        module: Whose ``forward`` it is.
        shadowed: The replacement below it; ``None`` for the class's own method.
    """

    module: nn.Module
    shadowed: Callable[..., Any] | None

    @property
    def __signature__(self) -> inspect.Signature:
        """That of the class's own method: others look there for what the module takes."""
        if self.shadowed is not None:
            return inspect.signature(self.shadowed)
        return inspect.signature(MethodType(type(self.module).forward, self.module))


def take_off(replacement: Replacement) -> None:
    """Give the module back what was below; nothing happens if that has been done."""
    attributes = replacement.module.__dict__
    current = attributes.get("forward")
    if current is replacement:
        if replacement.shadowed is None:
            del replacement.module.forward
        else:
            replacement.module.forward = replacement.shadowed
        return
    while current is not None:
        below = getattr(current, "shadowed", None)
        if below is replacement:
            current.shadowed = replacement.shadowed
            return
        current = below
