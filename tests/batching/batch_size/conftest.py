"""Trials have few steps and one round, because nothing depends on the times."""

import pytest

from lightning_opt.batching.batch_size import search, trials


@pytest.fixture
def brief_trials(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search, "FINALISTS_BY_ROUND", ())
    for name in ("MEMORY_TRIAL", "TIMED_TRIAL"):
        monkeypatch.setattr(trials, name, (10, 0.0, 10))
