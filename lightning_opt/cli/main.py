"""From the words of a command line to an exit code: no traceback unless it is asked for.

Little is imported here, since Ctrl-C is Python's own affair until :func:`main` begins.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib.util
import os
import signal
import sys
from collections.abc import Iterator, Sequence

from lightning_opt.cli.errors import (
    FAILED,
    INTERRUPTED,
    MISSING,
    OK,
    USAGE,
    UsageError,
    end_at_once,
    say_interrupted,
)

COMMANDS = {
    "fit": "train as LightningCLI does, with a preset",
    "presets": "list presets, say what is in one here and why, write one as YAML",
    "tune": "try optimisations on your model and data, and write down what pays",
    "bench": "measure presets and configurations against plain Lightning",
    "profile": "say where the time of a step goes",
    "doctor": "train some steps and say what to look at",
}

HELP = f"""usage: lightning-opt [-h] [--version] <command> ...

Makes a LightningModule of yours train faster, in less memory and more safely.

commands:
{chr(10).join(f"  {name:9}{text}" for name, text in COMMANDS.items())}

A model is module:Class, path/to/file.py:Class, path/to/file.py if there is only one in it, or a
configuration of LightningCLI:

  lightning-opt presets advanced
  lightning-opt fit my_project:Model --data my_project:Data --preset advanced --trainer.max_epochs 3
  lightning-opt tune train.py --budget 2m --out tuned
  lightning-opt fit --config config.yaml --config tuned/trainer.yaml

lightning-opt <command> --help says more. --debug, anywhere, shows the traceback of an error.

exit codes: {OK} done; {FAILED} it was tried and failed; {USAGE} not understood; {MISSING} a package
is missing; {INTERRUPTED} interrupted.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code.

    Args:
        arguments: Without the name of the program; None for those of this process.
    """
    if arguments is not None:
        return _run(arguments)
    codes: list[int] = []
    atexit.register(_leave, codes)  # the first to be registered is the last to run
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, end_at_once)
    codes.append(_run(sys.argv[1:]))
    return codes[0]


def _leave(codes: list[int]) -> None:
    """End an interrupted process at once: to take its modules apart takes seconds."""
    if codes == [INTERRUPTED]:
        sys.stdout.flush()
        os._exit(INTERRUPTED)


def _run(arguments: Sequence[str]) -> int:
    debug = "--debug" in arguments
    words = [word for word in arguments if word != "--debug"]
    try:
        with _surroundings():
            return _dispatch(words)
    except SystemExit as end:
        # Lightning ends the process when it is interrupted; parsers do so for --help and mistakes.
        if isinstance(end.__context__, KeyboardInterrupt):
            return say_interrupted()
        return end.code if isinstance(end.code, int) else (OK if end.code is None else FAILED)
    except KeyboardInterrupt:
        return say_interrupted()
    except Exception as error:  # noqa: BLE001 - a sentence for whatever comes out of a run
        if debug:
            import traceback

            traceback.print_exc()
        return _say(error, debug)


def _dispatch(words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help", "help"):
        sys.stdout.write(HELP)
        return OK if words else USAGE
    if words[0] == "--version":
        from lightning_opt import __version__

        sys.stdout.write(f"lightning_opt {__version__}\n")
        return OK
    name = words[0]
    if name not in COMMANDS:
        from lightning_opt.core.arguments import did_you_mean

        raise UsageError(
            f"There is no command {name!r}{did_you_mean(name, COMMANDS)} There are "
            f"{', '.join(COMMANDS)}; lightning-opt --help says what they do."
        )
    if importlib.util.find_spec("jsonargparse") is None:
        sys.stderr.write(
            f"error: lightning-opt {name} needs jsonargparse, which is not installed: "
            "pip install 'lightning-opt[cli]'.\n"
        )
        return MISSING
    command = importlib.import_module(f"lightning_opt.cli.{name}_command")
    return int(command.run(words[1:]))


@contextlib.contextmanager
def _surroundings() -> Iterator[None]:
    """Have modules of the working directory found, and Lightning's use of jsonargparse be quiet."""
    from unittest import mock  # which takes long, so only when Ctrl-C is heard

    path, folder = sys.path, os.getcwd()  # noqa: PTH109 - as it is written, not resolved
    path = path if {folder, ""} & {*path} else [folder, *path]
    quiet = {"JSONARGPARSE_DEPRECATION_WARNINGS": "off"} | os.environ
    with mock.patch.object(sys, "path", path), mock.patch.dict(os.environ, quiet):
        yield


def _say(error: Exception, debug: bool) -> int:
    if isinstance(error, UsageError):
        sys.stderr.write(f"error: {error}\n")
        return USAGE
    text = str(error).strip() or "it gave no reason"
    kind = type(error).__name__
    # Errors of this package are sentences; of others the kind says as much as the text.
    sentence = text if kind in ("ValueError", "FitFailed", "BaselineFailed") else f"{kind}: {text}"
    sys.stderr.write(f"error: {sentence}\n")
    if not debug:
        sys.stderr.write("The same command with --debug shows where it came from.\n")
    return FAILED
