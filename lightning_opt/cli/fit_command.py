"""``lightning-opt fit``: LightningCLI, with presets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lightning.pytorch import Callback, Trainer
from lightning.pytorch.cli import (
    ArgsType,
    LightningArgumentParser,
    LightningCLI,
)

from lightning_opt.cli.errors import OK, UsageError
from lightning_opt.cli.parsing import HelpFormatter, list_of_presets, plain, preset_of
from lightning_opt.cli.targets import Targets
from lightning_opt.presets.preset import rank_of

DESCRIPTION = """\
Trains as LightningCLI does, with a preset of lightning_opt. All of LightningCLI is there: --config,
--model, --data, --trainer.*, --optimizer, --lr_scheduler, --ckpt_path to resume, --print_config.
What is given by --trainer.* wins over the preset. The configuration that is saved beside the logs
has the preset written out, and runs under any LightningCLI."""

USAGE = "lightning-opt fit [options] [model | config.yaml] [--data data]"

EXAMPLES = """\
examples:
  lightning-opt fit my_project:Model --data my_project:Data --preset advanced --trainer.max_epochs 3
  lightning-opt fit train.py --preset ultra --without MicroBatching --trainer.precision bf16-mixed
  lightning-opt fit config.yaml --preset basic --trainer.deterministic true --seed_everything 1
  lightning-opt fit config.yaml --ckpt_path last.ckpt
  lightning-opt fit train.py --preset basic --trainer.strategy ddp_topk --trainer.devices 2

A name with a colon is a module or a file and a class in it; LightningCLI's own way of naming,
package.module.Class, works too.
"""


class PresetCLI(LightningCLI):
    """A LightningCLI with ``--preset`` and ``--without``.

    Takes the place of LightningCLI in a script of one's own.
    """

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add the options."""
        group = parser.add_argument_group("lightning_opt", "Presets:")
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

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        """Make the Trainer with the preset's callbacks and arguments."""
        config = self.config if self.subcommand is None else self.config[self.subcommand]
        # What is saved is read by a LightningCLI that knows neither.
        name, without = config.pop("preset"), config.pop("without")
        given = self._given()
        if name is None:
            return super().instantiate_trainer(**given, **kwargs)
        preset = preset_of(name, without).for_model(self.model)
        extra = self._extra_callbacks()
        theirs = [*_as_list(given.pop("callbacks", None)), *extra]
        chosen = [choice for choice in preset.choose(**given, callbacks=theirs) if choice.is_on]
        arguments = preset.trainer_kwargs(**given, callbacks=theirs)
        arguments["callbacks"] = [
            callback
            for callback in arguments["callbacks"]
            if not any(callback is other for other in extra)
        ]
        config.trainer.callbacks = sorted(
            [
                *(choice.described() for choice in chosen if choice.part.is_callback),
                *_as_list(plain(config.trainer.callbacks)),
            ],
            key=lambda entry: rank_of(entry["class_path"].rpartition(".")[2]),
        )
        for choice in chosen:
            if not choice.part.is_callback:
                config.trainer[choice.part.name] = choice.settings
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
        return given

    def _extra_callbacks(self) -> list[Callback]:
        """Return the callbacks that LightningCLI appends by itself."""
        keys = self._parser(self.subcommand).callback_keys
        return [
            *(self._get(self.config_init, key) for key in keys),
            *_as_list(self.trainer_defaults.get("callbacks")),
        ]


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
            "fit": {"usage": USAGE, "description": DESCRIPTION, "epilog": EXAMPLES},
        },
    )
    return OK


def _as_list(value: Any) -> list[Any]:
    if value is None:
        return []
    return list(value) if isinstance(value, (list, tuple)) else [value]
