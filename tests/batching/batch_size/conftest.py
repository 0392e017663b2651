"""Trials have one round, because nothing depends on the times."""

import pytest

from lightning_opt.batching.batch_size import search


@pytest.fixture
def brief_trials(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search, "FINALISTS_BY_ROUND", ())
