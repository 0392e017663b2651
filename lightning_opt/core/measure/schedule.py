"""When a thing is due."""

from __future__ import annotations

from lightning_opt.core.arguments import at_least


class Schedule:
    """Due at every ``every_n_steps``-th step, counted from 1.

    Looking at a value on a device stops the host, so whatever looks asks a schedule first.

    Args:
        every_n_steps: The period, at least 1.
    """

    def __init__(self, every_n_steps: int) -> None:
        self.every_n_steps = at_least("every_n_steps", every_n_steps, 1)

    def is_due(self, step: int) -> bool:
        """Return whether step number ``step`` (the first is 1) is on the schedule."""
        return step % self.every_n_steps == 0
