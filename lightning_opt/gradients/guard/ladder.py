"""What is done about faults, one after another: skip, back off, roll back, stop."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

from lightning_opt.core.arguments import at_least

Policy: TypeAlias = Literal["skip", "rollback", "raise"]
Action: TypeAlias = Literal["skip", "backoff", "rollback", "raise"]

ACTIONS: tuple[Action, ...] = ("skip", "backoff", "rollback", "raise")
"""From mild to severe."""

DEEPEST_BACKOFF = 4
"""The learning rate is scaled by at most ``lr_backoff ** 4``, so that a run is never frozen."""


class Ladder:
    """Counts faults in a row, says how to answer each, and keeps the scale of the learning rate.

    The state is a plain ``dict``, one for each optimizer: ``consecutive`` faults, ``skipped`` steps
    in all, ``lr_scale``.

    Args:
        policy: ``"skip"`` never rolls back; ``"rollback"`` has all rungs; ``"raise"`` stops at the
            first fault.
        backoff_after: Faults in a row at which the learning rate is scaled by ``lr_backoff``.
        rollback_after: Faults in a row at which the snapshot is to be restored.
        max_consecutive: Faults in a row at which the run is stopped. Spikes alone never stop a run.
        lr_backoff: In (0, 1]; 1 leaves the learning rate alone.
        lr_recovery_steps: Good steps after which one back-off is made up for, geometrically.
    """

    def __init__(
        self,
        policy: Policy = "skip",
        backoff_after: int = 3,
        rollback_after: int = 6,
        max_consecutive: int = 10,
        lr_backoff: float = 0.5,
        lr_recovery_steps: int = 100,
    ) -> None:
        if policy not in ("skip", "rollback", "raise"):
            raise ValueError(f"policy must be 'skip', 'rollback' or 'raise', got {policy!r}.")
        if isinstance(lr_backoff, bool) or not 0.0 < lr_backoff <= 1.0:
            raise ValueError(f"lr_backoff must be above 0 and at most 1, got {lr_backoff!r}.")
        self.policy = policy
        self.backoff_after = at_least("backoff_after", backoff_after, 1)
        self.rollback_after = at_least("rollback_after", rollback_after, 1)
        self.max_consecutive = at_least("max_consecutive", max_consecutive, 1)
        if policy == "rollback" and rollback_after >= max_consecutive:
            raise ValueError(
                f"rollback_after ({rollback_after}) must be below max_consecutive "
                f"({max_consecutive}): the run would stop before it is rolled back."
            )
        self.lr_backoff = lr_backoff
        self._recovery = lr_backoff ** (-1.0 / at_least("lr_recovery_steps", lr_recovery_steps, 1))

    def init(self) -> dict[str, Any]:
        """Return the state before the first step."""
        return {"consecutive": 0, "skipped": 0, "lr_scale": 1.0}

    def step_down(self, state: dict[str, Any]) -> None:
        """Take note of a good step: the row of faults ends, the learning rate recovers a little."""
        state["consecutive"] = 0
        if state["lr_scale"] < 1.0:
            state["lr_scale"] = min(1.0, state["lr_scale"] * self._recovery)

    def step_up(self, state: dict[str, Any], *, spike: bool = False) -> Action:
        """Take note of a fault and return the answer to it; a ``spike`` never stops the run."""
        state["consecutive"] += 1
        state["skipped"] += 1
        faults = state["consecutive"]
        if self.policy == "raise" or (faults >= self.max_consecutive and not spike):
            return "raise"
        if self.policy == "rollback" and faults == self.rollback_after:
            return "rollback"
        if faults == self.backoff_after and self.lr_backoff < 1.0:
            self.back_off(state)
            return "backoff"
        return "skip"

    def back_off(self, state: dict[str, Any]) -> None:
        """Scale the learning rate down once more."""
        lowest = self.lr_backoff**DEEPEST_BACKOFF
        state["lr_scale"] = max(lowest, state["lr_scale"] * self.lr_backoff)
