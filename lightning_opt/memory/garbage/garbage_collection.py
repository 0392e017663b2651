"""Garbage collection when it suits the run instead of whenever Python thinks of it."""

from __future__ import annotations

import gc
import logging
from typing import TYPE_CHECKING, Any

from lightning.pytorch import Callback

from lightning_opt.core.arguments import at_least
from lightning_opt.core.loggers import log_scalars
from lightning_opt.core.report import Report
from lightning_opt.core.schedule import Schedule
from lightning_opt.memory.gc_pauses import Pauses, PauseWatch

if TYPE_CHECKING:
    import lightning.pytorch as pl

log = logging.getLogger(__name__)


class GarbageCollection(Callback):
    """Turns Python's automatic garbage collection off and collects on a schedule instead.

    Python collects whenever enough objects have been made, and a full collection looks at every
    object there is: with torch and Lightning imported that takes a fifth of a second, and it comes
    at another step on every rank, so that in a distributed run all wait for each in turn. Here all
    ranks collect at the same step, and what exists by then is frozen, that is, set aside so that no
    collection looks at it again. Everything is put back when training ends or fails.

    Objects in reference cycles live until the next collection. If they hold tensors, collect more
    often, or add :class:`~lightning_opt.MemoryCleanup`, which collects when memory runs short.

    Logged at every collection on the schedule:

    ===================== ======================================================================
    ``gc/pause_ms``       milliseconds that it took
    ``gc/collected``      objects that it freed
    ===================== ======================================================================

    Args:
        every_n_steps: Batches, of training and validation, from one collection to the next, at
            least 1.
        freeze: Freeze what is there when automatic collection is turned off, and what the first
            collection on the schedule has left (optimizer state, compiled code). If something is
            frozen already, it is left to whoever froze it.
        baseline_steps: Batches at the start in which Python collects as usual and its pauses are
            measured, for comparison in :meth:`report`; with 0 there are none.

    Raises:
        ValueError: In ``__init__`` for arguments out of range; in ``setup`` if there are two.

    Example:
        >>> import lightning as L
        >>> import lightning_opt as lo
        >>> garbage = lo.GarbageCollection(every_n_steps=200)
        >>> trainer = L.Trainer(callbacks=[garbage], logger=False)

    References:
        PyTorch team (2024), *TorchTitan*: ``GarbageCollection`` in ``tools/utils.py``, where
        collections of 512 ranks at different steps had cost about 1.5% of the time.
    """

    def __init__(
        self, every_n_steps: int = 100, freeze: bool = True, baseline_steps: int = 50
    ) -> None:
        self._schedule = Schedule(every_n_steps)
        self.freeze = freeze
        self.baseline_steps = at_least("baseline_steps", baseline_steps, 0)
        self._watch = PauseWatch()
        self._reset()
        self._holding = self._frozen = self._was_enabled = False

    def _reset(self) -> None:
        self._batches = 0
        self._automatic, self._scheduled = Pauses(), Pauses()
        self._full = self._full_after = 0.0

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Refuse a second one: each would put back what the other has changed."""
        callbacks = trainer.callbacks  # type: ignore[attr-defined]
        if sum(isinstance(callback, GarbageCollection) for callback in callbacks) > 1:
            raise ValueError(
                "Two GarbageCollection callbacks would undo each other's settings; keep one."
            )

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Freeze what is there, and begin with the baseline."""
        self._restore()
        self._reset()
        self._was_enabled, self._holding = gc.isenabled(), True
        self._watch.pauses = Pauses()
        self._watch.start()
        if self.baseline_steps and self._was_enabled:
            return
        self._take_over()

    def _take_over(self) -> None:
        """End the baseline: from here on Python collects only when told to."""
        self._automatic = self._watch.pauses
        self._automatic.steps = self._batches
        gc.disable()
        self._full = self._collect().seconds
        self._freeze()
        self._scheduled = self._watch.pauses = Pauses()

    def _freeze(self) -> None:
        if self.freeze and (self._frozen or gc.get_freeze_count() == 0):
            gc.freeze()
            self._frozen = True

    def _collect(self) -> Pauses:
        """Collect everything and return this collection alone."""
        total, self._watch.pauses = self._watch.pauses, Pauses()
        gc.collect()
        one, self._watch.pauses = self._watch.pauses, total
        return one

    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Collect, if it is time."""
        self._step(trainer)

    def on_validation_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Collect, if it is time."""
        if self._holding:  # not in the sanity check, nor in `trainer.validate`
            self._step(trainer)

    def _step(self, trainer: pl.Trainer) -> None:
        self._batches += 1
        if self._batches == self.baseline_steps and self._was_enabled:
            self._take_over()
            return
        if self._was_enabled and self._batches < self.baseline_steps:
            return
        self._scheduled.steps += 1
        if not self._schedule.is_due(self._batches):
            return
        one = self._collect()
        self._scheduled.add(one.seconds, one.collected)
        self._full_after = one.seconds
        if self._scheduled.collections == 1:
            self._freeze()
        log_scalars(
            trainer, {"gc/pause_ms": 1e3 * one.seconds, "gc/collected": float(one.collected)}
        )

    def report(self) -> Report:
        """Return the pauses of the baseline beside those of the schedule."""
        rows = [
            {
                "collections": name,
                "steps": pauses.steps,
                "count": pauses.collections,
                "ms a step": 1e3 * pauses.seconds / pauses.steps if pauses.steps else None,
                "longest ms": 1e3 * pauses.longest,
                "objects freed": pauses.collected,
            }
            for name, pauses in (("automatic", self._automatic), ("scheduled", self._scheduled))
        ]
        notes = [
            f"A full collection took {1e3 * self._full:.3g} ms before anything was frozen"
            + (
                f" and {1e3 * self._full_after:.3g} ms the last time on the schedule."
                if self._scheduled.collections
                else "."
            ),
            "Automatic full collections are rare, so that a short baseline may hold none. On "
            "several ranks each of them stops all the others too.",
        ]
        return Report(
            f"GarbageCollection(every_n_steps={self._schedule.every_n_steps})", rows, notes
        )

    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        """Put everything back; Lightning calls no ``teardown`` after an exception."""
        self._restore()

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Put everything back."""
        self._restore()

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Put everything back."""
        self._restore()

    def _restore(self) -> None:
        self._watch.stop()
        if not self._holding:
            return
        self._holding = False
        if self._frozen:
            gc.unfreeze()
            self._frozen = False
        if self._was_enabled:
            gc.enable()
