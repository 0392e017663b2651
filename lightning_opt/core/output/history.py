"""Scalars over steps, in bounded memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

from lightning_opt.core.measure.reading import DelayedReads
from lightning_opt.core.modules.sharding import is_dtensor, reads_are_free

MAX_POINTS = 240
"""Largest number of points of a key."""


class History:
    """Scalars over steps by key: their means over intervals of steps, the same for all keys.

    An interval is one step, and doubles whenever there would be too many. A NaN stays visible. If a
    key returns to an earlier step, its later values are dropped.

    Example:
        >>> history = History()
        >>> for step in range(1000):
        ...     history.add("loss", step, step % 2)
        >>> len(history.points["loss"]), history.points["loss"][-1]
        (125, (992, 0.5))
    """

    def __init__(self) -> None:
        self.width = 1
        self._sums: dict[str, dict[int, tuple[float, int]]] = {}  # with numbers of values
        self._last: dict[str, int] = {}

    @property
    def points(self) -> dict[str, list[tuple[int, float]]]:
        """The first step and the mean of each interval, by key."""
        return {
            key: [(place * self.width, total / count) for place, (total, count) in sums.items()]
            for key, sums in self._sums.items()
        }

    def add(self, key: str, step: int, value: float) -> None:
        while step >= MAX_POINTS * self.width:
            self._double()
        place, sums = step // self.width, self._sums.setdefault(key, {})
        if step < self._last.get(key, 0):
            sums = self._sums[key] = {old: sums[old] for old in sums if old < place}
        total, count = sums.get(place, (0.0, 0))
        sums[place] = total + value, count + 1
        self._last[key] = step

    def _double(self) -> None:
        self.width *= 2
        for key, sums in self._sums.items():
            merged: dict[int, tuple[float, int]] = {}
            for place, (total, count) in sums.items():
                more, others = merged.get(place // 2, (0.0, 0))
                merged[place // 2] = total + more, count + others
            self._sums[key] = merged

    def state_dict(self) -> dict[str, Any]:
        """Return the values as plain types."""
        sums = {key: dict(sums) for key, sums in self._sums.items()}
        return {"width": self.width, "sums": sums, "last": dict(self._last)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the result of :meth:`state_dict`."""
        self.width, self._last = state["width"], dict(state["last"])
        self._sums = {key: dict(sums) for key, sums in state["sums"].items()}


class LossHistory:
    """Adds the loss of each batch to a history under ``"loss"``, some batches late.

    Args:
        history: The history.
        delay: Number of batches, so that reading a loss does not wait for the device.
    """

    def __init__(self, history: History, delay: int) -> None:
        self._history = history
        self._reads: DelayedReads[int] = DelayedReads(delay)

    def add(self, outputs: Any, step: int, batches: int) -> None:
        """Add the loss in the outputs of a batch, if there is one.

        Args:
            outputs: The ``outputs`` of ``on_train_batch_end``.
            step: The step.
            batches: The number of accumulated batches, by which Lightning has divided the loss.
        """
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else None
        if isinstance(loss, Tensor) and loss.numel() == 1 and not is_dtensor(loss):
            if reads_are_free(loss.device):
                self._history.add("loss", step, loss.item() * batches)
            else:
                self._reads.push(loss.detach().reshape(1) * batches, step)
        self._record(self._reads.due())

    def flush(self) -> None:
        """Add all losses so far. This waits for the device."""
        self._record(self._reads.flush())

    def clear(self) -> None:
        self._reads.clear()

    def _record(self, reads: Iterator[tuple[list[float], int]]) -> None:
        for (loss,), step in reads:
            self._history.add("loss", step, loss)
