"""The record of the matrix in ``docs/matrix.json``."""

import json
from pathlib import Path
from typing import Any

from tests.matrix.cells import STRATEGIES, conditions_of
from tests.matrix.subjects import CHANGES, RESUMES_OTHERWISE, Subject

FILE = Path(__file__).parents[2] / "docs" / "matrix.json"
AGAIN = "Run `make matrix`, check the changes, and commit docs/matrix.json."

Matrix = dict[str, dict[str, Any]]
"""Rows by label: kind, area and cells."""


def describe(subject: Subject) -> dict[str, Any]:
    """Return a row without cells."""
    row: dict[str, Any] = {"name": subject.name, "kind": subject.kind, "area": subject.area}
    if subject.name in CHANGES:
        row["changes"] = CHANGES[subject.name]
    if subject.strategy in RESUMES_OTHERWISE:
        row["resumes"] = RESUMES_OTHERWISE[subject.strategy]
    return {**row, "cells": {}}


def expected_cells(subject: Subject) -> set[str]:
    """Return the columns of this subject's row."""
    return {
        str(condition)
        for strategy in STRATEGIES
        for condition in conditions_of(strategy)
        if condition.applies_to(subject)
    }


def read() -> Matrix:
    rows: Matrix = json.loads(FILE.read_text())["rows"]
    return rows


def write(rows: Matrix) -> None:
    import lightning
    import torch

    versions = {"torch": torch.__version__.partition("+")[0], "lightning": lightning.__version__}
    FILE.write_text(json.dumps({"versions": versions, "rows": rows}, indent=1) + "\n")
