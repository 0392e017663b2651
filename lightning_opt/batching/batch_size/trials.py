"""Trials of batch sizes: a few steps of a copy of the model on the user's Trainer."""

from __future__ import annotations

import copy
import gc
import logging
import time
import traceback
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from lightning_utilities.core import rank_zero
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import nn
from torch.utils.data import BatchSampler

from lightning_opt.batching.batch_size.search import FoundSizes, Trial, find_fastest, find_largest
from lightning_opt.batching.loader_sizes import (
    check_loader,
    check_single_loader,
    intercepted_loaders,
    samples_of,
    set_batch_size,
)
from lightning_opt.batching.peaks import LimitMeter, Peak
from lightning_opt.core.measure.exhaustion import (
    CAUGHT,
    free_unused,
    is_out_of_memory,
    recover_memory,
)
from lightning_opt.core.measure.timing import wait_for
from lightning_opt.core.modules.compiling import original_of
from lightning_opt.core.modules.patching import do_nothing, replaced
from lightning_opt.core.modules.preserve import isolated_random, preserved, restorer_of
from lightning_opt.core.modules.sharding import largest_over_ranks
from lightning_opt.core.modules.trial import SilentLogger
from lightning_opt.core.output.loggers import HISTORIES, History
from lightning_opt.trainer.lightning import (
    PACKAGES,
    BaseCallback,
    DDPStrategy,
    ParallelStrategy,
    package_of,
)
from lightning_opt.trainer.run_callback import RunCallback

if TYPE_CHECKING:
    import lightning.pytorch as pl

log = logging.getLogger(__name__)

AVERAGING = tuple(  # new in Lightning 2.6
    kind for p in PACKAGES if (kind := getattr(p.callbacks, "WeightAveraging", None))
)
"""Lightning's callbacks that hold a copy of the model from the first step on."""

MEMORY_TRIAL, TIMED_TRIAL = (4, 0.3, 30), (6, 0.5, 2000)
"""Minimum steps, minimum timed seconds (in a single process), maximum steps.

The first step creates the optimizer's state and is not timed.
"""


class TrialEnd(BaseException):
    """Ends a trial on all ranks. Not an ``Exception``, so that user code does not catch it."""


class TrialCallback(BaseCallback):
    """Sets the batch size, measures time and memory, and ends the trial.

    Attributes:
        loader_size: The batch size of the user's loader.
        samples: Number of samples of the loader on this rank.
        peak: The memory peak; None if memory ran out.
    """

    def __init__(
        self,
        size: int | None,
        length: tuple[int, float, int],
        meter: LimitMeter,
        worst_batch: Callable[[int], Any] | None,
        stack: ExitStack,
    ) -> None:
        self.size, self.length, self.meter = size, length, meter
        self.worst_batch, self.stack = worst_batch, stack
        self.loader_size = self.samples = 0
        self.peak: Peak | None = None
        self._ends: list[float] = []  # times of the ends of steps

    def set_size(self, loader: Any) -> None:
        self.loader_size = check_loader(loader)
        inner = getattr(loader.batch_sampler, "sampler", None)
        parts = SimpleNamespace(generator=loader.generator), loader.sampler, inner, loader.dataset
        self.stack.callback(restorer_of(*parts))
        self.samples = samples_of(loader)
        if not self.samples:
            raise ValueError("The training loader has no samples, so no batch size can be tried.")
        self.size = min(self.size or self.loader_size, self.samples)
        if self.size != self.loader_size:
            set_batch_size(loader, self.size)
        if type(loader.batch_sampler) is BatchSampler:
            # BatchNorm raises for a last batch of one sample.
            self.stack.enter_context(replaced(loader.batch_sampler, drop_last=True))

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        check_single_loader(trainer)
        strategy, plugin, loop = trainer.strategy, trainer.precision_plugin, trainer.fit_loop
        self.device, self.ranks = strategy.root_device, trainer.world_size
        # The user's limits must not end the trial. `configure_optimizers` has seen them already.
        loop.max_epochs, loop.epoch_loop.max_steps = self.length[2], -1
        for config in trainer.lr_scheduler_configs:
            vars(config.scheduler)["step"] = do_nothing  # a manual training_step may call it
        convert, log_value = plugin.convert_input, pl_module.log

        def convert_input(batch: Any) -> Any:  # the first function that receives a batch
            return convert(batch if self.worst_batch is None else self.worst_batch(self.size or 1))

        def log_locally(*args: Any, **kwargs: Any) -> None:
            log_value(*args, **{**kwargs, "sync_dist": False})

        optimization = loop.epoch_loop.automatic_optimization
        run, backward = map(self._end_on_all_ranks, (optimization.run, pl_module.backward))
        self.stack.enter_context(replaced(optimization, run=run))
        self.stack.enter_context(replaced(pl_module, backward=backward, log=log_locally))
        self.stack.enter_context(replaced(plugin, convert_input=convert_input))
        if isinstance(strategy, ParallelStrategy):
            # Without reduction, no rank waits for a rank that has run out of memory.
            self.stack.enter_context(strategy.block_backward_sync())
        self.meter.start()

    def _end_on_all_ranks(self, function: Any) -> Any:
        """Return a function that ends the trial on all ranks if one of them runs out of memory.

        Ranks exchange failures in an all-reduce after the function. Other ranks call it after their
        backward pass. A rank that failed before its backward pass calls it when the step ends, so
        the two calls match.
        """

        def guarded(*args: Any, **kwargs: Any) -> Any:
            result, ran_out = None, False
            try:
                result = function(*args, **kwargs)
            except CAUGHT as error:
                if not is_out_of_memory(error):
                    raise
                ran_out = True
            if any(largest_over_ranks([ran_out], self.device)):
                raise TrialEnd
            return result

        return guarded

    def on_before_backward(self, *args: Any, **kwargs: Any) -> None:
        self.meter.sample()

    def on_train_batch_end(self, *args: Any, **kwargs: Any) -> None:
        wait_for(self.device)
        self._ends.append(time.perf_counter())
        steps, (min_steps, min_seconds, max_steps) = len(self._ends), self.length
        # Ranks measure different times, so with several ranks only the number of steps counts.
        timed = self.ranks > 1 or self._seconds() >= min_seconds or steps >= max_steps
        if steps >= min_steps and timed:
            self.peak = self.meter.read()
            raise TrialEnd

    def _seconds(self) -> float:
        return self._ends[-1] - self._ends[0]

    def speed(self) -> float:
        return (len(self._ends) - 1) * (self.size or 1) / self._seconds()


class Trials:
    """Runs trials on the Trainer within ``Callback.setup``, without side effects.

    Args:
        trainer: The Trainer, which is about to fit ``module``.
        module: The model. Each trial trains a copy.
        callbacks: The user's callbacks. Copies of this library's callbacks and of those in
            ``AVERAGING`` run in a trial, so that their memory counts. Other callbacks might write
            files or logs, so they do not run.
        target: Share of the memory limit that a size may take.
        budget_mb: An additional limit on the memory of this process on its device.
        worst_batch: Returns a batch with the given number of samples, for measuring memory.

    Raises:
        ValueError: On several ranks, under strategies with collectives in forward or backward
            passes.
    """

    def __init__(
        self,
        trainer: pl.Trainer,
        module: pl.LightningModule,
        callbacks: Iterable[pl.Callback],
        target: float,
        budget_mb: float | None,
        worst_batch: Callable[[int], Any] | None = None,
    ) -> None:
        _check_strategy(trainer, module)
        self._trainer, self._module = trainer, module
        self._target, self._worst_batch = target, worst_batch
        self._meter = LimitMeter(trainer.strategy.root_device, budget_mb)
        run_callbacks = [c for c in callbacks if isinstance(c, (RunCallback, *AVERAGING))]
        self._callbacks = [c for c in run_callbacks if getattr(c, "runs_in_trials", True)]
        self._shared = [trainer, trainer.strategy, getattr(trainer, "datamodule", None)]
        self.initial = self._samples = 0

    def find(
        self, mode: str, max_size: int | None, round_down: Callable[[int], int] = int
    ) -> FoundSizes:
        """Search for the largest size, and for the fastest if ``mode`` is ``"fastest"``.

        ``round_down`` returns the largest allowed size up to the given one. It is called once
        ``initial`` is set.
        """
        with ExitStack() as stack:
            if not gc.get_freeze_count():  # unfrozen, each collection visits all imported objects
                gc.collect()
                gc.freeze()
                stack.callback(gc.unfreeze)
            first = self.run(None)  # with the loader's own size

            def run(size: int) -> Trial:
                trial = first if size == first.size else self.run(size)
                log.info("Batch size %d: %s", size, "fits" if trial.fits else "does not fit")
                return trial

            upper_limit = round_down(max(1, min(max_size or self._samples, self._samples)))
            largest, trials = find_largest(
                run, first.size, upper_limit, target=self._target, round_down=round_down
            )
            fastest = 0
            if mode == "fastest" and largest:
                fastest, timed = find_fastest(partial(self.run, timed=True), largest, round_down)
                trials = list({trial.size: trial for trial in (*trials, *timed)}.values())
            return FoundSizes(self.initial, largest, fastest, trials)

    def run(self, size: int | None, timed: bool = False) -> Trial:
        trainer, device = self._trainer, self._trainer.strategy.root_device
        free_unused(device)
        length, worst_batch = (TIMED_TRIAL, None) if timed else (MEMORY_TRIAL, self._worst_batch)
        with ExitStack() as stack:
            probe = TrialCallback(size, length, self._meter, worst_batch, stack)
            stack.enter_context(isolated_random(device))
            stack.enter_context(preserved(self._module))  # hooks of the copy may refer to it
            stack.callback(rank_zero.log.setLevel, rank_zero.log.level)
            rank_zero.log.setLevel(logging.WARNING)  # hides messages that each trial repeats
            model = self._replace_run_state(stack, probe)
            try:
                trainer._run(model)
                raise ValueError(
                    f"A trial with batch size {probe.size} ended by itself: the loader has no "
                    "batches, or the model has stopped the training."
                )
            except TrialEnd:
                pass
            except Exception as error:
                if not is_out_of_memory(error) or trainer.world_size > 1:
                    if hasattr(error, "add_note"):  # Python 3.11 and newer
                        error.add_note(
                            "A trial of a batch size trains a copy of the model. If only trials "
                            "fail, a function may still use the original, such as a hook `lambda "
                            "*args: self...`. Use a method instead, or set the size by hand."
                        )
                    raise
            finally:  # as Lightning does after an exception
                for callback in trainer.callbacks:  # type: ignore[attr-defined]
                    callback.on_exception(trainer, model, TrialEnd())
                trainer._teardown()
        (free_unused if probe.peak is not None else recover_memory)(device)
        self.initial, self._samples = probe.loader_size or self.initial, probe.samples
        if probe.peak is None:
            return Trial(probe.size or 0, False, None, 0.0, 0.0)
        values = [*probe.peak, -probe.speed(), -float(probe.samples)]
        peak, baseline, negative_speed, negative_samples = largest_over_ranks(values, device)
        self._samples = -int(negative_samples)
        return Trial(probe.size or 0, peak <= self._target, peak, baseline, -negative_speed)

    def _replace_run_state(self, stack: ExitStack, probe: TrialCallback) -> pl.LightningModule:
        """Replace the objects that a run changes, until ``stack`` closes. Return the model copy."""
        trainer, module, strategy = self._trainer, self._module, self._trainer.strategy
        model: pl.LightningModule
        # A copy shares compiled methods, which train the original. Trials run them uncompiled.
        uncompiled = [
            (part, name, method)
            for part in module.modules()
            for name, value in vars(part).items()
            if hasattr(method := original_of(value), "__self__")
        ]
        # The precision plugin has a loss scale.
        originals = module, self._callbacks, strategy.precision_plugin, uncompiled
        model, callbacks, precision, uncompiled = _copy_or_share(originals, self._shared)
        for copied in uncompiled:
            setattr(*copied)
        model.trainer = trainer  # a copy of a LightningModule has no Trainer
        for parameter in model.parameters():
            if not parameter.is_leaf:  # torch copies parameters of scripted modules with a graph
                parameter.detach_().requires_grad_()
        # A trial has no validation metrics for hooks to read, and must not save checkpoints.
        vars(model).update(on_train_epoch_end=do_nothing, configure_callbacks=do_nothing)

        old_loop = trainer.fit_loop
        package = package_of(trainer)
        loop = package.loops.fit_loop._FitLoop(trainer, max_epochs=old_loop.max_epochs)
        loop.epoch_loop = package.loops.training_epoch_loop._TrainingEpochLoop(
            trainer, max_steps=old_loop.max_steps
        )
        loop.epoch_loop.update_lr_schedulers = do_nothing
        validation = old_loop.epoch_loop.val_loop
        loop.epoch_loop.val_loop._data_source = copy.copy(validation._data_source)
        loop._data_source = copy.copy(old_loop._data_source)
        if loop._data_source.instance is module:
            loop._data_source.instance = model
        stack.callback(HISTORIES.__setitem__, trainer, HISTORIES.pop(trainer, History()))
        stack.callback(strategy.connect, module)
        for owner in (trainer.state, trainer._logger_connector, strategy):
            stack.callback(vars(owner).update, dict(vars(owner)))
        strategy.precision_plugin = precision
        stack.enter_context(
            replaced(
                trainer,
                fit_loop=loop,
                callbacks=[probe, *callbacks],
                _loggers=[SilentLogger(logger) for logger in trainer.loggers],
                profiler=package.profilers.PassThroughProfiler(),
                limit_train_batches=1.0,
                limit_val_batches=0,
                val_check_interval=1.0,  # older Lightning compares a number with the batches
                accumulate_grad_batches=1,
                reload_dataloaders_every_n_epochs=0,
                should_stop=False,
                log_every_n_steps=1,
            )
        )
        stack.enter_context(replaced(trainer._data_connector, prepare_data=do_nothing))
        datamodule = getattr(trainer, "datamodule", None)
        if datamodule is not None:
            stack.callback(setattr, datamodule, "__dict__", dict(vars(datamodule)))
            stack.enter_context(replaced(datamodule, setup=do_nothing, teardown=do_nothing))
        stack.enter_context(intercepted_loaders(trainer, probe.set_size))
        strategy.connect(model)
        return model


def _copy_or_share(value: Any, shared: list[Any]) -> Any:
    """Deep-copy, except for the objects in ``shared``. Append those that cannot be copied."""
    shared_before, memo = len(shared), {id(item): item for item in shared}
    while True:
        try:
            copied = copy.deepcopy(value, dict(memo))
        except Exception as error:
            calls = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
            calls = [frame for frame in calls if frame.f_code is copy.deepcopy.__code__]
            culprit: Any = calls[-1].f_locals["x"] if calls else None  # of the innermost call
            cannot_share = culprit is None or culprit is value or isinstance(culprit, nn.Module)
            if cannot_share or is_out_of_memory(error):
                raise
            kind: Any = type(culprit)
            if issubclass(kind, nn.UninitializedBuffer):
                memo[id(culprit)] = kind(device=culprit.device, dtype=culprit.dtype)
            else:
                memo[id(culprit)] = culprit
                shared.append(culprit)
            continue
        names = ", ".join(type(item).__qualname__ for item in shared[shared_before:])
        if names:
            rank_zero_warn(
                "Trials of batch sizes share these objects of the model or a callback, as they "
                f"cannot be copied, and may change them: {names}."
            )
        return copied


def _check_strategy(trainer: pl.Trainer, module: pl.LightningModule) -> None:
    if trainer.world_size == 1:
        return
    if any(isinstance(part, nn.SyncBatchNorm) for part in module.modules()):
        reason = "SyncBatchNorm"
    elif not module.automatic_optimization:
        reason = f"{type(trainer.strategy).__name__} and manual optimisation"
    elif not isinstance(trainer.strategy, DDPStrategy):
        reason = type(trainer.strategy).__name__
    elif trainer.strategy._ddp_kwargs.get("static_graph"):
        reason = "DDP's static_graph=True"
    else:
        return
    raise ValueError(
        f"Batch sizes cannot be tried out under {reason} with several ranks: ranks wait for each "
        "other in a pass, also for one that ran out of memory. Use strategy='ddp' or devices=1."
    )
