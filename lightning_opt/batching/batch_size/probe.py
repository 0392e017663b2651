"""A callback that runs, times and measures a few steps with one batch size."""

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


class Length(NamedTuple):
    """The length of a trial. The first step creates the optimizer's state and is not timed.

    Attributes:
        steps: At least this many steps.
        seconds: At least this many timed seconds, on a single process.
        most: At most this many steps.
    """

    steps: int
    seconds: float
    most: int


TRY = Length(4, 0.3, 30)
TIME = Length(6, 0.5, 2000)


class RanOutError(BaseException):
    """Memory ran out on some rank. Not an ``Exception``, so that no user code catches it."""


class Probe(Callback):
    """Sets the batch size, measures time and memory, and stops all ranks if one runs out.

    Attributes:
        loader_size: The batch size of the user's loader.
        samples: Samples of the loader on this rank.
        peak: The memory peak; None if the trial failed.
    """

    def __init__(
        self,
        size: int | None,
        budget_mb: float | None,
        length: Length,
        worst: Callable[[int], Any] | None,
    ) -> None:
        self.size, self.budget_mb, self.length, self.worst = size, budget_mb, length, worst
        self.loader_size = self.samples = 0
        self.stack = ExitStack()
        self.meter: LimitMeter | None = None
        self.peak: Peak | None = None
        self._seconds: list[float] = []
        self._rows: list[int] = []

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self.stack.callback(LoaderSizes(trainer, self._resize).close)

    def _resize(self, loader: Any) -> None:
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
        if type(sampler) is BatchSampler:  # a last batch of one sample may fail by its size
            self.stack.enter_context(replaced(sampler, drop_last=True))

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        strategy, loop = trainer.strategy, trainer.fit_loop.epoch_loop
        self.device, self.ranks = strategy.root_device, trainer.world_size

        def unreduced(run: Any) -> Any:
            guarded = self._guarded(run)

            def run_unreduced(*args: Any, **kwargs: Any) -> Any:
                # Without reduction, no rank waits for one that has run out of memory.
                with ExitStack() as stack:
                    if isinstance(strategy, ParallelStrategy):
                        stack.enter_context(strategy.block_backward_sync())
                    return guarded(*args, **kwargs)

            return run_unreduced

        def log(*args: Any, **kwargs: Any) -> None:
            log_value(*args, **{**kwargs, "sync_dist": False})  # waits for no other rank

        def convert_input(batch: Any) -> Any:
            return convert(batch if self.worst is None else self.worst(self.size or 1))

        log_value, plugin = pl_module.log, trainer.precision_plugin
        convert = plugin.convert_input  # the first function that gets a batch
        forward = self._guarded(strategy.training_step, always=False)
        for owner, patches in (
            (strategy, {"training_step": forward}),
            (pl_module, {"backward": self._guarded(pl_module.backward), "log": log}),
            (loop.automatic_optimization, {"run": unreduced(loop.automatic_optimization.run)}),
            (loop.manual_optimization, {"run": unreduced(loop.manual_optimization.run)}),
            (plugin, {"convert_input": convert_input}),
        ):
            self.stack.enter_context(replaced(owner, **patches))
        self.meter = LimitMeter(self.device, self.budget_mb)
        self.meter.start()
        self.clock = StepClock(self.device)

    def _guarded(self, function: Any, always: bool = True) -> Any:
        """Return a function that raises on all ranks if one of them runs out of memory.

        With ``always=False`` only a failed rank takes part in the exchange of failures, and meets
        the others at their next one.
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
                raise RanOutError
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
            self._rows.append(batch_length(batch))
        except UnsplittableBatchError:
            self._rows.append(self.size or 1)
        # With several ranks by steps alone, so that all stop at the same one.
        if self.ranks > 1 or sum(self._seconds[1:]) >= self.length.seconds:
            trainer.should_stop = len(self._seconds) >= self.length.steps

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        assert self.meter is not None
        self.peak = self.meter.read()

    def speed(self) -> float:
        first = min(1, len(self._seconds) - 1)
        return sum(self._rows[first:]) / sum(self._seconds[first:]) if self._seconds else 0.0
