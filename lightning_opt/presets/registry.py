"""Presets by name: those of the package, and those that are registered."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning_opt.core.arguments import did_you_mean
from lightning_opt.presets.builtin import advanced, basic, ultra
from lightning_opt.presets.preset import Preset

BUILT_IN: dict[str, Callable[[], Preset]] = {"basic": basic, "advanced": advanced, "ultra": ultra}

_builders = dict(BUILT_IN)


def preset(name: str, /, **overrides: Any) -> Preset:
    """Return a preset: a list of callbacks and Trainer arguments that fit this machine.

    =============== ==============================================================================
    ``"basic"``     watches and protects: gradient health, a guard against NaN, adaptive clipping,
                    cleaning up when memory runs short
    ``"advanced"``  adds speed at the same result up to rounding: bf16 where the device has it,
                    compilation, fused updates, channels_last, attention, loading of data
    ``"ultra"``     adds what may take minutes before it pays, or changes the result: kernels by
                    trial, micro-batches or the largest batch, gradients compressed between machines
    =============== ==============================================================================

    Args:
        name: One of these, or of a preset that was registered.
        overrides: By the name of a callback of the preset: a dict of its settings, None to leave it
            out, True to have it in any case. By the name of an argument of the Trainer: its value.

    Raises:
        ValueError: For an unknown preset, callback or argument, or settings that do not fit.

    Example:
        >>> import lightning as L
        >>> import lightning_opt as lo
        >>> preset = lo.preset("basic", NonFiniteGuard={"spike": 6.0}, MemoryCleanup=None)
        >>> trainer = L.Trainer(**preset.trainer_kwargs(max_epochs=3, logger=False))
    """
    if name not in _builders:
        raise ValueError(
            f"There is no preset {name!r}{did_you_mean(name, _builders)} "
            f"There are {', '.join(_builders)}."
        )
    made = _builders[name]()
    if not isinstance(made, Preset):
        raise TypeError(
            f"The builder of preset {name!r} must return a Preset, such as "
            f"lightning_opt.preset('basic').plus(...); it returned {type(made).__name__}."
        )
    return made.named(name).override(**overrides)


def register_preset(name: str, builder: Callable[[], Preset]) -> None:
    """Register your own preset under a name.

    Args:
        name: How it is called for; registering a name again replaces what it stood for.
        builder: Returns the :class:`Preset`; it is called each time that it is asked for.

    Raises:
        ValueError: For the name of a preset of this package.
        TypeError: If the builder cannot be called.

    Example:
        >>> import lightning_opt as lo
        >>> def team():
        ...     return lo.preset("basic").plus(lo.LeakDetector, why="we had a leak last year")
        >>> lo.register_preset("team", team)
        >>> [type(callback).__name__ for callback in lo.preset("team").callbacks()][-1]
        'LeakDetector'
    """
    if not isinstance(name, str) or not name:
        raise ValueError(f"A preset's name must be a string that is not empty, got {name!r}.")
    if name in BUILT_IN:
        raise ValueError(f"{name!r} is a preset of lightning_opt; choose another name.")
    if not callable(builder):
        raise TypeError(
            f"The builder of preset {name!r} must be a function that returns a Preset, got "
            f"{type(builder).__name__}."
        )
    _builders[name] = builder


def preset_names() -> list[str]:
    """Return the names of all presets: this package's and registered ones."""
    return list(_builders)
