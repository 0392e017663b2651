"""``lightning-opt presets``: list, explain and export presets."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from lightning.pytorch import Trainer
from lightning.pytorch.cli import LightningArgumentParser

from lightning_opt.cli.main import OK, UsageError
from lightning_opt.cli.parsing import (
    HelpFormatter,
    add_options,
    given_arguments,
    hide_all,
    list_of_presets,
    preset_of,
)
from lightning_opt.core.output.report import Report
from lightning_opt.presets.registry import preset, preset_names

EXAMPLES = """\
examples:
  lightning-opt presets                              list all presets
  lightning-opt presets advanced                     what it contains on this machine, and why
  lightning-opt presets ultra --trainer.devices 4    what it would contain on four devices
  lightning-opt presets --yaml advanced > trainer.yaml
                                                     a section for any LightningCLI: --config
"""


def make_parser() -> LightningArgumentParser:
    """Return the parser of the command."""
    parser = LightningArgumentParser(
        prog="lightning-opt presets",
        usage="lightning-opt presets [preset] [options]",
        description="Lists presets, explains one on this machine, writes one as YAML.",
        epilog=EXAMPLES,
        formatter_class=HelpFormatter,
    )
    parser.add_lightning_class_args(Trainer, "trainer")
    hide_all(parser)
    group = parser._action_groups[-1]
    group.title = "situation"
    group.description = "--trainer.<argument>: any argument, such as --trainer.strategy ddp."
    parser.add_argument("preset", nargs="?", help="Preset to explain.")
    add_options(
        parser,
        ("--yaml", str | None, None, "PRESET", "Write this preset as YAML."),
        ("--without", str | None, None, "NAMES", "Comma-separated callbacks to leave out."),
    )
    parser.add_argument("--json", action="store_true", help="Write tables as JSON.")
    return parser


def run_presets(argv: Sequence[str]) -> int:
    """Run ``lightning-opt presets``."""
    parser = make_parser()
    config = parser.parse_args(argv)
    if config.preset and config.yaml:
        raise UsageError("Name one preset, either to explain it or to write it as YAML.")
    trainer = given_arguments(config.trainer)
    if config.yaml:
        chosen = preset_of(config.yaml, config.without)
        sys.stdout.write(chosen.to_yaml(**trainer))
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
    """Return a table with one row per preset."""
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
