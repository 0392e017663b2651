"""The compatibility matrix of the documentation is what its cells give when they are run."""

import pytest

from tests.matrix import record
from tests.matrix.cells import STRATEGIES, TIMEOUT, run_strategy
from tests.matrix.subjects import CHANGES, INSTEAD_OF_DEFAULTS, MORE, ROUNDS, find_subjects

SUBJECTS = find_subjects()

PARTS = 3
"""Rows are dealt to so many tests, which run side by side; each has its own runs without us."""


def test_every_name_of_the_tables_is_a_plugin():
    names = {subject.name for subject in SUBJECTS}
    assert MORE.keys() | INSTEAD_OF_DEFAULTS.keys() | CHANGES.keys() | ROUNDS <= names


def test_every_plugin_has_its_row_and_every_row_its_plugin():
    recorded, subjects = record.read(), {subject.label: subject for subject in SUBJECTS}
    missing = sorted(subjects.keys() ^ recorded.keys())
    assert not missing, f"docs/matrix.json and the package differ in {missing}. {record.AGAIN}"
    for label, subject in subjects.items():
        row = recorded[label]
        assert {**row, "cells": {}} == record.describe(subject), f"{label}. {record.AGAIN}"
        wrong = sorted(row["cells"].keys() ^ record.expected_cells(subject))
        assert not wrong, f"{label}: {wrong}. {record.AGAIN}"


def test_a_cell_that_changes_is_noticed():
    recorded = {"a": "identical", "b": "close", "c": "changed", "d": "refused: why"}
    assert record.differences(recorded, {**recorded, "b": "identical", "c": "close"}) == []
    for cell, worse in (("a", "close"), ("b", "changed"), ("c", "fails: NaN"), ("d", "identical")):
        assert len(record.differences(recorded, {**recorded, cell: worse})) == 1
    assert len(record.differences(recorded, {**recorded, "d": "refused: other words"})) == 1
    assert len(record.differences(recorded, {})) == 4
    assert len(record.differences({}, recorded)) == 4
    assert record.failures({"A()": {"cells": {"c": "fails: NaN"}}}) == ["A(): c: fails: NaN"]


def test_no_cell_fails():
    assert record.failures(record.read()) == []


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.timeout(TIMEOUT + 60.0)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("part", range(PARTS))
def test_cells_are_as_recorded(part, strategy):
    recorded, lines = record.read(), []
    for label, cells in run_strategy(strategy, SUBJECTS[part::PARTS]).items():
        row = recorded.get(label, {"cells": {}})["cells"]
        before = {key: cell for key, cell in row.items() if key.startswith(f"{strategy} /")}
        lines += [f"{label}: {line}" for line in record.differences(before, cells)]
    assert not lines, "\n".join([*lines, record.AGAIN])
