"""``lightning-opt fit``: LightningCLI, with presets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import yaml  # type: ignore[import-untyped]
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.cli import (
    ArgsType,
    LightningArgumentParser,
    LightningCLI,
    SaveConfigCallback,
)

from lightning_opt.cli.errors import OK, UsageError
from lightning_opt.cli.parsing import HelpFormatter, list_of_presets, plain, preset_of
from lightning_opt.cli.targets import Targets
from lightning_opt.presets.parts import Chosen
from lightning_opt.presets.preset import path_of, rank_of

OWN = ("preset", "without", "precision", "deterministic")
"""What the parser has besides LightningCLI's own."""

SHORT = ("precision", "deterministic")
"""Options that stand for arguments of the Trainer."""

DESCRIPTION = """\
Trains as LightningCLI does, with a preset of lightning_opt. All of LightningCLI is there: --config,
--model, --data, --trainer.*, --optimizer, --lr_scheduler, --ckpt_path to resume, --print_config.
What is given by --trainer.* wins over the preset. The configuration that is saved beside the logs
has the preset written out, and runs under any LightningCLI."""

EXAMPLES = """\
examples:
  lightning-opt fit my_project:Model --data my_project:Data --preset advanced --trainer.max_epochs 3
  lightning-opt fit train.py --preset ultra --without MicroBatching --precision bf16-mixed
  lightning-opt fit config.yaml --preset basic --deterministic --seed_everything 1
  lightning-opt fit config.yaml --ckpt_path last.ckpt
  lightning-opt fit train.py --preset basic --trainer.strategy ddp_topk --trainer.devices 2

A name with a colon is a module or a file and a class in it; LightningCLI's own way of naming,
package.module.Class, works too.
"""


class _WithoutOwn:
    """Stands for a parser that saves, and leaves out what a plain LightningCLI does not know."""

    def __init__(self, parser: LightningArgumentParser) -> None:
        self._parser = parser

    def save(self, config: Any, path: str, overwrite: bool = False, **more: Any) -> None:
        """Write the configuration to a file."""
        text = self._parser.dump(config, skip_none=False, format="yaml")
        content = {name: v for name, v in yaml.safe_load(text).items() if name not in OWN}
        with open(path, "w" if overwrite else "x", encoding="utf-8") as file:  # noqa: PTH123
            yaml.safe_dump(content, file, sort_keys=False)


class SavePlainConfig(SaveConfigCallback):
    """Saves a configuration that any LightningCLI can read, with the preset written out."""

    def __init__(self, parser: LightningArgumentParser, config: Any, **settings: Any) -> None:
        super().__init__(_WithoutOwn(parser), config, **settings)  # type: ignore[arg-type]


class PresetCLI(LightningCLI):
    """A LightningCLI with ``--preset``, ``--without``, ``--precision`` and ``--deterministic``.

    Takes the place of LightningCLI in a script of one's own.

    Args:
        settings: As LightningCLI has them.
    """

    def __init__(self, *classes: Any, **settings: Any) -> None:
        settings.setdefault("save_config_callback", SavePlainConfig)
        super().__init__(*classes, **settings)

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add the options."""
        group = parser.add_argument_group("lightning_opt", "Presets, and short forms:")
        group.add_argument(
            "--preset",
            type=str | None,
            default=None,
            help=f"Callbacks and Trainer arguments that fit this machine: {list_of_presets()}. "
            "`lightning-opt presets <name>` says what is in one.",
        )
        group.add_argument(
            "--without",
            type=str | None,
            default=None,
            help="Parts of the preset to leave out, with commas: MicroBatching,CompileModel.",
        )
        group.add_argument(
            "--precision", type=str | int | None, default=None, help="As --trainer.precision."
        )
        group.add_argument(
            "--deterministic",
            action="store_true",
            help="As --trainer.deterministic true; --seed_everything sets the seed.",
        )

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        """Make the Trainer with the preset's callbacks and arguments."""
        given = self._given()
        name = self._get(self.config, "preset")
        if name is None:
            self._write_out({key: given[key] for key in SHORT if key in given})
            return super().instantiate_trainer(**given, **kwargs)
        preset = preset_of(name, self._get(self.config, "without")).for_model(self.model)
        extra = self._extra_callbacks()
        own = [*_as_list(given.pop("callbacks", None))]
        chosen = preset.choose(**given, callbacks=[*own, *extra])
        arguments = preset.trainer_kwargs(**given, callbacks=[*own, *extra])
        arguments["callbacks"] = [
            callback
            for callback in arguments["callbacks"]
            if not any(callback is other for other in extra)
        ]
        self._write_out({**self._callbacks_of(chosen), **self._arguments_of(chosen, given)})
        return super().instantiate_trainer(**arguments, **kwargs)

    def _given(self) -> dict[str, Any]:
        """Return what the user says of the Trainer, callbacks and others made."""
        config = self._get(self.config, "trainer")
        defaults = self._parser(self.subcommand).get_defaults().trainer
        made = self._get(self.config_init, "trainer")
        given = {
            name: made[name]
            for name, value in vars(config).items()
            if value != vars(defaults).get(name) or name in self.trainer_defaults
        }
        given.pop("callbacks", None)
        if made["callbacks"]:
            given["callbacks"] = made["callbacks"]
        precision = self._get(self.config, "precision")
        if precision is not None:
            if given.get("precision") not in (None, precision):
                raise UsageError(
                    f"--precision {precision} and --trainer.precision {given['precision']} differ; "
                    "give one of them."
                )
            given["precision"] = precision
        if self._get(self.config, "deterministic"):
            given["deterministic"] = given.get("deterministic") or True
        return given

    def _extra_callbacks(self) -> list[Callback]:
        """Return the callbacks that LightningCLI appends by itself."""
        keys = self._parser(self.subcommand).callback_keys
        return [
            *(self._get(self.config_init, key) for key in keys),
            *_as_list(self.trainer_defaults.get("callbacks")),
        ]

    def _callbacks_of(self, chosen: Sequence[Chosen]) -> dict[str, Any]:
        """Return all callbacks as a configuration has them."""
        theirs = _as_list(plain(self._get(self.config, "trainer").callbacks))
        ours = [
            {"class_path": path_of(choice.part.kind), "init_args": dict(choice.settings)}
            for choice in chosen
            if choice.is_on and choice.part.kind is not None
        ]
        found = sorted(
            [*ours, *theirs], key=lambda entry: rank_of(entry["class_path"].rpartition(".")[2])
        )
        return {"callbacks": found}

    @staticmethod
    def _arguments_of(chosen: Sequence[Chosen], given: Mapping[str, Any]) -> dict[str, Any]:
        """Return the preset's arguments of the Trainer, and what was given in a short form."""
        preset = {
            choice.part.name: choice.settings
            for choice in chosen
            if choice.is_on and not choice.part.is_callback
        }
        return {**preset, **{name: given[name] for name in SHORT if name in given}}

    def _write_out(self, trainer: Mapping[str, Any]) -> None:
        """Have the configuration that is saved say what the options came to."""
        change: dict[str, Any] = {"trainer": dict(trainer)}
        nested = change if self.subcommand is None else {self.subcommand: change}
        self.config = self.parser.parse_object(nested, self.config)


class _Fit(PresetCLI):
    """The command, which has no other subcommand than ``fit``."""

    @staticmethod
    def subcommands() -> dict[str, set[str]]:
        return {"fit": LightningCLI.subcommands()["fit"]}

    def parse_arguments(self, parser: LightningArgumentParser, args: ArgsType) -> None:
        # LightningCLI would warn of the arguments of this process.
        self.config = parser.parse_args(args)  # type: ignore[arg-type]


def run(words: Sequence[str]) -> int:
    """Run the command."""
    targets = Targets()
    translated = targets.translate(words)
    if targets.functions:
        kind, target = next(iter(targets.functions.items()))
        raise UsageError(
            f"--{kind} {target} is a function, and fit needs a class, whose arguments can be given "
            f"as --{kind}.<name>."
        )
    _Fit(
        args=["fit", *translated],
        seed_everything_default=0,
        parser_kwargs={
            "prog": "lightning-opt",
            "formatter_class": HelpFormatter,  # of the subcommand, too
            "fit": {"description": DESCRIPTION, "epilog": EXAMPLES},
        },
    )
    return OK


def _as_list(value: Any) -> list[Any]:
    if value is None:
        return []
    return list(value) if isinstance(value, (list, tuple)) else [value]
