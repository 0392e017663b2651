"""A list of callbacks and Trainer arguments that knows where it can be used."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import TYPE_CHECKING, Any, NoReturn

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_warn

from lightning_opt.core.arguments import did_you_mean
from lightning_opt.core.machine import describe_machine
from lightning_opt.core.report import Report
from lightning_opt.presets.parts import Chosen, Obstacle, Part, check_settings, no_obstacle, written
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
        obstacle: Obstacle = no_obstacle,
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
        obstacle: Obstacle = no_obstacle,
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
                wishes[name] = value
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
        found = []
        for part in self.parts:
            theirs = self._is_theirs(part, situation)
            because = "yours is taken" if theirs else part.left_out(situation)
            found.append(Chosen(part, part.settings(situation), because))
        return found

    def _situation(self, trainer: Mapping[str, Any]) -> Situation:
        return Situation({**self.arguments, **trainer}, self.wishes, self.model)

    @staticmethod
    def _is_theirs(part: Part, situation: Situation) -> bool:
        if part.kind is None:
            return part.name in situation.arguments
        return any(isinstance(callback, part.kind) for callback in situation.given)

    def callbacks(self) -> list[Callback]:
        """Return new callbacks, for a Trainer with no further arguments of weight."""
        found: list[Callback] = self.trainer_kwargs()["callbacks"]
        return found

    def trainer_kwargs(self, **more: Any) -> dict[str, Any]:
        """Return arguments for the Trainer.

        Args:
            more: Arguments of your own, which win. A callback of a class that is in the preset
                stands for the preset's; others follow the preset's, those of this package in the
                order that they need.
        """
        chosen = self.choose(**more)
        if does_not_fit := self._situation(more).does_not_fit:
            rank_zero_warn(does_not_fit)
        ours = [choice.make() for choice in chosen if choice.is_on and choice.part.kind]
        arguments = {
            choice.part.name: choice.settings
            for choice in chosen
            if choice.is_on and not choice.part.kind
        }
        given = self._situation(more).given
        return {
            **arguments,
            **self.arguments,
            **more,
            "callbacks": sorted([*ours, *given], key=_rank),
        }

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
        more = dict(more)
        given: list[dict[str, Any]] = list(more.pop("callbacks", None) or [])
        theirs = {_class_name(entry) for entry in given}
        arguments: dict[str, Any] = {}
        callbacks: list[dict[str, Any]] = []
        for choice in filter(lambda choice: choice.is_on, self.choose(**more)):
            if choice.part.kind is None:
                arguments[choice.part.name] = choice.settings
            elif choice.part.name not in theirs:
                callbacks.append(choice.described())
        callbacks = sorted([*callbacks, *given], key=lambda entry: rank_of(_class_name(entry)))
        found = {**arguments, **self.arguments, **more, "callbacks": callbacks}
        plain: dict[str, Any] = json.loads(json.dumps(found, default=_refuse))
        return plain

    def to_yaml(self, **more: Any) -> str:
        """Return a configuration that any LightningCLI can read; see :meth:`to_dict`."""
        import yaml  # type: ignore[import-untyped]

        trainer = self.to_dict(**more)
        head = f"# preset {self.name!r} of lightning_opt on this machine\n"
        text: str = yaml.safe_dump({"trainer": trainer}, sort_keys=False)
        return head + text

    def __repr__(self) -> str:
        changes = {**self.wishes, **self.arguments}
        return f"preset({self.name!r}{', ' if changes else ''}{written(changes)})"

    def __str__(self) -> str:
        return str(self.describe())


def _rank(callback: Callback) -> int:
    names = [base.__name__ for base in type(callback).__mro__]
    return min((rank_of(name) for name in names), default=len(ORDER))


def rank_of(name: str) -> int:
    """Return the place in :data:`ORDER` of a callback by the name of its class."""
    return ORDER.index(name) if name in ORDER else len(ORDER)


def _class_name(entry: Mapping[str, Any]) -> str:
    return str(entry["class_path"]).rpartition(".")[2]


def _refuse(value: object) -> NoReturn:
    raise ValueError(
        f"A configuration file cannot hold {value!r}. Give it as a name or as "
        "{'class_path': ..., 'init_args': {...}}."
    )
