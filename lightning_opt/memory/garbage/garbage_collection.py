"""Garbage collection on a schedule instead of whenever Python starts it."""

from __future__ import annotations

import gc
from time import perf_counter
from typing import TYPE_CHECKING, Any

from lightning_opt.core.measure.reading import Schedule
from lightning_opt.core.output.loggers import log_scalars
from lightning_opt.trainer.run_callback import RunCallback

if TYPE_CHECKING:
    import lightning.pytorch as pl


class GarbageCollection(RunCallback):
    """Collects garbage on a schedule, at the same step on every rank, instead of automatically.

    Python collects whenever enough objects have been created, and a full collection visits every
    object. With torch and Lightning imported, a full collection takes a fifth of a second. It runs
    at a different step on every rank, so in a distributed run all ranks wait for each rank in turn.
    This callback collects at the same step on all ranks. When training starts, and after the first
    scheduled collection, it freezes all objects (``gc.freeze``), so that later collections skip
    them. It freezes none if objects were frozen before. Everything is restored when training ends
    or fails.

    Objects in reference cycles live until the next collection. If they hold tensors, collect more
    often, or add :class:`~lightning_opt.MemoryCleanup`, which collects when memory runs short.

    Logged at every collection on the schedule:

    ===================== ======================================================================
    ``gc/pause_ms``       duration of the collection in milliseconds
    ``gc/collected``      objects that the collection freed
    ===================== ======================================================================

    Args:
        every_n_steps: Number of batches between collections, at least 1. A validation continues the
            count of training batches, and training resumes its own count afterwards.

    Raises:
        ValueError: In ``__init__`` for arguments out of range; in ``setup`` for a second instance.

    Example:
        >>> import lightning as L
        >>> import lightning_opt as lo
        >>> garbage = lo.GarbageCollection(every_n_steps=200)
        >>> trainer = L.Trainer(callbacks=[garbage], logger=False)

    References:
        PyTorch team (2024), *TorchTitan*: ``GarbageCollection`` in ``tools/utils.py``; pull request
        148 reports steps about 1.5% faster on 512 GPUs.
    """

    only_one = True

    def __init__(self, every_n_steps: int = 100) -> None:
        self._schedule = Schedule(every_n_steps)
        self._batches = 0
        self._freezes = False

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Turn off automatic collection, collect, and freeze."""
        self.release(trainer)
        self._batches = 0
        if gc.isenabled():
            gc.disable()
            self._patches.callback(gc.enable)
        gc.collect()
        self._freezes = gc.get_freeze_count() == 0
        if self._freezes:
            gc.freeze()
            self._patches.callback(gc.unfreeze)

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any, **kwargs: Any) -> None:
        """Count the batch, and collect if a collection is due."""
        self._batches += 1
        self._collect_if_due(trainer, self._batches)
        if self._freezes and self._batches == self._schedule.every_n_steps:
            gc.freeze()

    def on_validation_batch_end(
        self, trainer: pl.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int, *_: Any
    ) -> None:
        """Collect if due, without counting: ranks may validate unequal numbers of batches."""
        if trainer.state.fn == "fit" and not trainer.sanity_checking:
            self._collect_if_due(trainer, self._batches + batch_idx + 1)

    def _collect_if_due(self, trainer: pl.Trainer, batches: int) -> None:
        if self._schedule.is_due(batches):
            start = perf_counter()
            collected = gc.collect()
            pause = perf_counter() - start
            log_scalars(trainer, {"gc/pause_ms": 1e3 * pause, "gc/collected": float(collected)})
