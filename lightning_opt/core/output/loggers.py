"""Sending scalars and images to the Trainer's loggers, and keeping scalars for reports."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from lightning_opt.core.measure.reading import DelayedReads
from lightning_opt.core.modules.sharding import is_dtensor, reads_are_free

if TYPE_CHECKING:
    import lightning.pytorch as pl

MAX_POINTS = 240
"""Maximum number of points per key."""


class History:
    """Scalars by key, as means over intervals of steps. All keys have the same intervals.

    An interval is one step at first. Its length doubles when a key would have more than
    :data:`MAX_POINTS` points. A NaN makes the mean of its interval NaN. If a key returns to an
    earlier step, its later values are dropped.

    Example:
        >>> history = History()
        >>> for step in range(1000):
        ...     history.add("loss", step, step % 2)
        >>> len(history.points["loss"]), history.points["loss"][-1]
        (125, (992, 0.5))
    """

    def __init__(self) -> None:
        self.width = 1
        # By key and index of the interval: the sum and the number of values.
        self._sums: dict[str, dict[int, tuple[float, int]]] = {}
        self._last: dict[str, int] = {}

    @property
    def points(self) -> dict[str, list[tuple[int, float]]]:
        """The first step and the mean of each interval, by key."""
        return {
            key: [(index * self.width, total / count) for index, (total, count) in sums.items()]
            for key, sums in self._sums.items()
        }

    def add(self, key: str, step: int, value: float) -> None:
        while step >= MAX_POINTS * self.width:
            self._double()
        index, sums = step // self.width, self._sums.setdefault(key, {})
        if step < self._last.get(key, 0):
            sums = self._sums[key] = {earlier: sums[earlier] for earlier in sums if earlier < index}
        total, count = sums.get(index, (0.0, 0))
        sums[index] = total + value, count + 1
        self._last[key] = step

    def _double(self) -> None:
        self.width *= 2
        for key, sums in self._sums.items():
            merged: dict[int, tuple[float, int]] = {}
            for index, (total, count) in sums.items():
                other_total, other_count = merged.get(index // 2, (0.0, 0))
                merged[index // 2] = total + other_total, count + other_count
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
        delay: Number of batches after which a loss is read, so that the host does not wait.
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


HISTORIES: WeakKeyDictionary[Any, History] = WeakKeyDictionary()
"""For each Trainer, all scalars that :func:`log_scalars` has sent."""


def logged_step(trainer: pl.Trainer) -> int:
    """Return the step number that Lightning itself logs under."""
    return trainer.fit_loop.epoch_loop._batches_that_stepped


def log_scalars(trainer: pl.Trainer, scalars: Mapping[str, float]) -> None:
    """Send ``scalars`` to every logger and to ``trainer.callback_metrics``. Call it on every rank.

    It bypasses ``LightningModule.log``, as Lightning's ``LearningRateMonitor`` does, because that
    drops the values of steps that are not multiples of ``log_every_n_steps``.
    """
    step, history = logged_step(trainer), HISTORIES.setdefault(trainer, History())
    for key, value in scalars.items():
        history.add(key, step, value)
    for logger in trainer.loggers:
        logger.log_metrics(dict(scalars), step=step)
    trainer.callback_metrics.update({key: torch.tensor(value) for key, value in scalars.items()})


def log_image(trainer: pl.Trainer, name: str, file: Path) -> None:
    """Send a PNG to TensorBoard, W&B and MLflow. Other loggers are skipped. Call it on rank 0."""
    loggers: list[Any] = trainer.loggers
    for logger in loggers:
        experiment: Any = getattr(logger, "experiment", None)
        if hasattr(experiment, "add_image"):  # TensorBoard
            from PIL import Image

            pixels = np.asarray(Image.open(file))
            experiment.add_image(name, pixels, logged_step(trainer), dataformats="HWC")
        elif hasattr(logger, "log_image"):  # W&B
            logger.log_image(name, [str(file)], logged_step(trainer))
        elif hasattr(experiment, "log_artifact"):  # MLflow
            experiment.log_artifact(logger.run_id, str(file), str(Path(name).parent))


def folders_of(trainer: pl.Trainer) -> set[Path]:
    """Return the loggers' folders, else ``default_root_dir``.

    Unlike ``trainer.log_dir`` it does not broadcast, so one rank may call it alone.
    """
    paths = [getattr(each, "log_dir", None) or each.save_dir for each in trainer.loggers]
    found = {Path(path) for path in paths if isinstance(path, str)}
    return found or {Path(trainer.default_root_dir)}
