"""Objects in the place of a module's ``forward``, which can be taken off in any order.

Two features may replace the same module's ``forward``, one on top of the other. Whoever is undone
first may lie below the other, so it is taken out of the chain and not only off its end.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from torch import nn


class Replacement(Protocol):
    """What is set as a module's ``forward``, and calls what was there before.

    Attributes:
        module: Whose ``forward`` it is.
        shadowed: The replacement below it; ``None`` for the class's own method.
    """

    module: nn.Module
    shadowed: Callable[..., Any] | None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module."""
        ...


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
