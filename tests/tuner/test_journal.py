"""A journal survives kills, and is read only by the same search."""

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from lightning_opt.tuner.journal import Journal
from lightning_opt.tuner.trial import Trial

KEY = {"machine": "here", "settings": "abc", "versions": {"torch": "2"}}
RECORDS = [{"kind": "trial", "switches": ["a"]}, {"kind": "trial", "switches": ["b"]}]


def written(path: Path) -> bytes:
    journal = Journal(path, KEY)
    for record in RECORDS:
        journal.add(record)
    return path.read_bytes()


def test_records_are_read_by_the_next_search(tmp_path: Path) -> None:
    path = tmp_path / "new" / "tune.jsonl"
    content = written(path)
    journal = Journal(path, KEY)
    assert journal.records == RECORDS
    assert "2 records; continuing" in journal.note
    journal.add({"kind": "trial", "switches": ["c"]})
    assert path.read_bytes().startswith(content)
    assert len(Journal(path, KEY).records) == 3


def test_whole_records_survive_a_cut_at_any_byte(tmp_path: Path) -> None:
    content = written(tmp_path / "whole")
    whole = [content.index(b"}", content.index(b'"a"')) + 2, len(content)]
    for end in range(len(content) + 1):
        path = tmp_path / f"{end}"
        path.write_bytes(content[:end])
        journal = Journal(path, KEY)
        assert journal.records == RECORDS[: sum(end >= one for one in whole)]
        journal.add(RECORDS[1])
        assert Journal(path, KEY).records == journal.records


def test_other_key_starts_over_and_names_the_difference(tmp_path: Path) -> None:
    path = tmp_path / "j"
    content = written(path)
    other = {**KEY, "settings": "xyz", "more": 1}
    journal = Journal(path, other)
    assert journal.records == []
    assert journal.note == "This search starts over, since it differs in settings, more."
    journal.add(RECORDS[0])
    assert path.read_bytes().startswith(content), "both searches keep what they have"
    assert Journal(path, other).records == [RECORDS[0]]
    assert Journal(path, KEY).records == RECORDS


def test_records_stay_in_memory_without_a_path() -> None:
    journal = Journal(None, KEY)
    journal.add(RECORDS[0])
    assert journal.records == RECORDS[:1]
    assert journal.note == ""


@pytest.mark.parametrize("loss", [1.5, float("nan"), float("-inf")])
def test_trial_survives_json(loss: float) -> None:
    trial = Trial(("a", "b"), "rejected", "nan", [[(1.0, 0.5)]], 0.5, losses=[1.0, loss])
    back = Trial(**json.loads(json.dumps(asdict(trial))))
    back.pairs_by_start = [[tuple(pair) for pair in start] for start in back.pairs_by_start]
    assert repr(back) == repr(trial)  # a NaN equals nothing, but is written alike
