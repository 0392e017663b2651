"""How many batches make an optimizer step: fixed, by steps, or more at plateaus of the loss."""

from __future__ import annotations

import math
from typing import Any, Protocol

from lightning_opt.core.arguments import at_least, fraction


class Windows(Protocol):
    """A rule for the number of batches that are accumulated."""

    def batches(self, step: int) -> int:
        """Return how many batches the window has that leads to optimizer step ``step`` (from 0)."""

    def observe(self, loss: float) -> bool:
        """Take note of an epoch's mean loss, and return whether windows are longer from now on."""

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint needs."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore it."""


class BySteps:
    """As a table says.

    Args:
        table: From the optimizer step at which it begins to a number of batches; before the first
            entry it is 1.

    Raises:
        ValueError: For an empty table, or steps below 0 or batches below 1 in it.
    """

    def __init__(self, table: dict[int, int]) -> None:
        if not table:
            raise ValueError("schedule must have an entry, such as {0: 1, 1000: 4}; it is empty.")
        # Keys of a configuration file may be text.
        self.table = {
            at_least("a step of schedule", int(step), 0): at_least("schedule", batches, 1)
            for step, batches in sorted(table.items(), key=lambda entry: int(entry[0]))
        }

    def batches(self, step: int) -> int:
        """Return the entry that holds at ``step``."""
        return next((n for begin, n in reversed(self.table.items()) if begin <= step), 1)

    def observe(self, loss: float) -> bool:
        """Return False."""
        return False

    def state_dict(self) -> dict[str, Any]:
        """Return nothing: the table says it all."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Do nothing."""


class Plateau:
    """More batches whenever the loss has not improved for some epochs.

    A larger batch lowers the noise of the gradient, as a lower learning rate does.

    Args:
        patience: Epochs without an improvement, at least 1.
        threshold: The share of the best loss by which a lower one must differ to be one.
        factor: What the number of batches is multiplied with, at least 2.
        most: The largest number of batches.

    References:
        S. Smith, P.-J. Kindermans, C. Ying, Q. Le, Don't Decay the Learning Rate, Increase the
        Batch Size, 2018.
    """

    def __init__(self, patience: int, threshold: float, factor: int, most: int) -> None:
        self.patience = at_least("patience", patience, 1)
        self.threshold = fraction("threshold", threshold)
        self.factor = at_least("factor", factor, 2)
        self.most = at_least("max_batches", most, 1)
        self.now, self.best, self.bad = 1, math.inf, 0

    def batches(self, step: int) -> int:
        """Return the present number."""
        return self.now

    def observe(self, loss: float) -> bool:
        """Count an epoch; one whose loss is not finite counts as no improvement."""
        if math.isfinite(loss) and loss < self.best - self.threshold * abs(self.best):
            self.best, self.bad = loss, 0
            return False
        if math.isinf(self.best) and math.isfinite(loss):
            self.best, self.bad = loss, 0
            return False
        self.bad += 1
        if self.bad < self.patience or self.now >= self.most:
            return False
        self.bad, self.now = 0, min(self.most, self.now * self.factor)
        return True

    def state_dict(self) -> dict[str, Any]:
        """Return the present number, the best loss and the epochs since."""
        return {"now": self.now, "best": self.best, "bad": self.bad}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore them."""
        self.now, self.best = state_dict["now"], state_dict["best"]
        self.bad = state_dict["bad"]
