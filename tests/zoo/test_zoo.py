"""docs/zoo.json covers every model and feature, and a sample gives the recorded outcome.

``make matrix`` runs all pairs. Here each model is trained with every twentieth feature, starting
one later than the model before it, so each feature is tested with one of the twenty models.
"""

import pytest

from tests.matrix.outcomes import differences, failures
from tests.zoo import cells, page
from tests.zoo.models import MODELS

EVERY = 20


def test_every_model_has_a_cell_for_every_feature_and_none_fails():
    recorded = cells.read()
    assert list(recorded) == list(MODELS), cells.AGAIN
    one, two = ({subject.label for subject in cells.subjects(n)} for n in (1, 2))
    for model, row in recorded.items():
        wanted = one | two if model in cells.ON_RANKS else one
        assert row.keys() == wanted, f"{model}: {sorted(row.keys() ^ wanted)}. {cells.AGAIN}"
    assert failures(recorded) == []


def test_page_matches_the_record():
    assert page.FILE.read_text() == page.render(cells.content()), cells.AGAIN


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_sample_of_features_is_as_recorded(model):
    first = list(MODELS).index(model) % EVERY
    found = cells.run_row(model, cells.subjects()[first::EVERY])
    assert differences(cells.read(), {model: found}) == [], cells.AGAIN


@pytest.mark.slow
@pytest.mark.distributed
def test_strategies_are_as_recorded():
    found = cells.run_rows_on_ranks(cells.ON_RANKS[:2])
    assert differences(cells.read(), found) == [], cells.AGAIN
