"""The record of the matrix: read, written and compared."""

import json
from pathlib import Path
from typing import Any

from tests.matrix.cells import STRATEGIES, Cells, conditions_of, run_strategy
from tests.matrix.subjects import CHANGES, RESUMES_OTHERWISE, Subject, find_subjects

FILE = Path(__file__).parents[2] / "docs" / "matrix.json"
AGAIN = "Run `make matrix`, look at what changed, and commit docs/matrix.json."

ORDER = ("identical", "close", "changed")
"""What works, best first."""

Matrix = dict[str, dict[str, Any]]
"""By the label of a row: its kind, its area and its cells."""


def measure(strategies: tuple[str, ...] = STRATEGIES) -> Matrix:
    """Run every cell of these strategies."""
    subjects = find_subjects()
    rows: Matrix = {subject.label: describe(subject) for subject in subjects}
    for strategy in strategies:
        for label, cells in run_strategy(strategy, subjects).items():
            rows[label]["cells"].update(cells)
    return rows


def describe(subject: Subject) -> dict[str, Any]:
    """Return a row without cells."""
    row: dict[str, Any] = {"name": subject.name, "kind": subject.kind, "area": subject.area}
    if subject.name in CHANGES:
        row["changes"] = CHANGES[subject.name]
    if subject.strategy in RESUMES_OTHERWISE:
        row["resumes"] = RESUMES_OTHERWISE[subject.strategy]
    return {**row, "cells": {}}


def expected_cells(subject: Subject) -> set[str]:
    """Return the columns that the row of this subject must have."""
    return {
        str(condition)
        for strategy in STRATEGIES
        for condition in conditions_of(strategy)
        if condition.applies_to(subject)
    }


def read() -> Matrix:
    """Return what is recorded."""
    rows: Matrix = json.loads(FILE.read_text())["rows"]
    return rows


def write(rows: Matrix) -> None:
    """Record what was found."""
    import lightning
    import torch

    versions = {"torch": torch.__version__.partition("+")[0], "lightning": lightning.__version__}
    FILE.write_text(json.dumps({"versions": versions, "rows": rows}, indent=1) + "\n")


def merge(found: Matrix, recorded: Matrix) -> Matrix:
    """Return what was found, and what is recorded of the cells that were not run."""
    for label, row in found.items():
        row["cells"] = {**recorded.get(label, row)["cells"], **row["cells"]}
    return found


def failures(rows: Matrix) -> list[str]:
    """Return a line for each cell that neither works nor is refused."""
    return [
        f"{label}: {condition}: {cell}"
        for label, row in rows.items()
        for condition, cell in row["cells"].items()
        if cell.startswith("fails")
    ]


def count(rows: Matrix) -> str:
    """Return how many cells there are, by what they say."""
    cells = [cell for row in rows.values() for cell in row["cells"].values()]
    kinds = {kind: sum(cell.startswith(kind) for cell in cells) for kind in (*ORDER, "refused")}
    numbers = ", ".join(f"{number} {kind}" for kind, number in kinds.items())
    return f"{len(cells)} cells: {numbers}"


def differences(recorded: Cells, found: Cells) -> list[str]:
    """Return a line for each cell that is not as recorded. Better than recorded is as recorded."""
    lines = []
    for condition in sorted(recorded.keys() | found.keys()):
        before, now = recorded.get(condition, "untested"), found.get(condition, "untested")
        if before in ORDER and now in ORDER and ORDER.index(now) <= ORDER.index(before):
            continue
        if before != now:
            lines.append(f"{condition}: recorded as {before!r}, and it is {now!r}")
    return lines
