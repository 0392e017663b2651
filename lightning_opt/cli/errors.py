"""What the command ends with, and the errors that say so."""

from __future__ import annotations

OK, FAILED, USAGE, MISSING, INTERRUPTED = 0, 1, 2, 3, 130


class UsageError(ValueError):
    """The command line says something that cannot be done."""

    code = USAGE


class MissingExtraError(ImportError):
    """A package is missing that an extra of this one brings."""

    code = MISSING
