"""Histories of logged values."""

from lightning_opt.core.output.loggers import MAX_POINTS, History


def test_restored_history_has_the_same_points_at_the_same_steps() -> None:
    first, second = History(), History()
    for step in range(5 * MAX_POINTS):
        first.add("loss", step, step % 7)
    second.load_state_dict(first.state_dict())
    for history in (first, second):
        history.add("loss", 5 * MAX_POINTS, 1.0)
    assert second.points == first.points
