"""One way to log for every callback, whatever the logger."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    import lightning.pytorch as pl


def logged_step(trainer: pl.Trainer) -> int:
    """Return the step under which Lightning itself logs now."""
    return trainer.fit_loop.epoch_loop._batches_that_stepped


def log_scalars(trainer: pl.Trainer, scalars: Mapping[str, float]) -> None:
    """Send ``scalars`` to every logger at this step, and make them available for monitoring.

    ``LightningModule.log`` is meant for values of every step: it keeps them on the device, adds its
    own bookkeeping to each step, and drops what is not logged on a step that is a multiple of
    ``log_every_n_steps``. A callback that looks on a schedule of its own writes to the loggers as
    Lightning's ``LearningRateMonitor`` does. ``trainer.callback_metrics`` gets the same keys, so
    that ``ModelCheckpoint`` and ``EarlyStopping`` can monitor them; call it on every rank.
    """
    step = logged_step(trainer)
    for logger in trainer.loggers:
        logger.log_metrics(dict(scalars), step=step)
    trainer.callback_metrics.update({key: torch.tensor(value) for key, value in scalars.items()})
