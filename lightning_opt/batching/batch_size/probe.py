"""A callback that measures the time and memory of a few steps with one batch size."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from lightning.pytorch import Callback
from lightning.pytorch.strategies import ParallelStrategy
from torch.utils.data import BatchSampler

from lightning_opt.batching.loader_sizes import (
    LoaderSizes,
    check_loader,
    samples_of,
    set_batch_size,
)
from lightning_opt.batching.peaks import LimitMeter, Peak
from lightning_opt.core.measure.exhaustion import CAUGHT, is_out_of_memory
from lightning_opt.core.measure.timing import StepClock, wait_for
from lightning_opt.core.modules.batches import UnsplittableBatchError, batch_length
from lightning_opt.core.modules.patching import replaced
from lightning_opt.core.modules.sharding import largest_over_ranks

if TYPE_CHECKING:
    import lightning.pytorch as pl


class TrialLength(NamedTuple):
    """The length of a trial. The first step creates the optimizer's state and is not timed.

    Attributes:
        min_steps: Minimum number of steps.
        min_seconds: Minimum of timed seconds, on a single process.
        max_steps: Maximum number of steps.
    """

    min_steps: int
    min_seconds: float
    max_steps: int


MEMORY_TRIAL = TrialLength(4, 0.3, 30)
TIMED_TRIAL = TrialLength(6, 0.5, 2000)


class RankOutOfMemoryError(BaseException):
    """Some rank ran out of memory. Not an ``Exception``, so that user code does not catch it."""


class TrialCallback(Callback):
    """Sets the batch size, measures time and memory, and stops all ranks if one runs out of memory.

    Attributes:
        loader_size: The batch size of the user's loader.
        samples: Number of samples of the loader on this rank.
        peak: The memory peak; None if the trial failed.
    """

    def __init__(
        self,
        size: int | None,
        budget_mb: float | None,
        length: TrialLength,
        worst_batch: Callable[[int], Any] | None,
    ) -> None:
        self.size, self.budget_mb = size, budget_mb
        self.length, self.worst_batch = length, worst_batch
        self.loader_size = self.samples = 0
        self.stack = ExitStack()
        self.meter: LimitMeter | None = None
        self.peak: Peak | None = None
        self._seconds: list[float] = []
        self._samples_per_step: list[int] = []

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self.stack.callback(LoaderSizes(trainer, self._set_size).close)

    def _set_size(self, loader: Any) -> None:
        self.loader_size = check_loader(loader)
        for part in (loader, loader.sampler, getattr(loader.batch_sampler, "sampler", None)):
            generator = getattr(part, "generator", None)
            if isinstance(generator, torch.Generator):
                self.stack.callback(generator.set_state, generator.get_state())
        samples = samples_of(loader)
        self.samples = 10**9 if samples is None else samples
        self.size = min(self.size or self.loader_size, self.samples)
        if self.size != self.loader_size:
            set_batch_size(loader, self.size)
        sampler = loader.batch_sampler
        if type(sampler) is BatchSampler:  # BatchNorm raises for a last batch of one sample
            self.stack.enter_context(replaced(sampler, drop_last=True))

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        strategy, loop = trainer.strategy, trainer.fit_loop.epoch_loop
        self.device, self.ranks = strategy.root_device, trainer.world_size

        def without_reduction(run: Any) -> Any:
            guarded = self._raise_on_all_ranks(run)

            def guarded_run(*args: Any, **kwargs: Any) -> Any:
                # Without reduction, no rank waits for a rank that has run out of memory.
                with ExitStack() as stack:
                    if isinstance(strategy, ParallelStrategy):
                        stack.enter_context(strategy.block_backward_sync())
                    return guarded(*args, **kwargs)

            return guarded_run

        def log(*args: Any, **kwargs: Any) -> None:
            log_value(*args, **{**kwargs, "sync_dist": False})  # no reduction over ranks

        def convert_input(batch: Any) -> Any:
            return convert(batch if self.worst_batch is None else self.worst_batch(self.size or 1))

        log_value, plugin = pl_module.log, trainer.precision_plugin
        convert = plugin.convert_input  # the first function that receives a batch
        forward = self._raise_on_all_ranks(strategy.training_step, always=False)
        for owner, patches in (
            (strategy, {"training_step": forward}),
            (pl_module, {"backward": self._raise_on_all_ranks(pl_module.backward), "log": log}),
            (
                loop.automatic_optimization,
                {"run": without_reduction(loop.automatic_optimization.run)},
            ),
            (loop.manual_optimization, {"run": without_reduction(loop.manual_optimization.run)}),
            (plugin, {"convert_input": convert_input}),
        ):
            self.stack.enter_context(replaced(owner, **patches))
        self.meter = LimitMeter(self.device, self.budget_mb)
        self.meter.start()
        self.clock = StepClock(self.device)

    def _raise_on_all_ranks(self, function: Any, always: bool = True) -> Any:
        """Return a function that raises on all ranks if one of them runs out of memory.

        Ranks exchange failures in an all-reduce after the function. With ``always=False`` only a
        failed rank calls it here: it pairs with the next all-reduce of the other ranks.
        """

        def guarded(*args: Any, **kwargs: Any) -> Any:
            result, ran_out = None, False
            try:
                result = function(*args, **kwargs)
            except CAUGHT as error:
                if not is_out_of_memory(error):
                    raise
                ran_out = True
            if (always or ran_out) and self.ranks > 1:
                ran_out = bool(largest_over_ranks([ran_out], self.device)[0])
            if ran_out:
                raise RankOutOfMemoryError
            return result

        return guarded

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        wait_for(self.device)
        self.clock.start()

    def on_before_backward(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, loss: torch.Tensor
    ) -> None:
        if self.meter is not None:
            self.meter.sample()

    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        wait_for(self.device)
        self.clock.stop()
        self._seconds += self.clock.read(wait=True)
        try:
            self._samples_per_step.append(batch_length(batch))
        except UnsplittableBatchError:
            self._samples_per_step.append(self.size or 1)
        # Several ranks count steps only, so that all stop at the same step.
        if self.ranks > 1 or sum(self._seconds[1:]) >= self.length.min_seconds:
            trainer.should_stop = len(self._seconds) >= self.length.min_steps

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        assert self.meter is not None
        self.peak = self.meter.read()

    def speed(self) -> float:
        if not self._seconds:
            return 0.0
        first = min(1, len(self._seconds) - 1)
        return sum(self._samples_per_step[first:]) / sum(self._seconds[first:])
