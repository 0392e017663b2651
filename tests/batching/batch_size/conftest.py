"""Trials end after a few steps and one round, because nothing depends on the times."""

import pytest

from lightning_opt.batching.batch_size import search, trials


@pytest.fixture
def brief_trials(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MEMORY_TRIAL", "TIMED_TRIAL"):
        steps, _, most = getattr(trials, name)
        monkeypatch.setattr(trials, name, (steps, 0.0, most))
    monkeypatch.setattr(search, "FINALISTS_BY_ROUND", ())
