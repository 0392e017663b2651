"""Blocks are timed once instead of three times: no test here depends on exact times."""

import pytest

from lightning_opt.memory.checkpointing import step_profile


@pytest.fixture(autouse=True)
def _blocks_are_timed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_profile, "TIMED_ROUNDS", 1)
