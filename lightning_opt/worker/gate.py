"""A run that takes steps when it is told, and says how long each took."""

from __future__ import annotations

import contextlib
import math
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Checkpoint, EarlyStopping
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.strategies.launchers import _MultiProcessingLauncher
from torch import Tensor

from lightning_opt.core.measure.machine import allowed_cpus
from lightning_opt.core.measure.timing import wait_for
from lightning_opt.core.modules.batches import samples_in
from lightning_opt.worker.recipes import Factory, Settings, make, make_settings

QUIET: dict[str, Any] = {
    "logger": False, "enable_checkpointing": False, "enable_progress_bar": False,
    "enable_model_summary": False, "num_sanity_val_steps": 0, "limit_val_batches": 0,
    "max_epochs": -1, "max_steps": -1,
}  # fmt: skip
"""Settings of the Trainer where the user's say nothing: only the run itself, without end."""


LONGEST = timedelta(days=1)
"""For which ranks wait to be told how many steps to take."""

SPINNING = 0.01
"""Seconds for which threads of OpenMP may go on spinning when a block has ended. Whose turn it is
next would be slowed by them, by a tenth in its first steps."""


class Step(NamedTuple):
    """One batch of a run.

    Attributes:
        seconds: From the end of the batch before to its own, waiting for data included. On a GPU
            the mean over the steps asked for together: to time each one, each would have to be
            waited for.
        loss: What ``training_step`` returned, NaN where it returns none.
        samples: In the batch, on all ranks together.
    """

    seconds: float
    loss: float
    samples: int


class Stopped(Exception):  # noqa: N818 - it is how a run ends that is told to, no error
    """Ends the run from within, so that its callbacks and loaders tidy up."""


class StepGate(pl.Callback):
    """Holds the run before its first step and after each block of steps.

    The workers of its loaders are held too: batches that they made ready in the meantime would let
    the next block look faster than training is.

    Args:
        ready: Called once, with the Trainer, when the first step could begin.
        wait: Blocks, and returns how many steps to take now; 0 ends the run.
        deliver: Given the steps of a block when it has ended.
    """

    def __init__(
        self,
        ready: Callable[[pl.Trainer], None],
        wait: Callable[[], int],
        deliver: Callable[[list[Step]], None],
    ) -> None:
        self._ready, self._wait, self._deliver = ready, wait, deliver
        self._granted = 0
        self._ranks: Any = None
        self._ends: list[float] = []
        self._losses: list[Any] = []
        self._samples: list[int] = []

    def __deepcopy__(self, memo: dict[int, Any]) -> pl.Callback:
        return pl.Callback()  # in trials of batch sizes nobody tells it to go on

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Say that all is set up."""
        if trainer.world_size > 1:  # NCCL would have the GPU busy with waiting
            self._ranks = dist.new_group(backend="gloo", timeout=LONGEST)
        self._ready(trainer)
        self._open(trainer)

    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Read the clock; at the end of a block hand the steps over and wait."""
        self._losses.append(_loss_of(outputs, trainer.accumulate_grad_batches))
        self._samples.append(samples_in(batch) * trainer.world_size)
        if len(self._losses) == self._granted:
            wait_for(trainer.strategy.root_device)
        self._ends.append(time.perf_counter())
        if len(self._losses) == self._granted:
            self._open(trainer)
        to_the_same_cpu(trainer)

    def flush(self, trainer: pl.Trainer) -> None:
        """Hand over what there is of the block."""
        if not self._losses:
            return
        count = len(self._losses)
        seconds = [end - start for start, end in zip(self._ends, self._ends[1:], strict=False)]
        if trainer.strategy.root_device.type != "cpu":
            seconds = [math.fsum(seconds) / count] * count
        losses = [float(loss) for loss in self._losses]  # the device has been waited for
        steps = [Step(*step) for step in zip(seconds, losses, self._samples, strict=True)]
        self._losses, self._samples, self._ends = [], [], []
        if trainer.strategy.root_device.type == "cpu":
            time.sleep(SPINNING)
        self._deliver(steps)

    def _open(self, trainer: pl.Trainer) -> None:
        with _children_suspended():
            self.flush(trainer)
            granted = self._wait() if trainer.is_global_zero else 0
            if trainer.world_size > 1:  # the others wait here, not in the middle of a step
                granted = self._broadcast(granted)
        if granted < 1:
            raise Stopped
        self._granted = granted
        wait_for(trainer.strategy.root_device)
        self._ends = [time.perf_counter()]

    def _broadcast(self, granted: int) -> int:
        told = torch.tensor(granted)
        dist.broadcast(told, 0, self._ranks)
        return int(told)


@contextlib.contextmanager
def _children_suspended() -> Iterator[None]:
    """Stop the processes that multiprocessing has started from here, and let them go on."""
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


def to_the_same_cpu(trainer: pl.Trainer) -> None:
    """Move this thread to the CPU where other runs have theirs; it is free to leave again.

    CPUs of a shared machine differ in speed by a tenth for seconds, and a thread mostly stays where
    it is. It is not held there, since what training starts would be held too: threads and workers.
    """
    if trainer.strategy.root_device.type == "cpu" and hasattr(os, "sched_setaffinity"):
        allowed = allowed_cpus()
        os.sched_setaffinity(0, {allowed[trainer.local_rank % len(allowed)]})
        os.sched_setaffinity(0, allowed)


def _loss_of(outputs: Any, accumulated: int) -> Any:
    loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
    if isinstance(loss, Tensor) and loss.numel() == 1:
        return loss.detach() * accumulated if accumulated > 1 else loss.detach()
    return math.nan


class _Lenient(pl.Callback):
    """Has schedulers leave the rate alone where the metric that they look at is not there."""

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        for scheduler in trainer.lr_scheduler_configs:
            scheduler.strict = False


def short_run(arguments: dict[str, Any]) -> list[pl.Callback]:
    """Take the callbacks from a Trainer's arguments, and return those for a run of some steps.

    Without checkpoints Lightning refuses what saves them. What ends a run early, or lowers its
    learning rate, looks at a validation that there is none of.
    """
    given = arguments.pop("callbacks", None) or []
    needs = {Checkpoint: "enable_checkpointing", EarlyStopping: "limit_val_batches"}
    kept = [
        callback
        for callback in ([given] if isinstance(given, pl.Callback) else given)
        if all(arguments.get(name) for kind, name in needs.items() if isinstance(callback, kind))
    ]
    return [*kept, _Lenient()]


def run(
    model: Factory,
    data: Factory,
    settings: Settings,
    gate: StepGate,
    seed: int,
    on_device: Callable[[torch.device], None],
) -> pl.Trainer:
    """Train until the gate says stop, or until the data or the user's own limits end it.

    Trainer, model, data and training begin from the same seed each.

    Args:
        model: Makes the LightningModule.
        data: Makes what it is trained on.
        settings: Of the Trainer.
        gate: Joins the callbacks as the last of them.
        seed: Of the random numbers of Python, NumPy and torch.
        on_device: Called with the device of this process when only the Trainer is made.

    Raises:
        TypeError: If the model is no LightningModule.
        ValueError: If the strategy starts its processes in a way that cannot be told to step, or on
            several nodes.
    """
    begin_alike = partial(pl.seed_everything, seed, workers=True, verbose=False)
    begin_alike()
    arguments = {**QUIET, **make_settings(settings)}
    if arguments["logger"]:  # nobody would look for such a run there
        arguments["logger"] = DummyLogger()
    trainer = pl.Trainer(callbacks=[*short_run(arguments), gate], **arguments)
    if isinstance(trainer.strategy.launcher, _MultiProcessingLauncher):
        raise ValueError(
            f"The strategy {arguments.get('strategy')!r} spawns or forks its processes, which "
            "cannot be measured step by step. Take strategy='ddp'."
        )
    if trainer.num_nodes > 1:
        raise ValueError(
            f"num_nodes={trainer.num_nodes} cannot be measured step by step from one process: "
            "measure on one node, with num_nodes=1."
        )
    on_device(trainer.strategy.root_device)
    to_the_same_cpu(trainer)  # its memory will be near to it
    begin_alike()
    made = make("model", model)
    if not isinstance(made, pl.LightningModule):
        raise TypeError(
            f"model must make a LightningModule (of lightning.pytorch), got {type(made).__name__}."
        )
    begin_alike()
    loader = make("data", data)
    begin_alike()
    datamodule = loader if isinstance(loader, pl.LightningDataModule) else None
    with contextlib.suppress(Stopped):
        trainer.fit(made, None if datamodule else loader, datamodule=datamodule)
    return trainer
