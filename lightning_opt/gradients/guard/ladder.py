"""What is done about faults, one after another: skip, back off, roll back, stop."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

from lightning_opt.core.arguments import at_least, one_of
from lightning_opt.core.numerics.scalars import to_plain
from lightning_opt.gradients.guard.detector import Detector, Kind, Symptoms

Policy: TypeAlias = Literal["skip", "rollback", "raise"]
Action: TypeAlias = Literal["skip", "backoff", "rollback", "raise"]

DEEPEST_BACKOFF = 4
"""The learning rate is scaled by at most ``lr_backoff ** 4``, so that a run is never frozen."""


class Ladder:
    """Counts faults in a row, says how to answer each, and keeps the scale of the learning rate.

    The state is a plain ``dict``, one for each optimizer: ``consecutive`` faults, ``skipped`` steps
    and ``overflows`` in all, ``lr_scale``.

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
        if isinstance(lr_backoff, bool) or not 0.0 < lr_backoff <= 1.0:
            raise ValueError(f"lr_backoff must be above 0 and at most 1, got {lr_backoff!r}.")
        self.policy = one_of("policy", policy, ("skip", "rollback", "raise"))
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
        return {"consecutive": 0, "skipped": 0, "overflows": 0, "lr_scale": 1.0}

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


class Judge:
    """Turns symptoms into verdicts, with a memory for each optimizer.

    Args:
        ladder: How faults are answered.
        spike: For :class:`~lightning_opt.gradients.guard.detector.Detector`.
    """

    def __init__(self, ladder: Ladder, spike: float | None) -> None:
        self.ladder = ladder
        # A level is accepted only once a rollback has had its chance against it.
        self.detector = Detector(spike, patience=ladder.rollback_after + 3)
        self._optimizers: dict[int, dict[str, Any]] = {}
        self.rollbacks = 0

    def standing(self, index: int) -> dict[str, Any]:
        """Return the state of one optimizer: the ladder's, and ``usual``, the detector's."""
        new = {**self.ladder.init(), "usual": self.detector.init()}
        return self._optimizers.setdefault(index, new)

    def judge(self, index: int, symptoms: Symptoms) -> tuple[Kind, Action] | None:
        """Count a step whose symptoms were read; return its fault and the answer, if it has one."""
        standing, kind = self.standing(index), symptoms.kind
        if kind is not None:
            spike = kind in ("loss_spike", "gradient_spike")
            return kind, self.ladder.step_up(standing, spike=spike)
        if symptoms.skip:
            standing["overflows"] += 1
        else:
            self.ladder.step_down(standing)
        return None

    def back_off(self) -> None:
        """Scale every learning rate down once more, after a rollback, which is counted."""
        self.rollbacks += 1
        for standing in self._optimizers.values():
            self.ladder.back_off(standing)

    def scalars(self) -> dict[str, float]:
        """Return what is logged, all of it on the host already."""
        states = list(self._optimizers.values()) or [self.ladder.init()]
        return {
            "guard/skipped": float(sum(state["skipped"] for state in states)),
            "guard/consecutive": float(max(state["consecutive"] for state in states)),
            "guard/overflows": float(sum(state["overflows"] for state in states)),
            "guard/lr_scale": float(min(state["lr_scale"] for state in states)),
            "guard/rollbacks": float(self.rollbacks),
        }

    def state_dict(self) -> dict[str, Any]:
        """Return everything as plain types. Waits for the device."""
        return {"optimizers": to_plain(self._optimizers), "rollbacks": self.rollbacks}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned."""
        optimizers = state_dict["optimizers"]
        self._optimizers = {int(index): to_plain(item) for index, item in optimizers.items()}
        self.rollbacks = state_dict["rollbacks"]
