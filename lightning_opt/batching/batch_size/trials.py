"""Trials of batch sizes on the Trainer itself, which leave no trace of themselves."""

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
    TIME,
    TRY,
    Length,
    Probe,
    RanOutError,
    largest_of_ranks,
)
from lightning_opt.batching.batch_size.search import FoundSizes, Trial, race, search
from lightning_opt.core.arguments import function_named, one_of
from lightning_opt.core.measure.exhaustion import (
    CAUGHT,
    free_unused,
    is_out_of_memory,
    recover_memory,
)
from lightning_opt.core.modules.patching import do_nothing, replaced

if TYPE_CHECKING:
    import lightning.pytorch as pl

log = logging.getLogger(__name__)

SAYS = logging.getLogger("lightning.pytorch.utilities.rank_zero")

LEFT_OUT = (
    lightnings.BatchSizeFinder,
    lightnings.Checkpoint,
    lightnings.EarlyStopping,
    lightnings.LearningRateFinder,
    lightnings.LearningRateMonitor,
    lightnings.ModelSummary,
    lightnings.ProgressBar,
    lightnings.Timer,
)
"""Callbacks of Lightning that take no memory and write, stop or draw."""


class Trials:
    """Runs some steps of a copy of the module, on the Trainer in whose ``setup`` it is.

    Callbacks take part as copies, with the memory that they need; those of Lightning that write,
    stop or draw do not, nor do loggers. The Trainer has another loop meanwhile.

    Args:
        trainer: In ``Callback.setup`` of its ``fit``.
        module: Its module, which is copied.
        target: Share of the limit that a size may take.
        budget_mb: A further limit.
        leave_out: A callback to leave out.
        worst: Makes the batch of so many samples that takes the most memory.

    Raises:
        ValueError: Under strategies whose ranks wait for each other within a forward or backward
            pass.
    """

    def __init__(
        self,
        trainer: pl.Trainer,
        module: pl.LightningModule,
        target: float,
        budget_mb: float | None,
        leave_out: Callback,
        worst: Callable[[int], Any] | None = None,
    ) -> None:
        self._trainer, self._module = trainer, module
        self._target, self._budget, self._worst = target, budget_mb, worst
        callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
        self._callbacks = [
            callback
            for callback in callbacks
            if callback is not leave_out and not isinstance(callback, LEFT_OUT)
        ]
        self.initial = self.samples = 0
        strategy = trainer.strategy
        waits = any(isinstance(part, nn.SyncBatchNorm) for part in module.modules())
        if trainer.world_size > 1 and (
            waits or not isinstance(strategy, DDPStrategy) or not module.automatic_optimization
        ):
            raise ValueError(
                "Batch sizes cannot be tried out under "
                + ("SyncBatchNorm" if waits else type(strategy).__name__)
                + (" and manual optimisation" if not module.automatic_optimization else "")
                + " with several ranks: they wait for each other within forward and backward "
                "passes, so one that runs out of memory would leave the others waiting. Find the "
                "size with strategy='ddp' or devices=1, or leave find out: DynamicBatchSize grows "
                "from epoch to epoch without running out."
            )

    def find(self, mode: str, max_size: int | None) -> FoundSizes:
        """Search batch sizes; see :func:`find_batch_size`."""
        with ExitStack() as stack:
            if not gc.get_freeze_count():  # or each trial looks at all that was ever imported
                gc.collect()
                gc.freeze()
                stack.callback(gc.unfreeze)
            first = self.run(None)
            known = {first.size: first}

            def run(size: int) -> Trial:
                trial = known.pop(size, None) or self.run(size)
                log.info("Batch size %d: %s", size, "fits" if trial.fits else "does not fit")
                return trial

            most = min(max_size or self.samples, self.samples)
            found = search(run, first.size, max(1, most), target=self._target)
            found.initial = self.initial
            if mode == "fastest" and found.largest:
                found.fastest, timed = race(lambda size: self.run(size, TIME), found.largest)
                known = {trial.size: trial for trial in (*found.trials, *timed)}
                found.trials = list(known.values())
        return found

    def run(self, size: int | None, length: Length = TRY) -> Trial:
        """Try a size; None for that of the loader."""
        trainer = self._trainer
        free_unused(trainer.strategy.root_device)
        with ExitStack() as stack:
            stack.enter_context(isolate_rng())
            stack.callback(SAYS.setLevel, SAYS.level)
            SAYS.setLevel(logging.WARNING)  # that training has stopped, after each trial
            probe = self._swap(stack, size, length)
            fits = True
            try:
                trainer._run(probe.model)
            except RanOutError:
                fits = False
            except CAUGHT as error:
                if not is_out_of_memory(error) or trainer.world_size > 1:
                    raise
                fits = False
            if not fits:
                self._clean_up()
        (free_unused if fits else recover_memory)(trainer.strategy.root_device)
        self.initial, self.samples = probe.initial or self.initial, probe.samples
        size = probe.size or 0
        if not fits or probe.peak is None:
            return Trial(size, False, None, 0.0, 0.0)
        values = [probe.peak.share, probe.peak.rest, -probe.speed(), -float(probe.samples)]
        if trainer.world_size > 1:
            values = largest_of_ranks(values, trainer.strategy.root_device)
        self.samples = -int(values[3])
        return Trial(size, values[0] <= self._target, values[0], values[1], -values[2])

    def _swap(self, stack: ExitStack, size: int | None, length: Length) -> Probe:
        """Replace what a run changes, until ``stack`` is closed."""
        trainer, module = self._trainer, self._module
        datamodule = getattr(trainer, "datamodule", None)
        kept = {id(trainer): trainer, id(trainer.strategy): trainer.strategy}
        if datamodule is not None:
            kept[id(datamodule)] = datamodule
        model, callbacks = copy.deepcopy((module, self._callbacks), dict(kept))
        model.trainer = trainer  # a LightningModule is copied without it
        worst = self._worst if length is TRY else None
        probe = Probe(size, self._budget, self.initial or None, length, worst)
        stack.callback(probe.stack.close)

        loop = _FitLoop(trainer, max_epochs=length.most)
        loop.epoch_loop = _TrainingEpochLoop(trainer, max_steps=length.most)
        loop._data_source = copy.copy(trainer.fit_loop._data_source)
        if loop._data_source.instance is module:
            loop._data_source.instance = model
        loop.epoch_loop.val_loop._data_source = copy.copy(
            trainer.fit_loop.epoch_loop.val_loop._data_source
        )
        state, strategy = trainer.state, trainer.strategy
        stack.callback(vars(state).update, dict(vars(state)))
        stack.callback(
            vars(trainer._logger_connector).update, dict(vars(trainer._logger_connector))
        )
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
        probe.model = model
        return probe

    def _clean_up(self) -> None:
        """Do after memory ran out what Lightning does after an exception."""
        trainer = self._trainer
        error = MemoryError("Out of memory in a trial.")
        module = trainer.strategy.lightning_module
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            callback.on_exception(trainer, module, error)
        trainer.strategy.on_exception(error)
        trainer._teardown()


class _Finding(Callback):
    """Searches, and leaves ``fit`` before it begins."""

    def __init__(self, mode: str, max_size: int | None, **settings: Any) -> None:
        self.mode, self.max_size, self.settings = mode, max_size, settings
        self.found: FoundSizes | None = None

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        trials = Trials(trainer, pl_module, leave_out=self, **self.settings)
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
    """Find the largest batch size that fits into memory, or the fastest.

    Each trial runs some steps of a copy of the model, with the Trainer's strategy and precision and
    copies of its callbacks, so that their memory counts. It leaves no trace: model, optimizers,
    random state, loaders, loggers and checkpoints are as before. Under DDP all ranks find the same
    size; one that runs out of memory tells the others.

    Args:
        trainer: As it will train, before its ``fit``.
        model: As for ``fit``.
        train_dataloaders: As for ``fit``.
        datamodule: As for ``fit``.
        mode: ``"largest"``, or ``"fastest"`` for the size with most samples a second, which is
            often smaller: the largest, its half, its quarter and so on are timed, loading and
            copying included, and the neighbours of the best of them.
        target: Share of the nearest limit of memory that a size may take; 1 for all of it.
        max_size: The largest size to try; None for as many samples as there are.
        budget_mb: A further limit.
        worst_batch: A function of a number of samples, or its import path, that returns the batch
            of so many that takes the most memory, such as the longest sequences, as the loader
            would give it. It takes the place of the loader's where memory is measured, and not
            where time is. None for what the loader gives first.

    Returns:
        Both sizes and all trials; ``report()`` prints them.

    Raises:
        ValueError: Under strategies whose ranks wait for each other within a forward or backward
            pass (FSDP, tensor parallelism), for loaders whose batch size cannot be changed, or for
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
        >>> found.largest  # all samples that there are
        64
    """
    finding = _Finding(
        mode=one_of("mode", mode, ("largest", "fastest")),
        target=target,
        max_size=max_size,
        budget_mb=budget_mb,
        worst=function_named("worst_batch", worst_batch),
    )
    with replaced(trainer, callbacks=[finding, *trainer.callbacks]):  # type: ignore[attr-defined]
        trainer.fit(model, train_dataloaders, datamodule=datamodule)
    if finding.found is None:
        raise ValueError(
            f"The search ran in processes that {type(trainer.strategy).__name__} has started and "
            "that are gone. Use a strategy that does not start them with spawn or fork, or "
            "DynamicBatchSize(find=True), which searches where it trains."
        )
    return finding.found
