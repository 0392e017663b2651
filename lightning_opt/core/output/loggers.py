"""Sending scalars and images to the Trainer's loggers, and keeping scalars for reports."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import numpy as np
import torch

from lightning_opt.core.output.history import History

if TYPE_CHECKING:
    import lightning.pytorch as pl

HISTORIES: WeakKeyDictionary[Any, History] = WeakKeyDictionary()
"""For each Trainer, all scalars that :func:`log_scalars` has sent."""


def logged_step(trainer: pl.Trainer) -> int:
    """Return the step number that Lightning itself logs under."""
    return trainer.fit_loop.epoch_loop._batches_that_stepped


def log_scalars(trainer: pl.Trainer, scalars: Mapping[str, float]) -> None:
    """Send ``scalars`` to every logger and to ``trainer.callback_metrics``. Call it on every rank.

    ``LightningModule.log`` would drop values of steps that are no multiple of
    ``log_every_n_steps``; Lightning's ``LearningRateMonitor`` bypasses it in the same way.
    """
    step, history = logged_step(trainer), HISTORIES.setdefault(trainer, History())
    for key, value in scalars.items():
        history.add(key, step, value)
    for logger in trainer.loggers:
        logger.log_metrics(dict(scalars), step=step)
    trainer.callback_metrics.update({key: torch.tensor(value) for key, value in scalars.items()})


def log_image(trainer: pl.Trainer, name: str, file: Path) -> None:
    """Send a PNG to TensorBoard, W&B and MLflow; other loggers keep none. Call it on rank 0."""
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
    return {Path(path) for path in paths if isinstance(path, str)} or {
        Path(trainer.default_root_dir)
    }
