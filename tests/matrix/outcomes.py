"""Outcomes of the cells of the matrix and the zoo: how they are found and compared."""

import traceback
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

Weights = dict[str, Tensor]

Cells = dict[str, str]
"""Outcomes of one row, by column."""

ORDER = ("identical", "close", "changed")
"""Outcomes of cells that work, best first."""


def largest_difference(a: Weights, b: Weights) -> float:
    """Return the largest difference of two corresponding elements."""
    if a.keys() != b.keys():
        raise RuntimeError(f"The weights have different names: {sorted(a.keys() ^ b.keys())}.")
    largest = 0.0
    for name, value in a.items():
        other = b[name]
        differs = (value != other) & ~(value.isnan() & other.isnan())  # equal infinities are equal
        if differs.any():
            largest = max(largest, float((value - other)[differs].abs().max()))
    return largest


def describe_error(error: Exception, has_begun: bool) -> str:
    """Return the outcome of a cell that raised, before its first step or in training."""
    message = " ".join(str(error).split())
    last = traceback.extract_tb(error.__traceback__)[-1]
    if has_begun:
        where = f"{Path(last.filename).name}:{last.lineno}"
        return f"fails: {type(error).__name__} in training, from {where}: {message}"
    # Only errors raised by this package or Lightning are refusals.
    packages = ("/lightning_opt/", "/lightning/", "/pytorch_lightning/")
    if any(package in last.filename for package in packages):
        return f"refused: {message}"
    return f"fails: {type(error).__name__} from {Path(last.filename).name}: {message}"


def failures(rows: Mapping[str, Cells]) -> list[str]:
    """Return a line for each cell that fails."""
    return [
        f"{label}: {column}: {outcome}"
        for label, cells in rows.items()
        for column, outcome in cells.items()
        if outcome.startswith("fails")
    ]


def differences(recorded: Mapping[str, Cells], found: Mapping[str, Cells]) -> list[str]:
    """Return a line for each cell that was run and is worse than recorded."""
    lines = []
    for label, cells in found.items():
        for column, now in cells.items():
            before = recorded.get(label, {}).get(column, "untested")
            works = before in ORDER and now in ORDER
            if now != before and not (works and ORDER.index(now) <= ORDER.index(before)):
                lines.append(f"{label}: {column}: recorded as {before!r}, now {now!r}")
    return lines
