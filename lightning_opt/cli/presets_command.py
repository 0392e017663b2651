"""``lightning-opt presets``: list, explain and export presets."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from lightning_opt.cli.main import OK, UsageError
from lightning_opt.cli.parsing import (
    HelpFormatter,
    add_options,
    given_arguments,
    hide_all,
    list_of_presets,
    preset_of,
)
from lightning_opt.cli.targets import cli_of
from lightning_opt.core.output.report import Report
from lightning_opt.presets.registry import preset, preset_names
from lightning_opt.trainer.lightning import DEFAULT

if TYPE_CHECKING:
    from lightning.pytorch.cli import LightningArgumentParser

EXAMPLES = """\
examples:
  lightning-opt presets                              list all presets
  lightning-opt presets advanced                     what it contains on this machine, and why
  lightning-opt presets ultra --trainer.devices 4    what it would contain on four devices
  lightning-opt presets advanced --yaml > trainer.yaml
                                                     a section for any LightningCLI: --config
"""


def make_parser() -> LightningArgumentParser:
    parser: LightningArgumentParser = cli_of(DEFAULT).LightningArgumentParser(
        prog="lightning-opt presets",
        usage="lightning-opt presets [preset] [options]",
        description="Lists presets, explains one on this machine, writes one as YAML.",
        epilog=EXAMPLES,
        formatter_class=HelpFormatter,
    )
    parser.add_lightning_class_args(DEFAULT.Trainer, "trainer")
    hide_all(parser)
    group = parser._action_groups[-1]
    group.title = "situation"
    group.description = "--trainer.<argument>: any argument, such as --trainer.strategy ddp."
    parser.add_argument("preset", nargs="?", help="Preset to explain.")
    parser.add_argument("--yaml", action="store_true", help="Write the preset as YAML.")
    add_options(
        parser, ("--without", str | None, None, "NAMES", "Comma-separated callbacks to leave out.")
    )
    parser.add_argument("--json", action="store_true", help="Write tables as JSON.")
    return parser


def run_presets(argv: Sequence[str]) -> int:
    parser = make_parser()
    config = parser.parse_args(argv)
    if config.yaml and not config.preset:
        raise UsageError("--yaml needs the name of a preset: lightning-opt presets advanced --yaml")
    trainer = given_arguments(config.trainer)
    if config.yaml:
        sys.stdout.write(preset_of(config.preset, config.without).to_yaml(**trainer))
        return OK
    if config.preset:
        report = preset_of(config.preset, config.without).describe(**trainer)
    else:
        report = overview()
    if config.json:
        sys.stdout.write(report.to_json() + "\n")
    else:
        report.print()
    return OK


def overview() -> Report:
    rows = []
    for name in preset_names():
        chosen = preset(name).choose()
        rows.append(
            {
                "preset": name,
                "purpose": preset(name).purpose,
                "here": ", ".join(choice.part.name for choice in chosen if choice.is_on),
                "left out": ", ".join(choice.part.name for choice in chosen if not choice.is_on),
            }
        )
    note = f"lightning-opt presets <name> gives the reasons. Presets: {list_of_presets()}."
    return Report("Presets on this machine", rows, [note])
