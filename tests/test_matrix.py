"""docs/matrix.json covers every plugin, and a sample of its cells gives the recorded outcome.

``make matrix`` runs all cells. Here each plugin runs under one strategy.
"""

import pytest

from tests.matrix import record
from tests.matrix.cells import STRATEGIES, TIMEOUT, run_strategy
from tests.matrix.outcomes import differences, failures
from tests.matrix.subjects import (
    ACTS,
    CHANGES,
    INSTEAD_OF_DEFAULTS,
    MORE,
    ROUNDS,
    TO_ACT,
    Subject,
    find_subjects,
)

SUBJECTS = find_subjects(to_act=True)


def sample_of(strategy: str) -> list[Subject]:
    """Return the plugins to run; strategies of the package apply under ``ddp`` only."""
    turn = STRATEGIES.index(strategy)
    return [
        subject
        for number, subject in enumerate(SUBJECTS)
        if subject.kind == "strategy" or number % len(STRATEGIES) == turn
    ]


def test_every_name_in_the_tables_is_a_plugin():
    names = {subject.name for subject in SUBJECTS}
    assert MORE.keys() | INSTEAD_OF_DEFAULTS.keys() | TO_ACT.keys() | CHANGES | ROUNDS <= names
    assert ACTS.keys() <= {subject.label for subject in SUBJECTS}


def test_every_plugin_has_a_row_with_every_condition():
    recorded, subjects = record.read(), {subject.label: subject for subject in SUBJECTS}
    missing = sorted(subjects.keys() ^ recorded.keys())
    assert not missing, f"docs/matrix.json and the package differ in {missing}. {record.AGAIN}"
    for label, subject in subjects.items():
        row = recorded[label]
        wrong = sorted(row["cells"].keys() ^ record.expected_cells(subject))
        assert not wrong, f"{label}: {wrong}. {record.AGAIN}"
        assert not failures({label: row["cells"]})


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.timeout(TIMEOUT + 60.0)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_cells_are_as_recorded(strategy):
    recorded = {label: row["cells"] for label, row in record.read().items()}
    lines = differences(recorded, run_strategy(strategy, sample_of(strategy)))
    assert not lines, "\n".join([*lines, record.AGAIN])
