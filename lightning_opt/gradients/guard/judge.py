"""The standing of each optimizer: what is usual for it, its faults in a row, its back-off."""

from __future__ import annotations

from typing import Any

from lightning_opt.core.scalars import to_plain
from lightning_opt.gradients.guard.detector import Detector, Kind, Symptoms
from lightning_opt.gradients.guard.ladder import Action, Ladder


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
        """Return the state of one optimizer: ``ladder``, ``usual`` and ``overflows``."""
        new = {"ladder": self.ladder.init(), "usual": self.detector.init(), "overflows": 0}
        return self._optimizers.setdefault(index, new)

    def judge(self, index: int, symptoms: Symptoms) -> tuple[Kind, Action] | None:
        """Count a step whose symptoms were read; return its fault and the answer, if it has one."""
        standing, kind = self.standing(index), symptoms.kind
        if kind is not None:
            spike = kind in ("loss_spike", "gradient_spike")
            return kind, self.ladder.step_up(standing["ladder"], spike=spike)
        if symptoms.overflow:
            standing["overflows"] += 1
        else:
            self.ladder.step_down(standing["ladder"])
        return None

    def back_off(self) -> None:
        """Scale every learning rate down once more, after a rollback, which is counted."""
        self.rollbacks += 1
        for standing in self._optimizers.values():
            self.ladder.back_off(standing["ladder"])

    def scalars(self) -> dict[str, float]:
        """Return what is logged, all of it on the host already."""
        overflows = sum(standing["overflows"] for standing in self._optimizers.values())
        ladders = [standing["ladder"] for standing in self._optimizers.values()]
        ladders = ladders or [self.ladder.init()]
        return {
            "guard/skipped": float(sum(ladder["skipped"] for ladder in ladders)),
            "guard/consecutive": float(max(ladder["consecutive"] for ladder in ladders)),
            "guard/overflows": float(overflows),
            "guard/lr_scale": float(min(ladder["lr_scale"] for ladder in ladders)),
            "guard/rollbacks": float(self.rollbacks),
        }

    def state_dict(self) -> dict[str, Any]:
        """Return everything as plain types. Waits for the device."""
        return {
            "optimizers": {index: to_plain(item) for index, item in self._optimizers.items()},
            "rollbacks": self.rollbacks,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned."""
        optimizers = state_dict["optimizers"]
        self._optimizers = {int(index): to_plain(item) for index, item in optimizers.items()}
        self.rollbacks = state_dict["rollbacks"]
