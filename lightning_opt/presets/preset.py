"""Presets: named sets of callbacks and Trainer arguments, each with its reasons."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import TYPE_CHECKING, Any

import lightning_opt
from lightning_opt.core.arguments import did_you_mean
from lightning_opt.core.measure.machine import describe_machine
from lightning_opt.core.output.report import Report
from lightning_opt.presets._optional import as_optional
from lightning_opt.presets.situation import Situation
from lightning_opt.trainer.lightning import PACKAGES
from lightning_opt.worker.recipes import as_list, class_names, instantiate

if TYPE_CHECKING:
    import lightning.pytorch as pl
    from typing_extensions import Self

ORDER = (
    "Runtime", "Accumulation", "GradientHealth", "NonFiniteGuard", "CurvatureMonitor",
    "CurvaturePreconditioner", "AdaptiveClipping",
)  # fmt: skip
"""Callbacks whose order matters: first process settings, then callbacks that accumulate, measure,
check and change gradients. All other callbacks follow."""

ARGUMENTS = set(inspect.signature(PACKAGES[0].Trainer).parameters) - {"callbacks"}
"""Arguments of the Trainer that a preset may set."""

Obstacle = Callable[[Situation], str | None]
"""Returns the reason to leave a part out, or None."""


@dataclass(frozen=True)
class Part:
    """A callback, or an argument of the Trainer, in a preset.

    ``value`` is the callback's settings, the argument's value, or a function of the situation that
    returns them. ``kind`` is the callback's class; None for an argument of the Trainer.

    In the result of :meth:`choose`, ``reason`` is the reason to leave the part out; None if it is
    used. ``is_requested`` is True if the user named the part; its errors then stop the run.
    """

    name: str
    value: Any
    why: str = ""
    costs: str = ""
    obstacle: Obstacle | None = None
    kind: type[pl.Callback] | None = None
    reason: str | None = None
    is_requested: bool = False

    def choose(self, situation: Situation) -> Part:
        value = self.value(situation) if callable(self.value) else self.value
        override = situation.overrides.get(self.name)
        if isinstance(override, Mapping):
            value = {**value, **override}
        reason = self._reason_to_exclude(situation)
        return replace(self, value=value, reason=reason, is_requested=override is not None)

    def _reason_to_exclude(self, situation: Situation) -> str | None:
        if self.name in (situation.user_callbacks if self.kind else situation.arguments):
            return "replaced by yours"
        if situation.overrides.get(self.name, True) is None:
            return "excluded by you"
        if self.obstacle is None or situation.overrides.get(self.name) is True:
            return None
        return self.obstacle(situation)

    @property
    def is_on(self) -> bool:
        return self.reason is None

    @property
    def _is_from_package(self) -> bool:
        return getattr(lightning_opt, self.name, None) is self.kind

    def make(self) -> pl.Callback:
        kind: Any = self.kind
        kind = as_optional(kind) if self._is_from_package and not self.is_requested else kind
        return kind(**instantiate(self.value))  # type: ignore[no-any-return]

    def to_config(self) -> dict[str, Any]:
        """Return the callback's entry in a configuration of LightningCLI."""
        kind: Any = self.kind
        module = kind.__module__
        if self._is_from_package:
            module = "lightning_opt" if self.is_requested else "lightning_opt.presets._optional"
        return {"class_path": f"{module}.{kind.__qualname__}", "init_args": dict(self.value)}


@dataclass(frozen=True, repr=False, eq=False)
class Preset:
    """A named set of callbacks and Trainer arguments, each with its reason.

    Parts that do not suit the machine, the strategy or another part are left out;
    :meth:`describe` gives the reasons. A callback of this package that does not support the model
    is left out with a warning when the run starts, unless you named it. Your own Trainer arguments
    and callbacks of the same class replace the preset's.

    Presets are immutable: each method returns a new one. Create them with :func:`preset` and
    :func:`register_preset`.

    Args:
        name: The preset's name.
        parts: Its parts; :meth:`plus` adds to them.
        overrides: Settings by callback name, set by :meth:`override`.
        arguments: Arguments of the Trainer, set by :meth:`override`.
        purpose: Its purpose, in a sentence.

    Example:
        >>> import lightning as L
        >>> import lightning_opt as lo
        >>> careful = lo.preset("basic", AdaptiveClipping={"rule": "zclip"})
        >>> trainer = L.Trainer(**careful.trainer_kwargs(max_epochs=3, logger=False))
        >>> [type(callback).__name__ for callback in careful.callbacks()][:3]
        ['GradientHealth', 'NonFiniteGuard', 'AdaptiveClipping']
    """

    name: str
    parts: tuple[Part, ...] = ()
    _: KW_ONLY
    overrides: Mapping[str, Any] = field(default_factory=dict)
    arguments: Mapping[str, Any] = field(default_factory=dict)
    purpose: str = ""

    # --- derived presets --------------------------------------------------------------------------

    def plus(
        self,
        kind: type[pl.Callback],
        settings: Mapping[str, Any] | Callable[[Situation], Mapping[str, Any]] | None = None,
        why: str = "",
        costs: str = "",
        obstacle: Obstacle | None = None,
    ) -> Self:
        """Return this preset with another callback, which replaces one of the same class.

        Args:
            kind: The callback's class.
            settings: Its arguments, or a function of the situation that returns them.
            why: Its purpose.
            costs: Its cost.
            obstacle: A function of the situation (``device``, ``strategy``, ``processes``, ...)
                that returns the reason to leave it out, or None.
        """
        return self._with(Part(kind.__name__, settings or {}, why, costs, obstacle, kind))

    def plus_argument(
        self,
        name: str,
        value: Any,
        why: str = "",
        costs: str = "",
        obstacle: Obstacle | None = None,
    ) -> Self:
        """Return this preset with another argument of the Trainer; see :meth:`plus`."""
        return self._with(Part(name, value, why, costs, obstacle))

    def named(self, name: str, purpose: str = "") -> Self:
        """Return this preset with another name, and another purpose if one is given."""
        return replace(self, name=name, purpose=purpose or self.purpose)

    def override(self, **overrides: Any) -> Self:
        """Return this preset with other settings.

        Args:
            overrides: By the name of a callback: a dict of settings; None or False to leave it out;
                True to add it even where the preset would leave it out. By the name of an argument
                of the Trainer: its value.

        Raises:
            ValueError: For an unknown name, or values that the callback does not accept.
            TypeError: For settings that the callback does not have.
        """
        settings, trainer = dict(self.overrides), dict(self.arguments)
        kinds = {part.name: part.kind for part in self.parts if part.kind is not None}
        for name, value in overrides.items():
            if name not in {*kinds, *ARGUMENTS}:
                hint = did_you_mean(name, [*kinds, *ARGUMENTS])
                raise ValueError(
                    f"preset({self.name!r}) has no {name!r}{hint} Its callbacks are "
                    f"{', '.join(kinds)}; arguments of the Trainer can be given too. Give your own "
                    "callbacks to trainer_kwargs(callbacks=[...])."
                )
            if name not in kinds:
                trainer[name] = value
            elif isinstance(value, Mapping):
                settings[name] = dict(value)
                kinds[name](**instantiate(settings[name]))  # raises for wrong settings
            elif value is None or isinstance(value, bool):
                settings[name] = value or None
            else:
                raise ValueError(
                    f"{name} must be a dict of its settings, True, or None to leave it out; got "
                    f"{value!r}."
                )
        return replace(self, overrides=settings, arguments=trainer)

    def _with(self, part: Part) -> Self:
        parts = {existing.name: existing for existing in self.parts}
        return replace(self, parts=tuple({**parts, part.name: part}.values()))

    # --- results ----------------------------------------------------------------------------------

    def choose(self, **trainer: Any) -> list[Part]:
        """Return the parts for these Trainer arguments, each with its final value and reason."""
        situation = self._situation(trainer)
        return [part.choose(situation) for part in self.parts]

    def _situation(self, trainer: Mapping[str, Any]) -> Situation:
        return Situation({**self.arguments, **trainer}, self.overrides)

    def callbacks(self) -> list[pl.Callback]:
        """Return new callbacks, for a Trainer with default arguments."""
        return list(self.trainer_kwargs()["callbacks"])

    def trainer_kwargs(self, **more: Any) -> dict[str, Any]:
        """Return arguments for the Trainer.

        Args:
            more: Your own arguments, which override the preset's. Your callbacks are added, or
                replace the preset's of the same class. Then all are sorted into the required order.
        """
        return {**self.arguments, **more, **join(self.choose(**more), Part.make, more)}

    def describe(self, **trainer: Any) -> Report:
        """Return a table with one row per part: whether it is used, its purpose, its cost.

        For a part that is left out, the cost column contains the reason.

        Args:
            trainer: Arguments that the Trainer will have, such as ``devices=4``.
        """
        situation = self._situation(trainer)
        rows = [
            {
                "part": part.name,
                "on": "yes" if part.is_on else "no",
                "settings": _as_python(part.value) if part.is_on else "",
                "for": part.why,
                "costs, or why not": part.costs if part.is_on else part.reason,
            }
            for part in self.choose(**trainer)
        ]
        notes = [
            *([self.purpose] if self.purpose else []),
            f"For {situation.device}, strategy {situation.strategy}, processes: "
            f"{situation.processes}; {describe_machine(situation.device)}.",
        ]
        return Report(f"Preset {self.name!r}", rows, notes)

    def to_dict(self, **more: Any) -> dict[str, Any]:
        """Return the arguments of the Trainer in the format of a LightningCLI configuration.

        Args:
            more: Your own arguments, of plain types; ``callbacks`` as dicts with ``class_path``.

        Raises:
            TypeError: For settings that are objects, which JSON cannot store. Give them as
                ``{"class_path": ..., "init_args": {...}}``.
        """
        arguments = {**self.arguments, **more, **join(self.choose(**more), Part.to_config, more)}
        plain: dict[str, Any] = json.loads(json.dumps(arguments))
        return plain

    def to_yaml(self, **more: Any) -> str:
        """Return a configuration that any LightningCLI can read; see :meth:`to_dict`."""
        import yaml  # type: ignore[import-untyped]

        head = f"# preset {self.name!r} of lightning_opt on this machine\n"
        return head + str(yaml.safe_dump({"trainer": self.to_dict(**more)}, sort_keys=False))

    def __repr__(self) -> str:
        changes = {**self.overrides, **self.arguments}
        return f"preset({self.name!r}{', ' if changes else ''}{_as_python(changes)})"

    def __str__(self) -> str:
        return str(self.describe())


def join(
    chosen: Iterable[Part], convert: Callable[[Part], Any], given: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the parts in use as Trainer arguments, with the given callbacks.

    ``convert`` turns a part into a callback, or into its entry in a configuration.
    """
    on = [part for part in chosen if part.is_on]
    arguments = {part.name: part.value for part in on if not part.kind}
    callbacks = [convert(part) for part in on if part.kind] + as_list(given.get("callbacks"))
    return {**arguments, "callbacks": sorted(callbacks, key=_position)}


def _position(callback: pl.Callback | Mapping[str, Any]) -> int:
    ranks = [ORDER.index(name) for name in class_names(callback) if name in ORDER]
    return min(ranks, default=len(ORDER))


def _as_python(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{name}={setting!r}" for name, setting in value.items())
    return repr(value)
