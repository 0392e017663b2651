"""What the command ends with, and the error for what it cannot do."""

from __future__ import annotations

import os
import signal
import sys

OK, FAILED, USAGE, MISSING, INTERRUPTED = 0, 1, 2, 3, 130


class UsageError(ValueError):
    """The command line says something that cannot be done."""


def say_interrupted() -> int:
    """Say that Ctrl-C was heard, and return the exit code."""
    sys.stderr.write("Interrupted.\n")
    sys.stderr.flush()
    return INTERRUPTED


def end_at_once(*_: object) -> None:
    """Handle Ctrl-C while modules are imported: some swallow a KeyboardInterrupt."""
    os._exit(say_interrupted())


def begin() -> None:
    """Have Ctrl-C end in good order what begins now."""
    if signal.getsignal(signal.SIGINT) is end_at_once:
        signal.signal(signal.SIGINT, signal.default_int_handler)
