"""The response to faults in a row: skip, reduce the learning rate, roll back, stop."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

from lightning_opt.core.arguments import check_at_least, check_one_of
from lightning_opt.core.numerics.scalars import to_plain
from lightning_opt.gradients.guard.detector import Detection, Kind

Policy: TypeAlias = Literal["skip", "rollback", "raise"]
Action: TypeAlias = Literal["skip", "backoff", "rollback", "raise"]

MAX_BACKOFFS = 4
"""The learning rate scale is at least ``lr_backoff`` to this power, so that no run stalls."""


class Escalation:
    """Counts faults in a row per optimizer, and chooses the response and the learning rate scale.

    Args:
        policy: ``"skip"`` never rolls back, ``"rollback"`` uses all responses, ``"raise"`` stops at
            the first fault.
        backoff_after: Faults in a row at which the learning rate is scaled by ``lr_backoff``.
        rollback_after: Faults in a row at which the snapshot is restored.
        max_consecutive: Faults in a row at which the run stops. A spike stops a run only under
            ``policy="raise"``.
        lr_backoff: Factor of a reduction, in (0, 1]; 1 keeps the learning rate.
        lr_recovery_steps: Good steps that undo one reduction, by a constant factor per step.

    Attributes:
        rollbacks: Snapshots restored so far.
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
        if isinstance(lr_backoff, bool) or not 0.0 < lr_backoff <= 1.0:
            raise ValueError(f"lr_backoff must be above 0 and at most 1, got {lr_backoff!r}.")
        self.policy = check_one_of("policy", policy, ("skip", "rollback", "raise"))
        self.backoff_after = check_at_least("backoff_after", backoff_after, 1)
        self.rollback_after = check_at_least("rollback_after", rollback_after, 1)
        self.max_consecutive = check_at_least("max_consecutive", max_consecutive, 1)
        if policy == "rollback" and rollback_after >= max_consecutive:
            raise ValueError(
                f"rollback_after ({rollback_after}) must be below max_consecutive "
                f"({max_consecutive}): the run would stop before it is rolled back."
            )
        self.lr_backoff = lr_backoff
        self._recovery = lr_backoff ** (
            -1.0 / check_at_least("lr_recovery_steps", lr_recovery_steps, 1)
        )
        self.reset()

    def reset(self) -> None:
        """Reset the counts of all optimizers."""
        self._states: dict[int, dict[str, Any]] = {}
        self.rollbacks = 0

    def state(self, index: int) -> dict[str, Any]:
        """Return the state of one optimizer. Only the detector uses its ``history``."""
        initial = {"consecutive": 0, "skipped": 0, "overflows": 0, "lr_scale": 1.0, "history": {}}
        return self._states.setdefault(index, initial)

    def record(self, index: int, detection: Detection) -> tuple[Kind, Action] | None:
        """Count a step. Return its fault and the response; None for a step without a fault."""
        kind = detection.kind
        if kind is not None:
            spike = kind in ("loss_spike", "gradient_spike")
            return kind, self.record_fault(index, spike=spike)
        # A skip without a fault is an overflow, which the loss scaler handles.
        if detection.skip:
            self.state(index)["overflows"] += 1
        else:
            self.record_good_step(index)
        return None

    def record_good_step(self, index: int) -> None:
        """Reset the count of faults in a row, and raise the learning rate scale by one step."""
        state = self.state(index)
        state["consecutive"] = 0
        if state["lr_scale"] < 1.0:
            state["lr_scale"] = min(1.0, state["lr_scale"] * self._recovery)

    def record_fault(self, index: int, *, spike: bool = False) -> Action:
        """Count a fault and return the response.

        A spike stops a run only under ``policy="raise"``.
        """
        state = self.state(index)
        state["consecutive"] += 1
        state["skipped"] += 1
        faults = state["consecutive"]
        if self.policy == "raise" or (faults >= self.max_consecutive and not spike):
            return "raise"
        if self.policy == "rollback" and faults == self.rollback_after:
            return "rollback"
        if faults == self.backoff_after and self.lr_backoff < 1.0:
            self._back_off(state)
            return "backoff"
        return "skip"

    def record_rollback(self) -> None:
        """Count a rollback, and reduce every learning rate once more."""
        self.rollbacks += 1
        for state in self._states.values():
            self._back_off(state)

    def _back_off(self, state: dict[str, Any]) -> None:
        lowest = self.lr_backoff**MAX_BACKOFFS
        state["lr_scale"] = max(lowest, state["lr_scale"] * self.lr_backoff)

    def scalars(self) -> dict[str, float]:
        """Return the values to log. Does not read a device."""
        states = list(self._states.values())
        return {
            "guard/skipped": float(sum(state["skipped"] for state in states)),
            "guard/consecutive": float(max((state["consecutive"] for state in states), default=0)),
            "guard/overflows": float(sum(state["overflows"] for state in states)),
            "guard/lr_scale": float(min((state["lr_scale"] for state in states), default=1.0)),
            "guard/rollbacks": float(self.rollbacks),
        }

    def state_dict(self) -> dict[str, Any]:
        """Return all counts and histories as plain types. Waits for the device."""
        return {"optimizers": to_plain(self._states), "rollbacks": self.rollbacks}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the result of :meth:`state_dict`."""
        optimizers = state_dict["optimizers"]
        self._states = {int(index): to_plain(state) for index, state in optimizers.items()}
        self.rollbacks = state_dict["rollbacks"]
