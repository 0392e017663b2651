"""The zoo's record has no failing cell, its page is current, and a sample of it runs again.

Each model is tried with every sixth feature, another sixth than the model before it, so that every
feature meets several models. ``make matrix`` runs all pairs.
"""

import pytest

from tests.zoo import cells, page

EVERY = 6
FEATURES = cells.subjects()
MODELS = cells.known_models()
ORDER = ("identical", "close", "changed")


def differences(recorded: cells.Cells, found: cells.Cells) -> list[str]:
    """Return a line for each cell that is worse than recorded."""
    lines = []
    for label, now in found.items():
        before = recorded.get(label, "untested")
        better = before in ORDER and now in ORDER and ORDER.index(now) <= ORDER.index(before)
        if now != before and not better:
            lines.append(f"{label}: recorded as {before!r}, and it is {now!r}")
    return lines


def test_no_cell_fails():
    assert [
        f"{model}: {label}: {cell}"
        for model, row in cells.read().items()
        for label, cell in row.items()
        if cell.startswith("fails")
    ] == []


def test_every_model_and_every_feature_are_recorded():
    recorded = cells.read()
    assert list(recorded) == MODELS, cells.AGAIN
    one, two = ({subject.label for subject in cells.subjects(n)} for n in (1, 2))
    for model, row in recorded.items():
        wanted = one | two if model in cells.ON_RANKS else one
        assert row.keys() == wanted, f"{model}: {sorted(row.keys() ^ wanted)}. {cells.AGAIN}"


def test_the_page_is_made_from_the_record():
    assert page.FILE.read_text() == page.render(cells.content()), cells.AGAIN


@pytest.mark.parametrize("number", range(len(MODELS)), ids=MODELS)
def test_a_sample_of_features_does_what_is_recorded(number):
    sample = FEATURES[number % EVERY :: EVERY]
    found = cells.run_row(MODELS[number], sample)
    assert differences(cells.read()[MODELS[number]], found) == [], cells.AGAIN


@pytest.mark.slow
@pytest.mark.distributed
def test_strategies_do_what_is_recorded():
    names = cells.ON_RANKS[:3]
    recorded = cells.read()
    found = cells.run_rows_on_ranks(names)
    assert [differences(recorded[name], found[name]) for name in names] == [[]] * len(names)
