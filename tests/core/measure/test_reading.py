"""The schedule of readings."""

from typing import Any

import pytest

from lightning_opt.core.measure.reading import Schedule


@pytest.mark.parametrize("every", [1, 2, 50])
def test_schedule_is_due_at_every_nth_step(every: int) -> None:
    schedule = Schedule(every)
    due = [step for step in range(1, 201) if schedule.is_due(step)]
    assert due == list(range(every, 201, every))


@pytest.mark.parametrize("wrong", [0, -1, 1.0, True, "50", None])
def test_wrong_period_raises(wrong: Any) -> None:
    with pytest.raises(ValueError, match=f"every_n_steps must be .* at least 1, got {wrong!r}"):
        Schedule(wrong)
