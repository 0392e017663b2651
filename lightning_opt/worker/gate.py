"""Trains in blocks of steps, pauses between blocks, and times each step."""

from __future__ import annotations

import contextlib
import math
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_opt.core.measure.machine import allowed_cpus
from lightning_opt.core.measure.timing import StepClock, wait_for
from lightning_opt.core.modules.batches import samples_in
from lightning_opt.core.modules.sharding import data_ranks
from lightning_opt.trainer.lightning import (
    BaseCallback,
    Checkpoint,
    EarlyStopping,
    LightningModule,
    MultiProcessingLauncher,
    package_of,
    seed_everything,
)
from lightning_opt.worker.recipes import Factory, Settings, as_list, as_mapping, instantiate, make

if TYPE_CHECKING:
    import lightning.pytorch as pl

RUN_DEFAULTS: dict[str, Any] = {
    "logger": False, "enable_checkpointing": False, "enable_progress_bar": False,
    "enable_model_summary": False, "num_sanity_val_steps": 0, "limit_val_batches": 0,
    "max_epochs": 100_000, "max_steps": -1,
}  # fmt: skip
"""Default Trainer arguments: no output and no validation. The number of epochs is finite, because
learning rate schedules may be computed from it."""

SPIN_SECONDS = 0.01
"""Seconds to wait after a block, until OpenMP's threads stop spinning. Spinning threads slow down
the next process's first steps by up to 10%."""


class Step(NamedTuple):
    """One batch of a run.

    Attributes:
        seconds: From the end of the previous batch to its own end, including the wait for data.
            Measured by CUDA events on a GPU. On devices other than CPU and GPU: the mean over its
            block.
        loss: The loss that ``training_step`` returned, or NaN.
        samples: Samples in the batch, over all ranks.
    """

    seconds: float
    loss: float
    samples: int


class Stopped(Exception):  # noqa: N818 - a way to end, not an error
    """Raised inside the run to end it after its callbacks and loaders have cleaned up."""


class StepGate(BaseCallback):
    """Pauses the run before its first step and after each block of steps.

    Loader workers are suspended too. Otherwise they would prepare batches during the pause, and the
    next block would be too fast.

    Args:
        exchange: Called on rank 0 with the Trainer and the steps of the last block (empty before
            the first block). It waits, and returns the number of steps in the next block. 0 ends
            the run.

    Attributes:
        started: Whether the run has reached its first step.
    """

    def __init__(self, exchange: Callable[[pl.Trainer, list[Step]], int]) -> None:
        self.started = False
        self._exchange = exchange
        self._block_steps = 0
        self._clock: StepClock
        self._group: Any = None
        self._losses: list[Any] = []
        self._samples: list[int] = []

    def __deepcopy__(self, memo: dict[int, Any]) -> pl.Callback:
        return BaseCallback()  # a search for batch sizes copies callbacks, and must not pause

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.world_size > 1:  # with NCCL, waiting would keep the GPU busy
            self._group = dist.new_group(backend="gloo", timeout=timedelta(days=1))
        self._clock = StepClock(trainer.strategy.root_device)
        self.started = True
        self._start_block(trainer)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._losses.append(_loss_of(outputs, trainer.accumulate_grad_batches))
        self._samples.append(samples_in(batch, default=1) * data_ranks(trainer))
        block_ended = len(self._losses) == self._block_steps
        if block_ended:
            wait_for(trainer.strategy.root_device)
        self._clock.stop()
        if block_ended:
            self._start_block(trainer)
        start_on_first_cpu(trainer)

    def take_steps(self, trainer: pl.Trainer) -> list[Step]:
        """Return the steps since the last call."""
        if not self._losses:
            return []
        device = trainer.strategy.root_device
        seconds = self._clock.read(wait=True)
        if device.type not in ("cpu", "cuda"):
            seconds = [math.fsum(seconds) / len(seconds)] * len(seconds)
        losses = [float(loss) for loss in self._losses]
        steps = [Step(*step) for step in zip(seconds, losses, self._samples, strict=True)]
        self._losses, self._samples = [], []
        if device.type == "cpu":
            time.sleep(SPIN_SECONDS)
        return steps

    def _start_block(self, trainer: pl.Trainer) -> None:
        with _children_suspended():
            taken = self.take_steps(trainer)
            steps = self._exchange(trainer, taken) if trainer.is_global_zero else 0
            if trainer.world_size > 1:  # other ranks wait here, not in the middle of a step
                value = torch.tensor(steps)
                dist.broadcast(value, 0, self._group)
                steps = int(value)
        if steps < 1:
            raise Stopped
        self._block_steps = steps
        wait_for(trainer.strategy.root_device)
        self._clock.pause()
        self._clock.start()


@contextlib.contextmanager
def _children_suspended() -> Iterator[None]:
    """Suspend the child processes that multiprocessing has started."""
    import psutil

    stopped = []
    for child in multiprocessing.active_children():
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(child.pid)
            process.suspend()
            stopped.append(process)
    try:
        yield
    finally:
        for process in stopped:
            with contextlib.suppress(psutil.Error):
                process.resume()


def start_on_first_cpu(trainer: pl.Trainer) -> None:
    """Move this thread to the CPU where all runs start their steps, without pinning it there.

    On a shared machine, CPUs can differ in speed by 10% for seconds. Pinning is not needed, because
    a thread mostly stays on its CPU. It would also pin threads and workers started later.
    """
    if trainer.strategy.root_device.type == "cpu" and hasattr(os, "sched_setaffinity"):
        allowed = allowed_cpus()
        os.sched_setaffinity(0, {allowed[trainer.local_rank % len(allowed)]})
        os.sched_setaffinity(0, allowed)


def _loss_of(outputs: Any, batches_per_step: int) -> Any:
    loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
    if isinstance(loss, Tensor) and loss.numel() == 1:
        return loss.detach() * batches_per_step if batches_per_step > 1 else loss.detach()
    return math.nan


class _LenientSchedulers(BaseCallback):
    """Makes learning rate schedulers skip an update if their monitored metric is missing."""

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        for scheduler in trainer.lr_scheduler_configs:
            scheduler.strict = False


def take_callbacks(arguments: dict[str, Any]) -> list[pl.Callback]:
    """Remove the callbacks from Trainer arguments, and return the ones for a short run.

    Checkpoint callbacks are removed if checkpoints are disabled. Early stopping is removed if there
    is no validation.
    """
    required = {Checkpoint: "enable_checkpointing", EarlyStopping: "limit_val_batches"}
    kept = [
        callback
        for callback in as_list(arguments.pop("callbacks", None))
        if all(arguments.get(name) for base, name in required.items() if isinstance(callback, base))
    ]
    return [*kept, _LenientSchedulers()]


def run(model: Factory, data: Factory, settings: Settings, gate: StepGate, seed: int) -> pl.Trainer:
    """Train until the gate, the data or the user's limits end the run.

    The seed is set before the model, the Trainer, the data and the training are created.

    Args:
        model: Makes the LightningModule.
        data: Makes the data.
        settings: Arguments of the Trainer.
        gate: The gate, added as the last callback.
        seed: The seed of Python, NumPy and torch.

    Raises:
        TypeError: If the model is not a LightningModule.
        ValueError: If the strategy spawns or forks processes, or the run has several nodes.
    """
    reseed = partial(seed_everything, seed, workers=True, verbose=False)
    reseed()
    module = make("model", model)
    if not isinstance(module, LightningModule):
        raise TypeError(f"model must make a LightningModule, got {type(module).__name__}.")
    package = package_of(module)
    reseed()
    given = {**RUN_DEFAULTS, **as_mapping(settings)}
    if given["logger"]:  # the user's logger is not created, because it may start a run of its own
        given["logger"] = package.loggers.logger.DummyLogger()
    arguments = instantiate(given, package)
    trainer: pl.Trainer = package.Trainer(callbacks=[*take_callbacks(arguments), gate], **arguments)
    if isinstance(trainer.strategy.launcher, MultiProcessingLauncher) or trainer.num_nodes > 1:
        raise ValueError(
            f"A run on {trainer.num_nodes} nodes under {type(trainer.strategy).__name__} cannot be "
            "measured step by step. Use num_nodes=1, and strategy='ddp' for several processes."
        )
    reseed()
    source = make("data", data)
    reseed()
    with contextlib.suppress(Stopped):
        trainer.fit(module, source)  # `source` may be a LightningDataModule
    return trainer
