"""A list of callbacks and Trainer arguments that knows where it can be used."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import TYPE_CHECKING, Any, NoReturn

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_warn

from lightning_opt.core.arguments import did_you_mean
from lightning_opt.core.measure.machine import describe_machine
from lightning_opt.core.output.report import Report
from lightning_opt.presets.parts import Chosen, Obstacle, Part, check_settings, written
from lightning_opt.presets.situation import Situation

if TYPE_CHECKING:
    from typing_extensions import Self

ORDER = (
    "Runtime", "Accumulation", "GradientHealth", "NonFiniteGuard", "CurvatureMonitor",
    "CurvaturePreconditioner", "AdaptiveClipping",
)  # fmt: skip
"""Callbacks whose order matters, first to last: settings of the process, then what makes the
gradient, sees it, judges it, and last what changes it. The others follow."""

ARGUMENTS = set(inspect.signature(Trainer).parameters) - {"callbacks"}
"""Of the Trainer, which a preset may set."""


@dataclass(frozen=True, repr=False, eq=False)
class Preset:
    """A named set of callbacks and Trainer arguments, each with the reason why it is there.

    What a part needs and the machine, the strategy or another part does not allow is left out, and
    :meth:`describe` says so; nothing that a preset puts together is refused by its parts. What you
    give yourself wins: an argument of the Trainer, or a callback of a class that is in the preset.

    Presets do not change: each method returns a new one. They are made by :func:`preset` and
    :func:`register_preset`.

    Args:
        name: What it is called.
        parts: What it is made of; :meth:`plus` adds to them.
        wishes: What :meth:`override` says of single callbacks.
        arguments: What it says of the Trainer's arguments.
        model: What :meth:`for_model` was given.
        purpose: What it is for, in a sentence.

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
    wishes: Mapping[str, Any] = field(default_factory=dict)
    arguments: Mapping[str, Any] = field(default_factory=dict)
    model: LightningModule | None = None
    purpose: str = ""

    # --- making others from it ------------------------------------------------------------------

    def plus(
        self,
        kind: type[Callback],
        settings: Mapping[str, Any] | Callable[[Situation], Mapping[str, Any]] | None = None,
        why: str = "",
        costs: str = "",
        obstacle: Obstacle | None = None,
    ) -> Self:
        """Return this preset with one more callback, in the place of one of the same class.

        Args:
            kind: The callback's class.
            settings: Its arguments, or a function of the situation that returns them.
            why: What it is for.
            costs: What it costs.
            obstacle: A function of the situation (``device``, ``strategy``, ``processes``, ...)
                that returns why to leave it out, or None.
        """
        part = Part(kind.__name__, settings or {}, why, costs, obstacle, kind)
        return self._with(part)

    def plus_argument(
        self,
        name: str,
        value: Any,
        why: str = "",
        costs: str = "",
        obstacle: Obstacle | None = None,
    ) -> Self:
        """Return this preset with one more argument of the Trainer; see :meth:`plus`."""
        if name not in ARGUMENTS:
            raise ValueError(f"The Trainer has no argument {name!r} that a preset could set.")
        return self._with(Part(name, value, why, costs, obstacle))

    def named(self, name: str, purpose: str = "") -> Self:
        """Return this preset under another name, and for another purpose if one is given."""
        return replace(self, name=name, purpose=purpose or self.purpose)

    def override(self, **overrides: Any) -> Self:
        """Return this preset with settings of one's own.

        Args:
            overrides: By the name of a callback: a dict of settings; None or False to leave it out;
                True to have it also where the preset would leave it out. By the name of an argument
                of the Trainer: its value.

        Raises:
            ValueError: For an unknown name, or settings that the callback does not take.
        """
        wishes, trainer = dict(self.wishes), dict(self.arguments)
        kinds = {part.name: part.kind for part in self.parts if part.kind is not None}
        for name, value in overrides.items():
            if name == "callbacks":
                raise ValueError(
                    f"preset({self.name!r}) takes no callbacks; give yours to "
                    "trainer_kwargs(callbacks=[...])."
                )
            if name not in {*kinds, *ARGUMENTS}:
                near = did_you_mean(name, [*kinds, *ARGUMENTS])
                raise ValueError(
                    f"preset({self.name!r}) has no {name!r}{near} Its callbacks are "
                    f"{', '.join(kinds)}; arguments of the Trainer can be given too."
                )
            if name not in kinds:
                trainer[name] = value
            elif isinstance(value, Mapping):
                wishes[name] = dict(value)
                check_settings(kinds[name], value)
            elif value is None or isinstance(value, bool):
                wishes[name] = value or None
            else:
                raise ValueError(
                    f"{name} must be a dict of its settings, True, or None to leave it out; got "
                    f"{value!r}. Give callbacks of your own to trainer_kwargs(callbacks=[...])."
                )
        return replace(self, wishes=wishes, arguments=trainer)

    def for_model(self, model: LightningModule) -> Self:
        """Return this preset without what this model refuses, and with what its size asks for.

        A model under manual optimisation, one that is compiled or checkpointed already, and one
        whose states leave little memory for activations get other parts.
        """
        return replace(self, model=model)

    def _with(self, part: Part) -> Self:
        parts = {own.name: own for own in self.parts}
        return replace(self, parts=tuple({**parts, part.name: part}.values()))

    # --- what comes of it -----------------------------------------------------------------------

    def choose(self, **trainer: Any) -> list[Chosen]:
        """Return each part with what was decided for these arguments of the Trainer."""
        situation = self._situation(trainer)
        return [
            Chosen(part, part.settings(situation), part.left_out(situation)) for part in self.parts
        ]

    def _situation(self, trainer: Mapping[str, Any]) -> Situation:
        return Situation({**self.arguments, **trainer}, self.wishes, self.model)

    def callbacks(self) -> list[Callback]:
        """Return new callbacks, for a Trainer with no further arguments of weight."""
        return list(self.trainer_kwargs()["callbacks"])

    def trainer_kwargs(self, **more: Any) -> dict[str, Any]:
        """Return arguments for the Trainer.

        Args:
            more: Arguments of your own, which win. A callback of a class that is in the preset
                stands for the preset's; others follow the preset's, those of this package in the
                order that they need.
        """
        situation = self._situation(more)
        if situation.does_not_fit:
            rank_zero_warn(situation.does_not_fit)
        joined = join(self.choose(**more), Chosen.make, situation.given)
        return {**situation.arguments, **joined}

    def describe(self, **trainer: Any) -> Report:
        """Return one row a part: whether it is on, why, and what it costs or why it is left out.

        Args:
            trainer: Arguments that the Trainer will have, such as ``devices=4``.
        """
        situation = self._situation(trainer)
        rows = [
            {
                "part": choice.part.name,
                "on": "yes" if choice.is_on else "no",
                "settings": written(choice.settings) if choice.is_on else "",
                "for": choice.part.why,
                "costs, or why not": choice.part.costs if choice.is_on else choice.because,
            }
            for choice in self.choose(**trainer)
        ]
        processes = situation.processes
        notes = [
            *filter(None, [self.purpose, situation.does_not_fit]),
            f"For {situation.device}, strategy {situation.strategy}, {processes} "
            f"process{'es' if processes > 1 else ''}: {describe_machine(situation.device)}.",
        ]
        if self.arguments:
            notes.append(f"Your arguments of the Trainer: {written(self.arguments)}.")
        return Report(f"Preset {self.name!r}", rows, notes)

    def to_dict(self, **more: Any) -> dict[str, Any]:
        """Return the arguments of the Trainer as a LightningCLI configuration has them.

        Args:
            more: Arguments of your own, of plain types; ``callbacks`` as dicts with ``class_path``.

        Raises:
            ValueError: For settings that are objects, which a file cannot hold.
        """
        theirs = more.pop("callbacks", None) or []
        named = {name for entry in theirs for name in _class_names(entry)}
        ours = (choice for choice in self.choose(**more) if choice.part.name not in named)
        found = {**self.arguments, **more, **join(ours, Chosen.described, theirs)}
        plain: dict[str, Any] = json.loads(json.dumps(found, default=_refuse))
        return plain

    def to_yaml(self, **more: Any) -> str:
        """Return a configuration that any LightningCLI can read; see :meth:`to_dict`."""
        import yaml  # type: ignore[import-untyped]

        head = f"# preset {self.name!r} of lightning_opt on this machine\n"
        return head + str(yaml.safe_dump({"trainer": self.to_dict(**more)}, sort_keys=False))

    def __repr__(self) -> str:
        changes = {**self.wishes, **self.arguments}
        return f"preset({self.name!r}{', ' if changes else ''}{written(changes)})"

    def __str__(self) -> str:
        return str(self.describe())


def join(
    chosen: Iterable[Chosen], form: Callable[[Chosen], Any], theirs: Sequence[Any]
) -> dict[str, Any]:
    """Return what is switched on as arguments of the Trainer, callbacks in their order.

    Args:
        chosen: The parts of a preset, as decided.
        form: Returns the callback of a part, or what a configuration has for it.
        theirs: Callbacks of the user's, in the same form.
    """
    on = [choice for choice in chosen if choice.is_on]
    arguments = {choice.part.name: choice.settings for choice in on if not choice.part.kind}
    ours = [form(choice) for choice in on if choice.part.kind]
    return {**arguments, "callbacks": sorted([*ours, *theirs], key=_rank)}


def _rank(callback: Callback | Mapping[str, Any]) -> int:
    ranks = [ORDER.index(name) for name in _class_names(callback) if name in ORDER]
    return min(ranks, default=len(ORDER))


def _class_names(callback: Callback | Mapping[str, Any]) -> list[str]:
    """Return the classes of a callback, or the one that a configuration names."""
    if isinstance(callback, Mapping):
        return [str(callback["class_path"]).rpartition(".")[2]]
    return [base.__name__ for base in type(callback).__mro__]


def _refuse(value: object) -> NoReturn:
    raise ValueError(
        f"A configuration file cannot hold {value!r}. Give it as a name or as "
        "{'class_path': ..., 'init_args': {...}}."
    )
