"""The record of the matrix in ``docs/matrix.json``."""

import json
from pathlib import Path
from typing import Any

from tests.matrix.cells import STRATEGIES, conditions_of
from tests.matrix.outcomes import Cells
from tests.matrix.subjects import ACTS, Subject

FILE = Path(__file__).parents[2] / "docs" / "matrix.json"
AGAIN = "Run `make matrix`, check the changes, and commit docs/matrix.json."


def expected_cells(subject: Subject) -> set[str]:
    """Return the columns of this subject's row."""
    conditions = [condition for strategy in STRATEGIES for condition in conditions_of(strategy)]
    return {str(condition) for condition in conditions if condition.applies_to(subject)}


def read() -> dict[str, dict[str, Any]]:
    """Return the rows by label: ``cells``, and the text of ``acts``."""
    rows: dict[str, dict[str, Any]] = json.loads(FILE.read_text())["rows"]
    return rows


def write(cells: dict[str, Cells]) -> None:
    import lightning
    import torch

    versions = {"torch": torch.__version__.partition("+")[0], "lightning": lightning.__version__}
    rows: dict[str, dict[str, Any]] = {label: {"cells": row} for label, row in cells.items()}
    for label, act in ACTS.items():
        rows[label] = {"acts": act.text, **rows[label]}
    FILE.write_text(json.dumps({"versions": versions, "rows": rows}, indent=1) + "\n")
