"""What looks on while a few steps with one batch size run."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
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
from lightning_opt.core.measure.timing import wait_for
from lightning_opt.core.modules.batches import UnsplittableBatchError, batch_length
from lightning_opt.core.modules.patching import replaced

if TYPE_CHECKING:
    import lightning.pytorch as pl


class Length(NamedTuple):
    """How long a trial is; the first step makes the optimizer's state and is not timed.

    Attributes:
        steps: At least.
        seconds: That are timed at least, where no other rank must stop too.
        most: Steps at most.
    """

    steps: int
    seconds: float
    most: int


TRY = Length(4, 0.3, 30)
TIME = Length(6, 0.5, 2000)


class RanOutError(BaseException):
    """Memory ran out on some rank; nobody's ``except Exception`` is to catch it."""


class Probe(Callback):
    """Gives loaders the size, takes time and memory, and has ranks agree when one runs out."""

    def __init__(
        self,
        size: int | None,
        budget_mb: float | None,
        initial: int | None,
        length: Length,
        worst: Callable[[int], Any] | None,
    ) -> None:
        self.size, self.budget_mb, self.length, self.worst = size, budget_mb, length, worst
        self.initial, self.samples = initial, 0
        self.seconds: list[float] = []
        self.rows: list[int] = []
        self.stack = ExitStack()
        self.meter: LimitMeter | None = None
        self.peak: Peak | None = None
        self.model: Any = None

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Watch loaders being loaded."""
        self.stack.callback(LoaderSizes(trainer, self._resize).close)

    def _resize(self, loader: Any) -> None:
        size = check_loader(loader)
        for part in (loader, loader.sampler, getattr(loader.batch_sampler, "sampler", None)):
            generator = getattr(part, "generator", None)
            if isinstance(generator, torch.Generator):
                self.stack.callback(generator.set_state, generator.get_state())
        samples = samples_of(loader)
        self.samples = 10**9 if samples is None else samples
        if self.size is None:
            self.size = self.initial = size
        self.size = min(self.size, self.samples)
        if size != self.size:
            set_batch_size(loader, self.size)
        sampler = loader.batch_sampler
        if type(sampler) is BatchSampler:  # else a rest of one sample decides, at random sizes
            self.stack.enter_context(replaced(sampler, drop_last=True))

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Guard forward and backward passes, and begin to measure."""
        strategy, loop = trainer.strategy, trainer.fit_loop.epoch_loop
        self.device, self.ranks = strategy.root_device, trainer.world_size
        enter = self.stack.enter_context

        def unreduced(run: Any) -> Any:
            guarded = self._guarded(run)

            def around(*args: Any, **kwargs: Any) -> Any:
                # Gradients are not reduced, so that no rank waits for one that has run out.
                with ExitStack() as stack:
                    if isinstance(strategy, ParallelStrategy):
                        stack.enter_context(strategy.block_backward_sync())
                    return guarded(*args, **kwargs)

            return around

        enter(replaced(strategy, training_step=self._guarded(strategy.training_step, tell=False)))
        backward, log = self._guarded(pl_module.backward), _without_ranks(pl_module.log)
        enter(replaced(pl_module, backward=backward, log=log))
        for optimization in (loop.automatic_optimization, loop.manual_optimization):
            enter(replaced(optimization, run=unreduced(optimization.run)))
        if (worst := self.worst) is not None:
            plugin = trainer.precision_plugin
            convert = plugin.convert_input  # the first that a batch meets

            def convert_input(batch: Any) -> Any:
                return convert(worst(self.size or 1))

            enter(replaced(plugin, convert_input=convert_input))
        self.meter = LimitMeter(self.device, self.budget_mb)
        self.meter.start()

    def _guarded(self, function: Any, tell: bool = True) -> Any:
        """Return it so that all ranks raise if it runs out of memory here or on another one.

        Args:
            function: What may run out.
            tell: Whether the others are told at the end of each call, and not only of a failure.
        """

        def guarded(*args: Any, **kwargs: Any) -> Any:
            result, ran_out = None, False
            try:
                result = function(*args, **kwargs)
            except CAUGHT as error:
                if not is_out_of_memory(error):
                    raise
                ran_out = True
            # One call for each time that ranks agree: after a forward pass only who has failed
            # calls, and meets the others at the end of their backward pass.
            if (tell or ran_out) and self.ranks > 1:
                ran_out = bool(largest_of_ranks([ran_out], self.device)[0])
            if ran_out:
                raise RanOutError
            return result

        return guarded

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Begin to take the time: of loading and copying too."""
        wait_for(self.device)
        self.began = time.perf_counter()

    def on_before_backward(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, loss: torch.Tensor
    ) -> None:
        """Look at memory, where the system does not keep its peak."""
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
        """Take the time, and stop after enough of it."""
        wait_for(self.device)
        now = time.perf_counter()
        self.seconds.append(now - self.began)
        self.began = now
        try:
            self.rows.append(batch_length(batch))
        except UnsplittableBatchError:
            self.rows.append(self.size or 1)
        # Ranks would not stop at the same step.
        if self.ranks > 1 or sum(self.seconds[1:]) >= self.length.seconds:
            trainer.should_stop = len(self.seconds) >= self.length.steps

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Read the peak."""
        assert self.meter is not None
        self.peak = self.meter.read()

    def speed(self) -> float:
        """Return samples a second of all steps but the first, or of that if it is the only one."""
        first = min(1, len(self.seconds) - 1)
        return sum(self.rows[first:]) / sum(self.seconds[first:]) if self.seconds else 0.0


def largest_of_ranks(values: list[float], device: torch.device) -> list[float]:
    """Return the largest of each value over all ranks. Reads from the device."""
    largest = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    found: list[float] = largest.tolist()
    return found


def _without_ranks(log_value: Any) -> Any:
    """Return ``self.log`` that waits for no other rank."""

    def own(*args: Any, **kwargs: Any) -> None:
        log_value(*args, **{**kwargs, "sync_dist": False})

    return own
