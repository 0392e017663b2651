"""The commands ``fit``, which is LightningCLI with presets, and ``presets``."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from lightning_opt.cli.main import OK, UsageError
from lightning_opt.cli.parsing import (
    HelpFormatter,
    add_preset,
    chosen_preset,
    given_arguments,
    hide_all,
    preset_of,
)
from lightning_opt.cli.targets import Targets, cli_of
from lightning_opt.core.output.report import Report
from lightning_opt.presets.preset import Part, join
from lightning_opt.presets.registry import preset, preset_names
from lightning_opt.profiling.run_report.run_report import RunReport
from lightning_opt.trainer.lightning import DEFAULT

if TYPE_CHECKING:
    from lightning.pytorch.cli import ArgsType, LightningArgumentParser

FIT = """\
Trains as LightningCLI does, with all of its options and a preset; --trainer.* overrides the preset.
The configuration saved with the logs contains the preset's parts and works with any LightningCLI.
The page report.html, in the same folder, describes the run."""

FIT_USAGE = "lightning-opt fit [options] [model | config.yaml] [--data data]"

FIT_EXAMPLES = """\
examples:
  lightning-opt fit my_project:Model --data my_project:Data --preset advanced --trainer.max_epochs 3
  lightning-opt fit config.yaml --preset basic --trainer.strategy ddp_topk --trainer.devices 2

module:Class names a class in a module, file.py:Class one in a file. LightningCLI's own notation,
package.module.Class, works too.
"""


def fit_class(base: Any) -> Any:
    class Fit(base):  # type: ignore[misc]
        """A LightningCLI with ``--preset`` and ``--without``, and only the subcommand ``fit``."""

        def __reduce__(self) -> tuple[Any, ...]:
            """Pickle as the base class: a spawned process cannot import a local class."""
            return object.__new__, (base,), vars(self)

        @staticmethod
        def subcommands() -> dict[str, set[str]]:
            return {"fit": base.subcommands()["fit"]}

        def parse_arguments(self, parser: LightningArgumentParser, args: ArgsType) -> None:
            """Parse the command line without LightningCLI's warning about ``sys.argv``."""
            self.config = parser.parse_args(args)  # type: ignore[arg-type]

        def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
            add_preset(parser.add_argument_group("lightning_opt", "Presets:"), None)

        def instantiate_trainer(self, **kwargs: Any) -> Any:
            config = self.config.fit
            # Remove them, because a plain LightningCLI cannot read a configuration that has them.
            name, without = config.pop("preset"), config.pop("without")
            preset = chosen_preset(name, without)
            if preset is not None:
                instances = self.config_init.fit.trainer
                given = {name: instances[name] for name in given_arguments(config.trainer)}
                entries = {"callbacks": config.trainer.as_dict()["callbacks"]}
                chosen = join(preset.choose(**given), Part.to_config, entries)
                for argument, value in chosen.items():
                    config.trainer[argument] = value
                kwargs |= preset.trainer_kwargs(**given)
            trainer = super().instantiate_trainer(**kwargs)
            if not any(isinstance(callback, RunReport) for callback in trainer.callbacks):
                trainer.callbacks.insert(0, RunReport())
            return trainer

    return Fit


def run_fit(argv: Sequence[str]) -> int:
    targets = Targets(argv)
    fit_class(cli_of(targets.package).LightningCLI)(
        args=["fit", *targets.argv],
        seed_everything_default=0,
        parser_kwargs={
            "prog": "lightning-opt",
            "formatter_class": HelpFormatter,  # also for the subcommand
            "fit": {"usage": FIT_USAGE, "description": FIT, "epilog": FIT_EXAMPLES},
        },
    )
    return OK


PRESETS_EXAMPLES = """\
examples:
  lightning-opt presets advanced                     what it contains on this machine, and why
  lightning-opt presets advanced --yaml > trainer.yaml
                                                     for any LightningCLI: --config trainer.yaml
"""


def run_presets(argv: Sequence[str]) -> int:
    parser: LightningArgumentParser = cli_of(DEFAULT).LightningArgumentParser(
        prog="lightning-opt presets",
        usage="lightning-opt presets [preset] [options]",
        description="Lists presets, explains one on this machine, writes one as YAML.",
        epilog=PRESETS_EXAMPLES,
        formatter_class=HelpFormatter,
    )
    parser.add_lightning_class_args(DEFAULT.Trainer, "trainer")
    hide_all(parser)
    parser.add_argument_group(
        "trainer", "--trainer.<argument>: any argument, such as --trainer.strategy ddp."
    )
    parser.add_argument("preset", nargs="?", help="Preset to explain.")
    parser.add_argument("--yaml", action="store_true", help="Write the preset as YAML.")
    config = parser.parse_args(argv)
    if config.yaml and not config.preset:
        raise UsageError("--yaml needs the name of a preset: lightning-opt presets advanced --yaml")
    trainer = given_arguments(config.trainer)
    if config.yaml:
        sys.stdout.write(preset_of(config.preset).to_yaml(**trainer))
        return OK
    if config.preset:
        report = preset_of(config.preset).describe(**trainer)
    else:
        rows = [{"preset": name, "purpose": preset(name).purpose} for name in preset_names()]
        note = "lightning-opt presets <name> explains one on this machine."
        report = Report("Presets", rows, [note])
    report.print()
    return OK
