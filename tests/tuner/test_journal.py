"""A journal survives kills, and serves only the search that it was written for."""

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


def test_records_are_there_for_the_next_search(tmp_path: Path) -> None:
    path = tmp_path / "new" / "tune.jsonl"
    content = written(path)
    journal = Journal(path, KEY)
    assert journal.records == RECORDS
    assert "2 records; continuing" in journal.note
    journal.add({"kind": "trial", "switches": ["c"]})
    assert path.read_bytes().startswith(content)
    assert len(Journal(path, KEY).records) == 3


def test_a_record_is_on_the_disk_when_add_returns(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "j", KEY)
    journal.add(RECORDS[0])
    last = json.loads((tmp_path / "j").read_text().splitlines()[-1])
    assert last["record"] == RECORDS[0]


def test_wherever_a_kill_cuts_the_file_whole_records_are_kept(tmp_path: Path) -> None:
    content = written(tmp_path / "whole")
    whole = [content.index(b"}", content.index(b'"a"')) + 2, len(content)]
    for end in range(len(content) + 1):
        path = tmp_path / f"{end}"
        path.write_bytes(content[:end])
        journal = Journal(path, KEY)
        assert journal.records == RECORDS[: sum(end >= one for one in whole)]
        journal.add(RECORDS[1])
        assert Journal(path, KEY).records == journal.records


def test_another_machine_or_setting_begins_anew_and_says_what_differs(tmp_path: Path) -> None:
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


def test_without_a_path_records_are_kept_in_memory() -> None:
    journal = Journal(None, KEY)
    journal.add(RECORDS[0])
    assert journal.records == RECORDS[:1]
    assert journal.note == ""


@pytest.mark.parametrize("loss", [1.5, float("nan"), float("-inf")])
def test_a_trial_comes_back_as_it_was(loss: float) -> None:
    trial = Trial(("a", "b"), "rejected", "nan", [[(1.0, 0.5)]], 0.5, losses=[1.0, loss])
    back = Trial(**json.loads(json.dumps(asdict(trial))))
    back.rounds = [[tuple(pair) for pair in start] for start in back.rounds]
    assert repr(back) == repr(trial)  # a NaN equals nothing, but is written alike
