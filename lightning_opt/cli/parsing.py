"""Argument parsing of tune, bench, profile and doctor."""

from __future__ import annotations

import argparse
import inspect
import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from jsonargparse import ActionConfigFile, ArgumentError, DefaultHelpFormatter, Namespace  # type: ignore[attr-defined]
from torch.optim import Optimizer

from lightning_opt.cli.main import UsageError
from lightning_opt.cli.targets import Recipe, Targets, cli_of, no_data
from lightning_opt.presets.preset import Preset
from lightning_opt.presets.registry import preset, preset_names
from lightning_opt.trainer.lightning import DEFAULT

if TYPE_CHECKING:
    from lightning.pytorch.cli import LightningArgumentParser

TARGETS = """\
model and data:
  module:Class or path/to/file.py:Class. Arguments of a class: --model.width 64. Without --data the
  model's own loaders are used. --config takes a LightningCLI configuration that names both.
"""


PRESETS = ", ".join(preset_names())

DEFAULTS = inspect.signature(DEFAULT.Trainer).parameters


class HelpFormatter(argparse.RawDescriptionHelpFormatter, DefaultHelpFormatter):
    """Keeps the line breaks of examples."""


class Job(NamedTuple):
    """A parsed command line.

    Attributes:
        model: Creates the LightningModule.
        data: Creates the data; None if the model has its own loaders.
        trainer: The given Trainer arguments, as plain values.
        seed: The random seed.
        options: All parsed options, including the command's own.
    """

    model: Recipe
    data: Recipe | Callable[[], None]
    trainer: dict[str, Any]
    seed: int
    options: Namespace


def make_parser(
    argv: Sequence[str], command: str, description: str, examples: str
) -> tuple[LightningArgumentParser, Targets]:
    """Return a parser with all options of LightningCLI, and the command line's targets.

    The help shows only the command's own options, which the caller adds.
    """
    targets = Targets(argv)
    package = targets.package
    cli = cli_of(package)
    parser: LightningArgumentParser = cli.LightningArgumentParser(
        prog=f"lightning-opt {command}",
        usage=f"lightning-opt {command} [options] [model | config.yaml] [--data data]",
        description=description,
        epilog=f"{TARGETS}\nexamples:\n{examples}",
        formatter_class=HelpFormatter,
        exit_on_error=False,
    )
    bases = {"model": package.LightningModule, "data": package.LightningDataModule}
    for kind, base in bases.items():
        parser.add_lightning_class_args(base, kind, subclass_mode=True, required=False)
    parser.add_lightning_class_args(package.Trainer, "trainer")
    parser.add_optimizer_args((Optimizer,))
    parser.add_lr_scheduler_args(cli.LRSchedulerTypeTuple)
    parser.add_argument("--ckpt_path", default=None)
    parser.add_argument("--weights_only", default=None)
    hide_all(parser)
    group = parser.add_argument_group(
        "training",
        "--model, --data: see below. --trainer.<argument>: any argument of lightning.Trainer, such "
        "as --trainer.devices 2 (lightning-opt fit --help lists them).",
    )
    group.add_argument("--seed_everything", type=int | bool, default=0, help="The random seed.")
    parser.add_argument(
        "-c",
        "--config",
        action=ActionConfigFile,
        help="A LightningCLI configuration. May be repeated; later ones win.",
    )
    return parser, targets


def add_options(parser: Any, *options: tuple[str, Any, Any, str, str]) -> None:
    """Add options, each as name, type, default, placeholder (or empty) and help text."""
    for name, kind, default, placeholder, text in options:
        metavar: dict[str, Any] = {"metavar": placeholder} if placeholder else {}
        parser.add_argument(name, type=kind, default=default, help=text, **metavar)


def hide_all(parser: LightningArgumentParser) -> None:
    """Hide the options added so far from the help, except --help."""
    for action in parser._actions:
        if action.dest != "help":
            action.help = argparse.SUPPRESS
    for group in parser._action_groups[2:]:  # the first two are argparse's
        if all(action.help == argparse.SUPPRESS for action in group._group_actions):
            group.title = group.description = None


def add_preset(parser: Any, default: str | None) -> None:
    add_options(
        parser,
        ("--preset", str | None, default, "NAME", f"Preset to train with: {PRESETS}."),
        ("--without", str | None, None, "NAMES",
         "Comma-separated parts of the preset to exclude."),
    )  # fmt: skip


def parse_job(parser: LightningArgumentParser, targets: Targets) -> Job:
    """Parse the command line; raise :class:`UsageError` if it is wrong or has no model."""
    try:
        config = parser.parse_args(targets.argv)
    except ArgumentError as error:
        raise UsageError(f"{_shorten(str(error))} {parser.prog} --help lists options.") from error
    given = config.as_dict()
    model = targets.recipe(given.get("model"), given.get("optimizer"), given.get("lr_scheduler"))
    if model is None:
        raise UsageError(
            f"{parser.prog} needs a model: module:Class, path/to/file.py:Class or a configuration "
            f"of LightningCLI. {parser.prog} --help has examples."
        )
    data = targets.recipe(given.get("data"))
    trainer, seed = given_arguments(config.trainer), config.seed_everything
    return Job(model, data or no_data, trainer, 0 if isinstance(seed, bool) else seed, config)


def _shorten(text: str) -> str:
    """Shorten a parser's error: drop the list of types that the parser tried."""
    match = re.search(
        r"Problem with given class_path '(.+?)':\s*(.*?)\s*(?=\n\s*- |\Z)", text, re.S
    )
    message = f"{match[1]}: {match[2]}" if match else text
    message = " ".join(message.replace("Parser key ", "").split())
    return f"{message.rstrip('.')}."


def given_arguments(trainer: Namespace) -> dict[str, Any]:
    """Return the Trainer arguments that differ from their defaults, as plain values."""
    given = trainer.as_dict().items()
    return {name: value for name, value in given if value != DEFAULTS[name].default}


def chosen_preset(name: str | None, without: str | None) -> Preset | None:
    """Return the preset of ``--preset`` without the parts of ``--without``; None if not given."""
    if name is not None:
        return preset_of(name, without)
    if without is not None:
        raise UsageError("--without excludes parts of a preset, so it needs --preset.")
    return None


def preset_of(name: str, without: str | None = None) -> Preset:
    """Return a preset without the comma-separated parts in ``without``."""
    try:
        return preset(name, **dict.fromkeys(split_names(without)))
    except ValueError as error:
        raise UsageError(str(error)) from error


def split_names(text: str | None) -> list[str]:
    return [name.strip() for name in (text or "").split(",") if name.strip()]
