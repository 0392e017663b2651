"""Logs how fast a run is and what it uses of the machine, and warns when it slows down."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lightning_opt.core.arguments import between
from lightning_opt.core.measure.reading import DelayedReads, Schedule
from lightning_opt.core.modules.batches import check_tokens, samples_in, tokens_in
from lightning_opt.core.modules.sharding import is_dtensor
from lightning_opt.core.output.loggers import log_scalars
from lightning_opt.core.output.report import Report
from lightning_opt.core.output.verdicts import Verdict
from lightning_opt.profiling.durations import Work
from lightning_opt.profiling.monitor.gpu import find_gpu
from lightning_opt.profiling.monitor.record import Record, means
from lightning_opt.profiling.monitor.report import build_report, describe, judge
from lightning_opt.profiling.monitor.sampling import Sampler
from lightning_opt.profiling.monitor.slowdown import Fall, Throughput
from lightning_opt.profiling.monitor.step_times import StepTime, StepTimer
from lightning_opt.trainer.run_callback import RunCallback

if TYPE_CHECKING:
    import lightning.pytorch as pl

log = logging.getLogger(__name__)

WARMUP = 2
"""Steps at the start that are not timed: all is new, and some compile in the second one."""


class PerformanceMonitor(RunCallback):
    """Logs speed and use of the machine, and warns when the run slows down.

    A step lasts from the end of one batch to the end of the next, so waiting for data counts.
    Validation, the wait for an epoch's first batch and the first two steps do not count. On CUDA
    the device's own clock is read, without ever waiting for it. A thread samples CPU, memory and
    GPU while training runs; the GPU through NVML, by its UUID, so that ``CUDA_VISIBLE_DEVICES`` and
    MIG are respected.

    If throughput falls by ``slowdown`` and stays there, it warns once, with the step at which the
    slowdown began.

    Logged every ``every_n_steps`` batches, by rank 0 and for its own process and device; what is
    not known is left out:

    ============================== ================================================================
    ``perf/step_seconds``          median of the steps since the last report, and
    ``perf/step_p95_seconds``      what 95% of them stayed below
    ``perf/samples_per_second``    of all ranks, if they have as many each
    ``perf/tokens_per_second``     the same, with ``tokens``
    ``perf/gpu_percent``           share of the time in which the GPU ran anything
    ``perf/gpu_memory_mb``         taken on the GPU, by all processes
    ``perf/gpu_watts``             power
    ``perf/gpu_celsius``           temperature
    ``perf/cpu_percent``           of this process and its children; 100 is one core
    ``perf/rss_mb``                their resident memory; what they share counts in each
    ``perf/child_processes``       how many they are: workers of the loader, most often
    ============================== ================================================================

    Args:
        every_n_steps: Batches from one report to the next, at least 1.
        sample_seconds: From one sample of the machine to the next, at least 0.01.
        tokens: Counts tokens: a number is that of each sample; a name is a key of the batch, the
            elements of whose tensor are counted, padding included.
        slowdown: Loss of throughput that triggers a warning, from 0.01 to 0.99; None for never.

    Attributes:
        record: What was measured of the last run.

    Raises:
        ValueError: For arguments out of range; at the first batch if it has no ``tokens``.

    Example:
        >>> import lightning as L
        >>> import lightning_opt as lo
        >>> monitor = lo.PerformanceMonitor(every_n_steps=100)
        >>> trainer = L.Trainer(callbacks=[monitor], logger=False)

    """

    process_only = ("_sampler", "_timer")

    def __init__(
        self,
        every_n_steps: int = 50,
        sample_seconds: float = 1.0,
        tokens: int | str | None = None,
        slowdown: float | None = 0.1,
    ) -> None:
        self._schedule = Schedule(every_n_steps)
        self.sample_seconds = between("sample_seconds", sample_seconds, 0.01, 3600)
        self.tokens = check_tokens(tokens)
        self.slowdown = None if slowdown is None else between("slowdown", slowdown, 0.01, 0.99)
        self._timer: StepTimer | None = None
        self._sampler: Sampler | None = None
        self._forget()
        self._begin_run()

    def _forget(self) -> None:
        """Forget what a checkpoint holds."""
        self._steps = 0
        self._throughput = Throughput()
        self._warned = False

    def _begin_run(self) -> None:
        """Forget what was measured."""
        self.record = Record()
        self._seen = 0
        self._window_step = 0
        self._latest: dict[str, float] = {}
        self._losses: DelayedReads[None] = DelayedReads(delay=1)

    @property
    def fall(self) -> Fall | None:
        """The throughput before and after it fell, and the step at which that began; or None."""
        return None if self.slowdown is None else self._throughput.find_fall(self.slowdown)

    def reset_for_model(self, pl_module: pl.LightningModule) -> None:
        """Forget the throughput of another model."""
        if self._seen:
            self._forget()

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Find the device and what it can do."""
        self.release(trainer)
        self._begin_run()
        device = trainer.strategy.root_device
        cuda = device.type == "cuda"
        self.record.device = torch.cuda.get_device_name(device) if cuda else str(device)
        self.record.ranks = trainer.world_size
        self._timer = StepTimer(device)
        self._window_step = trainer.global_step
        whole = self._throughput.whole
        if whole and whole[-1][0] > trainer.global_step:
            self._throughput = Throughput()  # the same model from its first step again

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Leave the start of the workers out, and validation."""
        if self._timer is not None:
            self._timer.interrupt()

    on_validation_start = on_train_epoch_start

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Go on with the clock."""
        if self._timer is None:
            return
        if self._sampler is None:
            self._start_sampling(trainer, batch)
        self._timer.begin()

    def _start_sampling(self, trainer: pl.Trainer, batch: Any) -> None:
        # Not before the first batch, so that its workers are forked from a process without it.
        self._tokens_of(batch)
        device = trainer.strategy.root_device
        gpu = find_gpu(device)
        if gpu is not None:
            self.record.notes.append(f"NVML was asked for {gpu.name}.")
        elif device.type == "cuda":
            note = (
                "NVML is not available or does not know this GPU, so its use, power and "
                "temperature are not known."
            )
            self.record.notes.append(note)
            log.warning("PerformanceMonitor: %s Training continues.", note)
        self._sampler = Sampler(self.sample_seconds, gpu)

    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Note the end of the step, and report if it is time."""
        if self._timer is None:
            return
        tokens = self._tokens_of(batch)
        self._timer.end(samples_in(batch), tokens, keep=self._seen >= WARMUP)
        self._seen += 1
        self._steps += 1
        if self._schedule.is_due(self._steps):
            self._note_loss(outputs)
            scalars = self._close_window(trainer, self._timer.take())
            if scalars:
                log_scalars(trainer, {f"perf/{key}": value for key, value in scalars.items()})

    def _close_window(self, trainer: pl.Trainer, times: Sequence[StepTime]) -> dict[str, float]:
        """Take in the window, and return what is to be logged of it."""
        looks = self._sampler.take() if self._sampler is not None else []
        self.record.add(times, looks)
        began, self._window_step = self._window_step, trainer.global_step
        self._latest |= means(looks)
        scalars = dict(self._latest)
        if times:
            scalars |= self._speed(times, trainer.world_size)
            self._watch(trainer, began, times)
        return scalars

    def _note_loss(self, outputs: Any) -> None:
        """Have the loss read at the next report: by then it is there without waiting."""
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        if isinstance(loss, Tensor) and loss.numel() == 1 and not is_dtensor(loss):
            self._losses.push(loss.detach().reshape(1).clone(), None)
        self._take_losses(self._losses.due())

    def _take_losses(self, reads: Iterator[tuple[list[float], None]]) -> None:
        for (loss,), _ in reads:
            self.record.losses.add(loss)

    def _speed(self, times: Sequence[StepTime], ranks: int) -> dict[str, float]:
        work = Work()
        for time in times:
            work.add(*time)
        found = {
            "step_seconds": work.steps.quantile(0.5),
            "step_p95_seconds": work.steps.quantile(0.95),
        }
        return found | {key: value * ranks for key, value in work.rates().items()}

    def _watch(self, trainer: pl.Trainer, began: int, times: Sequence[StepTime]) -> None:
        """Add to the history of the throughput, and warn if it has fallen."""
        if self.slowdown is None:
            return
        amount = sum(time.tokens if self.tokens is not None else time.samples for time in times)
        self._throughput.add(began, amount, max(sum(time.seconds for time in times), 1e-9))
        if self._warned:
            return
        fall = self.fall
        if fall is not None:
            self._warned = True
            if trainer.is_global_zero:
                said = f"{describe(fall)} {WHY}"
                log.warning("PerformanceMonitor, step %d: %s", trainer.global_step, said)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Read the last steps."""
        if self._timer is not None:
            # A part of a window: too short for the history of the throughput.
            self.record.add(self._timer.take(wait=True), [])
            self._take_losses(self._losses.flush())
        self.release(trainer)

    def report(self) -> Report:
        """Return what was measured of the last run, for this process."""
        return build_report(self.record, self.fall)

    def diagnose(self) -> list[Verdict]:
        """Return verdicts on monitoring, throughput and the use of the device."""
        return judge(self.record, self.fall, watched=self.slowdown is not None)

    def _tokens_of(self, batch: Any) -> int:
        return 0 if self.tokens is None else tokens_in(batch, self.tokens, "PerformanceMonitor")

    def release(self, trainer: pl.Trainer) -> None:
        """End the thread."""
        if self._sampler is not None:
            self._sampler.stop()
            self.record.add([], self._sampler.take())
            if self._sampler.failure:
                self.record.notes.append(f"Sampling stopped: {self._sampler.failure}.")
            self._sampler = None
        self._timer = None
        self._losses.clear()

    def state_dict(self) -> dict[str, Any]:
        """Return the steps and the history of the throughput, as plain types."""
        return {
            "steps": self._steps,
            "throughput": self._throughput.state_dict(),
            "warned": self._warned,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned."""
        self._steps, self._warned = state_dict["steps"], state_dict["warned"]
        self._throughput.load_state_dict(state_dict["throughput"])


WHY = (
    "DataMonitor tells whether it waits for data, LeakDetector whether memory grows; a GPU that is "
    "too hot shows in perf/gpu_celsius."
)
