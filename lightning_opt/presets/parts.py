"""What presets are made of: callbacks and Trainer arguments, each with its reasons."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from lightning.pytorch import Callback

import lightning_opt
from lightning_opt.presets.situation import Situation
from lightning_opt.worker.recipes import instantiate

Obstacle = Callable[[Situation], str | None]
"""Returns why a part is to be left out, or None."""


@dataclass(frozen=True)
class Part:
    """A callback, or an argument of the Trainer, that a preset switches on.

    Args:
        name: Name of the callback's class, or of the argument.
        value: The callback's class and its settings, or the argument's value. Settings may depend
            on the situation.
        why: What it is for, in a few words.
        costs: What it costs, in a few words.
        obstacle: Why to leave it out, if so; None where it goes everywhere.
        kind: The callback's class; None for an argument of the Trainer.
    """

    name: str
    value: Any
    why: str = ""
    costs: str = ""
    obstacle: Obstacle | None = None
    kind: type[Callback] | None = None

    def settings(self, situation: Situation) -> Any:
        """Return the callback's settings, the user's among them, or the argument's value."""
        value = self.value(situation) if callable(self.value) else self.value
        wish = situation.wishes.get(self.name)
        return {**value, **wish} if isinstance(wish, Mapping) else value

    def left_out(self, situation: Situation) -> str | None:
        """Return why it is left out, or None if it is switched on."""
        if self.kind is None:
            theirs = self.name in situation.arguments
        else:
            theirs = any(isinstance(callback, self.kind) for callback in situation.given)
        if theirs:
            return "yours is taken"
        if situation.refuses(self.name):
            return "you leave it out"
        if self.obstacle is None or situation.wishes.get(self.name) is True:
            return None
        return self.obstacle(situation)


@dataclass(frozen=True)
class Chosen:
    """A part as decided for a situation.

    Attributes:
        part: The part.
        settings: Of the callback, or the argument's value.
        because: Why it is left out; None if it is switched on.
    """

    part: Part
    settings: Any
    because: str | None

    @property
    def is_on(self) -> bool:
        """Whether the preset switches it on."""
        return self.because is None

    def make(self) -> Callback:
        """Return a new callback."""
        assert self.part.kind is not None
        return self.part.kind(**instantiate(self.settings))

    def described(self) -> dict[str, Any]:
        """Return the callback as a configuration of LightningCLI has it."""
        kind = self.part.kind
        assert kind is not None
        exported = getattr(lightning_opt, kind.__name__, None) is kind
        module = "lightning_opt" if exported else kind.__module__
        return {"class_path": f"{module}.{kind.__qualname__}", "init_args": dict(self.settings)}


def check_settings(kind: type[Callback], settings: Mapping[str, Any]) -> None:
    """Refuse settings that the callback does not have, or does not take.

    Raises:
        ValueError: With what is allowed.
    """
    allowed = [name for name in inspect.signature(kind).parameters if name != "self"]
    unknown = [name for name in settings if name not in allowed]
    if unknown:
        raise ValueError(
            f"{kind.__name__} has no setting {unknown[0]!r}; it has "
            f"{', '.join(allowed) if allowed else 'none'}."
        )
    kind(**instantiate(dict(settings)))


def written(value: Any) -> str:
    """Return settings as they are written in Python."""
    if isinstance(value, Mapping):
        return ", ".join(f"{name}={setting!r}" for name, setting in value.items())
    return repr(value)
