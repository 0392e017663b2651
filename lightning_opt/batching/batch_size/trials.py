"""Trials of batch sizes on the user's Trainer, without side effects."""

from __future__ import annotations

import copy
import gc
import logging
from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from lightning.pytorch import Callback
from lightning.pytorch import callbacks as lightnings
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.loops.fit_loop import _FitLoop
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from lightning.pytorch.profilers import PassThroughProfiler
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities.exceptions import _TunerExitException
from lightning.pytorch.utilities.seed import isolate_rng
from torch import nn

from lightning_opt.batching.batch_size.probe import (
    MEMORY_TRIAL,
    TIMED_TRIAL,
    RankOutOfMemoryError,
    TrialCallback,
    TrialLength,
)
from lightning_opt.batching.batch_size.search import FoundSizes, Trial, find_fastest, search
from lightning_opt.core.arguments import check_one_of, function_named
from lightning_opt.core.measure.exhaustion import (
    CAUGHT,
    free_unused,
    is_out_of_memory,
    recover_memory,
)
from lightning_opt.core.modules.patching import do_nothing, replaced
from lightning_opt.core.modules.sharding import largest_over_ranks

if TYPE_CHECKING:
    import lightning.pytorch as pl

log = logging.getLogger(__name__)

EXCLUDED = (
    lightnings.BatchSizeFinder,
    lightnings.Checkpoint,
    lightnings.EarlyStopping,
    lightnings.LearningRateFinder,
    lightnings.LearningRateMonitor,
    lightnings.ModelSummary,
    lightnings.ProgressBar,
    lightnings.Timer,
)
"""Lightning's callbacks that save files, stop or time training, or print. They use no memory."""


class Trials:
    """Runs a few steps of a copy of the module on its Trainer, within ``Callback.setup``.

    Copies of the callbacks run too, so that their memory counts, except the callbacks in
    ``EXCLUDED``. Loggers and the Trainer's fit loop are replaced during a trial.

    Raises:
        ValueError: On several ranks, under strategies with collectives in forward or backward
            passes.
    """

    def __init__(
        self,
        trainer: pl.Trainer,
        module: pl.LightningModule,
        target: float,
        budget_mb: float | None,
        excluded: Callback,
        worst_batch: Callable[[int], Any] | None = None,
    ) -> None:
        self._trainer, self._module = trainer, module
        self._target, self._budget, self._worst_batch = target, budget_mb, worst_batch
        callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
        self._callbacks = [
            callback
            for callback in callbacks
            if callback is not excluded and not isinstance(callback, EXCLUDED)
        ]
        self._initial = self._samples = 0
        strategy = type(trainer.strategy).__name__
        if any(isinstance(part, nn.SyncBatchNorm) for part in module.modules()):
            strategy = "SyncBatchNorm"
        elif not module.automatic_optimization:
            strategy += " and manual optimisation"
        elif isinstance(trainer.strategy, DDPStrategy):
            strategy = ""
        if trainer.world_size > 1 and strategy:
            raise ValueError(
                f"Batch sizes cannot be tried out under {strategy} with several ranks: ranks wait "
                "for each other within forward and backward passes, so a rank that runs out of "
                "memory would leave the others waiting. Find the size with strategy='ddp' or "
                "devices=1, or leave find out: DynamicBatchSize grows from epoch to epoch without "
                "running out."
            )

    def find(self, mode: str, max_size: int | None) -> FoundSizes:
        with ExitStack() as stack:
            if not gc.get_freeze_count():  # otherwise each collection visits all imported objects
                gc.collect()
                gc.freeze()
                stack.callback(gc.unfreeze)
            first = self.run(None)  # with the loader's own size

            def run(size: int) -> Trial:
                trial = first if size == first.size else self.run(size)
                log.info("Batch size %d: %s", size, "fits" if trial.fits else "does not fit")
                return trial

            most = max(1, min(max_size or self._samples, self._samples))
            sizes = search(run, first.size, most, target=self._target)
            sizes.initial = self._initial
            if mode == "fastest" and sizes.largest:
                sizes.fastest, timed = find_fastest(
                    lambda size: self.run(size, TIMED_TRIAL), sizes.largest
                )
                by_size = {trial.size: trial for trial in (*sizes.trials, *timed)}
                sizes.trials = list(by_size.values())
        return sizes

    def run(self, size: int | None, length: TrialLength = MEMORY_TRIAL) -> Trial:
        trainer, device = self._trainer, self._trainer.strategy.root_device
        free_unused(device)
        probe = TrialCallback(
            size, self._budget, length, self._worst_batch if length is MEMORY_TRIAL else None
        )
        fits = True
        with ExitStack() as stack:
            stack.enter_context(isolate_rng())
            lightning_log = logging.getLogger("lightning.pytorch.utilities.rank_zero")
            stack.callback(lightning_log.setLevel, lightning_log.level)
            lightning_log.setLevel(logging.WARNING)  # no "Trainer.fit stopped" after each trial
            model = self._swap(stack, probe)
            try:
                trainer._run(model)
            except RankOutOfMemoryError:
                fits = False
            except CAUGHT as error:
                if not is_out_of_memory(error) or trainer.world_size > 1:
                    raise
                fits = False
            if not fits:
                self._clean_up()
        (free_unused if fits else recover_memory)(device)
        self._initial, self._samples = probe.loader_size or self._initial, probe.samples
        size = probe.size or 0
        if not fits or probe.peak is None:
            return Trial(size, False, None, 0.0, 0.0)
        values = [probe.peak.share, probe.peak.current, -probe.speed(), -float(probe.samples)]
        if trainer.world_size > 1:
            values = largest_over_ranks(values, device)
        peak, baseline, negative_speed, negative_samples = values
        self._samples = -int(negative_samples)
        return Trial(size, peak <= self._target, peak, baseline, -negative_speed)

    def _swap(self, stack: ExitStack, probe: TrialCallback) -> pl.LightningModule:
        """Replace what a run changes until ``stack`` is closed. Return the copy of the module."""
        trainer, module, max_steps = self._trainer, self._module, probe.length.max_steps
        state, strategy = trainer.state, trainer.strategy
        datamodule = getattr(trainer, "datamodule", None)
        not_copied = (trainer, strategy, datamodule)
        memo = {id(item): item for item in not_copied if item is not None}
        model, callbacks = copy.deepcopy((module, self._callbacks), memo)
        model.trainer = trainer  # a copy of a LightningModule has no Trainer
        stack.callback(probe.stack.close)

        loop = _FitLoop(trainer, max_epochs=max_steps)
        loop.epoch_loop = _TrainingEpochLoop(trainer, max_steps=max_steps)
        loop._data_source = copy.copy(trainer.fit_loop._data_source)
        if loop._data_source.instance is module:
            loop._data_source.instance = model
        validation = trainer.fit_loop.epoch_loop.val_loop
        loop.epoch_loop.val_loop._data_source = copy.copy(validation._data_source)
        for owner in (state, trainer._logger_connector):
            stack.callback(vars(owner).update, dict(vars(owner)))
        stack.callback(strategy.connect, module)
        stack.callback(vars(strategy).update, dict(vars(strategy)))
        stack.enter_context(
            replaced(
                trainer,
                fit_loop=loop,
                callbacks=[probe, *callbacks],
                _loggers=[DummyLogger()] if trainer.loggers else [],
                profiler=PassThroughProfiler(),
                limit_train_batches=1.0,
                limit_val_batches=0,
                num_sanity_val_steps=0,
                accumulate_grad_batches=1,
                reload_dataloaders_every_n_epochs=0,
                should_stop=False,
                enable_autolog_hparams=False,
                val_check_interval=1.0,
                log_every_n_steps=1,
            )
        )
        stack.enter_context(replaced(trainer._data_connector, prepare_data=do_nothing))
        if datamodule is not None:
            hooks = dict.fromkeys(("setup", "teardown", "on_exception"), do_nothing)
            stack.enter_context(replaced(datamodule, **hooks))
        strategy.connect(model)
        return model

    def _clean_up(self) -> None:
        """Do what Lightning does after an exception, because the trial caught it."""
        trainer = self._trainer
        error = MemoryError("Out of memory in a trial.")
        module = trainer.strategy.lightning_module
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            callback.on_exception(trainer, module, error)
        trainer.strategy.on_exception(error)
        trainer._teardown()


class SearchCallback(Callback):
    """Searches in ``setup``, then ends ``fit`` before training."""

    def __init__(self, mode: str, max_size: int | None, *settings: Any) -> None:
        self.mode, self.max_size, self.settings = mode, max_size, settings
        self.found: FoundSizes | None = None

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        target, budget_mb, worst_batch = self.settings
        trials = Trials(trainer, pl_module, target, budget_mb, self, worst_batch)
        self.found = trials.find(self.mode, self.max_size)
        raise _TunerExitException


def find_batch_size(
    trainer: pl.Trainer,
    model: pl.LightningModule,
    train_dataloaders: Any = None,
    datamodule: pl.LightningDataModule | None = None,
    mode: str = "largest",
    target: float = 0.9,
    max_size: int | None = None,
    budget_mb: float | None = None,
    worst_batch: Callable[[int], Any] | str | None = None,
) -> FoundSizes:
    """Find the largest batch size that fits into memory, or the fastest size.

    Each trial runs a few steps of a copy of the model, with the Trainer's strategy and precision
    and copies of its callbacks, so that their memory counts. Model, optimizers, random state,
    loaders, loggers and checkpoints stay unchanged. Under DDP all ranks find the same size.

    Args:
        trainer: The Trainer, before its ``fit``.
        model: As for ``fit``.
        train_dataloaders: As for ``fit``.
        datamodule: As for ``fit``.
        mode: ``"largest"``, or ``"fastest"`` for the size with the most samples per second, which
            is often smaller. It times the largest size, its half, its quarter and so on, then the
            neighbours of the best size. Times include loading and copying of batches.
        target: Share of the nearest memory limit that a size may take; 1 for all of it.
        max_size: The largest size to try; None for the number of samples.
        budget_mb: An additional limit on the memory of this process on its device.
        worst_batch: A function, or its import path, that takes a number of samples and returns the
            batch of that size that needs the most memory, such as the longest sequences, in the
            form in which the loader returns batches. It is used to measure memory, not time. None
            for the loader's batches.

    Returns:
        The largest and the fastest size, and all trials; ``report()`` returns a table of them.

    Raises:
        ValueError: On several ranks, under strategies with collectives in forward or backward
            passes (FSDP, tensor parallelism); for loaders whose batch size cannot be changed; for
            an unknown ``mode``.

    Example:
        >>> import lightning as L
        >>> import lightning_opt as lo
        >>> from lightning.pytorch.demos.boring_classes import BoringModel
        >>> quiet = {"enable_progress_bar": False, "enable_model_summary": False}
        >>> trainer = L.Trainer(
        ...     accelerator="cpu", max_epochs=1, logger=False, enable_checkpointing=False, **quiet
        ... )
        >>> found = lo.find_batch_size(trainer, BoringModel())
        >>> found.largest  # all samples
        64
    """
    check_one_of("mode", mode, ("largest", "fastest"))
    function = function_named("worst_batch", worst_batch)
    search_callback = SearchCallback(mode, max_size, target, budget_mb, function)
    with replaced(trainer, callbacks=[search_callback, *trainer.callbacks]):  # type: ignore[attr-defined]
        trainer.fit(model, train_dataloaders, datamodule=datamodule)
    if search_callback.found is None:
        raise ValueError(
            f"The search ran in processes that {type(trainer.strategy).__name__} started and that "
            "have ended. Use a strategy that does not start them with spawn or fork, or "
            "DynamicBatchSize(find=True), which searches where it trains."
        )
    return search_callback.found
