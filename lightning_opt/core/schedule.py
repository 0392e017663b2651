"""When a thing is due."""

from __future__ import annotations


class Schedule:
    """Due at every ``every_n_steps``-th step, counted from 1.

    Looking at a value on a device stops the host, so whatever looks asks a schedule first.

    Args:
        every_n_steps: The period, at least 1.
    """

    def __init__(self, every_n_steps: int) -> None:
        if isinstance(every_n_steps, bool) or not isinstance(every_n_steps, int):
            raise TypeError(f"every_n_steps must be a whole number, got {every_n_steps!r}.")
        if every_n_steps < 1:
            raise ValueError(f"every_n_steps must be at least 1, got {every_n_steps}.")
        self.every_n_steps = every_n_steps

    def is_due(self, step: int) -> bool:
        """Return whether step number ``step`` (the first is 1) is on the schedule."""
        return step % self.every_n_steps == 0
