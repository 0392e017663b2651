"""Trials of speed end after a few steps and one round, because nothing depends on the times."""

import pytest

from lightning_opt.batching.batch_size import search, trials


@pytest.fixture
def brief_timed_trials(monkeypatch: pytest.MonkeyPatch) -> None:
    steps, _, most = trials.TIMED_TRIAL
    monkeypatch.setattr(trials, "TIMED_TRIAL", (steps, 0.0, most))
    monkeypatch.setattr(search, "FINALISTS_BY_ROUND", ())
