"""The entry point: dispatches commands and turns errors into one sentence and an exit code.

It imports little, so that ``--help`` is fast.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import sys
import traceback
from collections.abc import Iterator, Sequence

OK = 0
FAILED = 1
USAGE = 2
MISSING = 3
INTERRUPTED = 130

COMMANDS = {
    "fit": "train as LightningCLI does, with a preset",
    "presets": "list presets, explain one on this machine, write one as YAML",
    "tune": "try optimisations on your model and data, and save those that help",
    "bench": "measure presets and configurations against plain Lightning",
    "profile": "measure where a step's time goes",
    "doctor": "train some steps and report problems",
}

HELP = f"""usage: lightning-opt [-h] [--version] <command> ...

Makes your LightningModule train faster, in less memory and more safely.

commands:
{chr(10).join(f"  {name:9}{purpose}" for name, purpose in COMMANDS.items())}

A model is module:Class, path/to/file.py:Class or a LightningCLI configuration file:

  lightning-opt presets advanced
  lightning-opt fit my_project:Model --data my_project:Data --preset advanced --trainer.max_epochs 3
  lightning-opt tune train.py:Model --data train.py:Data --budget 2m --out tuned
  lightning-opt fit --config config.yaml --config tuned/trainer.yaml

lightning-opt <command> --help lists options. --debug, anywhere, shows the traceback of an error.

exit codes: {OK} done; {FAILED} the run failed; {USAGE} wrong usage; {MISSING} a package is missing;
{INTERRUPTED} interrupted.
"""


class UsageError(ValueError):
    """The command line is wrong."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code.

    Args:
        arguments: The arguments after the program's name; None for ``sys.argv``.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    debug = "--debug" in arguments
    argv = [word for word in arguments if word != "--debug"]
    try:
        with _environment():
            return _dispatch(argv)
    except SystemExit as error:
        # Lightning raises it on an interrupt, parsers on --help and wrong usage.
        if isinstance(error.__context__, KeyboardInterrupt):
            return _interrupted()
        return error.code if isinstance(error.code, int) else (OK if error.code is None else FAILED)
    except KeyboardInterrupt:
        return _interrupted()
    except Exception as error:  # noqa: BLE001 - every error is printed as one sentence
        return _report_error(error, debug)


def _interrupted() -> int:
    sys.stderr.write("Interrupted.\n")
    return INTERRUPTED


def _dispatch(argv: list[str]) -> int:
    if not argv or argv[0] in ("-h", "--help", "help"):
        sys.stdout.write(HELP)
        return OK if argv else USAGE
    if argv[0] == "--version":
        from lightning_opt import __version__

        sys.stdout.write(f"lightning_opt {__version__}\n")
        return OK
    name = argv[0]
    if name not in COMMANDS:
        from lightning_opt.core.arguments import did_you_mean

        raise UsageError(
            f"There is no command {name!r}{did_you_mean(name, COMMANDS)} The commands are "
            f"{', '.join(COMMANDS)}; lightning-opt --help describes them."
        )
    if importlib.util.find_spec("jsonargparse") is None:
        sys.stderr.write(
            f"error: lightning-opt {name} needs jsonargparse, which is not installed: "
            "pip install 'lightning-opt[cli]'.\n"
        )
        return MISSING
    file = "preset_commands" if name in ("fit", "presets") else "measuring_commands"
    command = importlib.import_module(f"lightning_opt.cli.{file}")
    return int(getattr(command, f"run_{name}")(argv[1:]))


@contextlib.contextmanager
def _environment() -> Iterator[None]:
    """Add the working directory to `sys.path` and silence Lightning's jsonargparse warnings."""
    from unittest import mock  # slow to import

    path, folder = sys.path, os.getcwd()  # noqa: PTH109 - a str, as in sys.path
    path = path if {folder, ""} & {*path} else [folder, *path]
    quiet = {"JSONARGPARSE_DEPRECATION_WARNINGS": "off"} | os.environ
    with mock.patch.object(sys, "path", path), mock.patch.dict(os.environ, quiet):
        yield


def _report_error(error: Exception, debug: bool) -> int:
    if debug:
        traceback.print_exc()
    if isinstance(error, UsageError):
        sys.stderr.write(f"error: {error}\n")
        return USAGE
    text = str(error).strip() or "no message"
    kind = type(error).__name__
    # This package's messages are full sentences; other messages need the error's type.
    sentence = text if kind in ("ValueError", "FitFailed", "BaselineFailed") else f"{kind}: {text}"
    sys.stderr.write(f"error: {sentence}\n")
    if not debug:
        sys.stderr.write("Run the same command with --debug for the traceback.\n")
    return FAILED
