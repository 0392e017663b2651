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


def new_figure(owner: str, **settings: Any) -> Figure:
    """Return an empty figure that belongs to no window and no global state.

    Raises:
        ImportError: Without matplotlib; the message names the extra.
    """
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
    """Save a figure where the user wants it; without matplotlib, say so. Call it on every rank.

    Args:
        draw: Makes the figure.
        where: A path, or True for ``name`` in the loggers' folder, if there is one.
        trainer: Whose loggers.
        name: Of the file; without its ending, of the figure in TensorBoard.
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
