"""Sending scalars and figures to the Trainer's loggers."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    import lightning.pytorch as pl
    from matplotlib.figure import Figure

log = logging.getLogger(__name__)


def logged_step(trainer: pl.Trainer) -> int:
    """Return the step number that Lightning itself logs under."""
    return trainer.fit_loop.epoch_loop._batches_that_stepped


def log_scalars(trainer: pl.Trainer, scalars: Mapping[str, float]) -> None:
    """Send ``scalars`` to every logger and to ``trainer.callback_metrics``. Call it on every rank.

    ``LightningModule.log`` would drop values of steps that are no multiple of
    ``log_every_n_steps``; Lightning's ``LearningRateMonitor`` bypasses it in the same way.
    """
    step = logged_step(trainer)
    for logger in trainer.loggers:
        logger.log_metrics(dict(scalars), step=step)
    trainer.callback_metrics.update({key: torch.tensor(value) for key, value in scalars.items()})


def new_figure(owner: str, **settings: Any) -> Figure:
    """Return an empty figure without global state. Raise ImportError without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            f"The figure of {owner} needs matplotlib: pip install 'lightning-opt[plots]'."
        ) from error
    return Figure(**settings)


def save_at_end(
    draw: Callable[[], Figure], where: bool | str | None, trainer: pl.Trainer, name: str
) -> None:
    """Save a figure to a file and to TensorBoard; warn without matplotlib. Call it on every rank.

    ``where`` is a path, or True for the file ``name`` in the loggers' folder, if there is one.
    """
    folder = trainer.log_dir if trainer.loggers else None  # a collective
    path = where if isinstance(where, str) else f"{folder}/{name}" if where and folder else None
    if path is None or not trainer.is_global_zero:
        return
    try:
        figure = draw()
    except ImportError as error:
        log.warning("No figure was saved. %s", error)
        return
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    for logger in trainer.loggers:
        add_figure = getattr(getattr(logger, "experiment", None), "add_figure", None)
        if add_figure is not None:
            add_figure(Path(name).stem, figure, global_step=logged_step(trainer), close=False)
