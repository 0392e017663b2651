"""docs/clients.json has no failure, and a sample of projects gives the recorded outcomes."""

import json
from importlib.util import find_spec

import pytest

from tests.clients import cells
from tests.clients.projects import PROJECTS
from tests.matrix.outcomes import differences, failures
from tests.matrix.subjects import find_subjects
from tests.zoo import page

SAMPLE = ("torch_geometric", "finetuning-scheduler", "GAN")
EVERY = 8


def recorded():
    return json.loads(cells.FILE.read_text())


def test_every_project_has_a_cell_for_every_feature_and_none_fails():
    rows = recorded()["rows"]
    assert list(rows) == list(PROJECTS), cells.AGAIN
    wanted = {subject.label for subject in find_subjects() if subject.kind != "strategy"}
    wanted |= {f'strategy="{name}"' for name in cells.STRATEGIES}
    for row in rows.values():
        assert row.keys() - {"resume"} == wanted, cells.AGAIN
    assert failures(rows) == []


def test_page_matches_the_record():
    assert cells.PAGE.read_text() == page.render(recorded(), cells.HEAD), cells.AGAIN


@pytest.mark.slow
@pytest.mark.parametrize("project", SAMPLE)
def test_sample_of_features_is_as_recorded(project):
    if find_spec(PROJECTS[project][1]) is None:
        pytest.skip(f"{project} is not installed")
    labels = [subject.label for subject in find_subjects() if subject.kind != "strategy"]
    found = cells.row(project, labels[SAMPLE.index(project) :: EVERY])
    assert differences(recorded()["rows"], {project: found}) == [], cells.AGAIN
