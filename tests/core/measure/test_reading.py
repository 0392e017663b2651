"""When a thing is due."""

from typing import Any

import pytest

from lightning_opt.core.measure.reading import Schedule


@pytest.mark.parametrize("every", [1, 2, 50])
def test_due_at_every_nth_step_counted_from_one(every: int) -> None:
    schedule = Schedule(every)
    due = [step for step in range(1, 201) if schedule.is_due(step)]
    assert due == list(range(every, 201, every))


@pytest.mark.parametrize("wrong", [0, -1, 1.0, True, "50", None])
def test_periods_that_are_no_whole_numbers_from_one(wrong: Any) -> None:
    with pytest.raises(ValueError, match=f"every_n_steps must be .* at least 1, got {wrong!r}"):
        Schedule(wrong)
