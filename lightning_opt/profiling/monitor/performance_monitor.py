"""Logs the speed of a run and its use of the machine, and warns when it slows down."""

from __future__ import annotations

import logging
from collections import deque
from typing import TYPE_CHECKING, Any

from lightning_opt.core.arguments import check_between
from lightning_opt.core.measure.reading import Schedule
from lightning_opt.core.measure.timing import StepClock
from lightning_opt.core.modules.batches import check_tokens, samples_in, tokens_in
from lightning_opt.core.modules.sharding import data_ranks
from lightning_opt.core.output.loggers import LossHistory, log_scalars
from lightning_opt.core.output.report import Report, Verdict
from lightning_opt.profiling.durations import Work
from lightning_opt.profiling.monitor.sampling import Sampler, find_gpu
from lightning_opt.profiling.monitor.slowdown import (
    Record,
    Slowdown,
    Throughput,
    build_report,
    describe,
    judge,
)
from lightning_opt.trainer.run_callback import RunCallback

if TYPE_CHECKING:
    import lightning.pytorch as pl

log = logging.getLogger(__name__)

WARMUP = 2
"""Number of first steps that are not timed: caches are cold, and some models compile in step 2."""


class PerformanceMonitor(RunCallback):
    """Logs the speed of a run and its use of the machine, and warns when it slows down.

    A step lasts from the end of one batch to the end of the next, so waiting for data counts.
    Validation, the wait for an epoch's first batch and the first two steps do not count. On CUDA,
    steps are timed by events, without waiting for the device. A thread samples CPU, memory and GPU
    during training. The GPU is identified by its UUID, so ``CUDA_VISIBLE_DEVICES`` and MIG are
    respected.

    If throughput falls by ``slowdown`` and stays low, one warning states the step at which the
    slowdown began.

    Rank 0 logs these values of its own process and device every ``every_n_steps`` batches. Unknown
    values are omitted:

    ============================== ================================================================
    ``perf/step_seconds``          median of the steps since the last report
    ``perf/step_p95_seconds``      95th percentile of the same steps
    ``perf/samples_per_second``    throughput of all ranks, if their batches have the same size
    ``perf/tokens_per_second``     the same for tokens, with ``tokens``
    ``perf/gpu_percent``           share of the time in which the GPU ran anything
    ``perf/gpu_memory_mb``         GPU memory used by all processes
    ``perf/gpu_watts``             power
    ``perf/gpu_celsius``           temperature
    ``perf/cpu_percent``           of this process and its children; 100 is one core
    ``perf/rss_mb``                their resident memory; shared pages count in each
    ``perf/child_processes``       number of children, usually workers of the loader
    ============================== ================================================================

    Args:
        every_n_steps: Batches between two reports, at least 1.
        sample_seconds: Seconds between two samples of the machine, at least 0.01.
        tokens: Number of tokens per sample, or a key of the batch. With a key, the elements of that
            tensor are counted, including padding.
        slowdown: Relative drop of throughput that triggers a warning, from 0.01 to 0.99.

    Attributes:
        record: The measurements of the last run.

    Raises:
        ValueError: If an argument is out of range, or the first batch has no key ``tokens``.

    Example:
        >>> import lightning as L
        >>> import lightning_opt as lo
        >>> monitor = lo.PerformanceMonitor(every_n_steps=100)
        >>> trainer = L.Trainer(callbacks=[monitor], logger=False)

    """

    not_pickled = ("_sampler", "_clock")

    def __init__(
        self,
        every_n_steps: int = 50,
        sample_seconds: float = 1.0,
        tokens: int | str | None = None,
        slowdown: float = 0.1,
    ) -> None:
        self._schedule = Schedule(every_n_steps)
        self.sample_seconds = check_between("sample_seconds", sample_seconds, 0.01, 3600)
        self.tokens = check_tokens(tokens)
        self.slowdown = check_between("slowdown", slowdown, 0.01, 0.99)
        self._clock: StepClock | None = None
        self._sampler: Sampler | None = None
        self._reset_history()
        self._reset_run()

    def _reset_history(self) -> None:
        """Reset the state that checkpoints contain."""
        self._steps = 0
        self._throughput = Throughput()
        self._warned = False

    def _reset_run(self) -> None:
        """Reset the per-run state."""
        self.record = Record()
        self._steps_of_run = self._window_start = 0
        self._amounts: deque[tuple[int, int]] = deque()
        self._losses = LossHistory(self.record.losses, delay=1)

    @property
    def fall(self) -> Slowdown | None:
        """The slowdown of the run (step, throughput before and after), or None."""
        return self._throughput.find_slowdown(self.slowdown)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Start the clock. The history continues if the run is resumed."""
        self.release(trainer)
        self._reset_run()
        if trainer.global_step == 0:
            self._reset_history()
        self.record.ranks = data_ranks(trainer)
        self._clock = StepClock(trainer.strategy.root_device)
        self._window_start = trainer.global_step

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Discard the current step. It would include validation or the start of workers."""
        if self._clock is not None:
            self._clock.pause()

    on_validation_start = on_train_epoch_start

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Start the step, unless the end of the previous step has started it."""
        if self._clock is None:
            return
        if self._sampler is None:
            self._start_sampling(trainer, batch)
        self._clock.start()

    def _start_sampling(self, trainer: pl.Trainer, batch: Any) -> None:
        # Start the thread only now: loader workers must be forked from a process without it.
        self._tokens_of(batch)  # raises if the batch has no such key
        device = trainer.strategy.root_device
        gpu = find_gpu(device)
        if gpu is None and device.type == "cuda":
            log.warning(
                "PerformanceMonitor: NVML is not available or does not list this GPU, so its use, "
                "power and temperature are missing. Training continues."
            )
        self._sampler = Sampler(self.sample_seconds, gpu)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """End the step, and log if a report is due."""
        if self._clock is None:
            return
        keep = self._steps_of_run >= WARMUP
        if self._clock.stop(keep=keep):
            self._amounts.append((samples_in(batch, default=1), self._tokens_of(batch)))
        self._steps_of_run += 1
        self._steps += 1
        if self._schedule.is_due(self._steps):
            self._losses.add(outputs, self._steps, trainer.accumulate_grad_batches)
            scalars = self._close_window(trainer)
            if scalars:
                log_scalars(trainer, {f"perf/{key}": value for key, value in scalars.items()})

    def _take_steps(self, *, wait: bool = False) -> Work:
        """Return the steps timed since the last call, and add them to the record."""
        window = Work()
        for seconds in self._clock.read(wait=wait) if self._clock is not None else ():
            amount = self._amounts.popleft()
            window.add(seconds, *amount)
            self.record.work.add(seconds, *amount)
        return window

    def _close_window(self, trainer: pl.Trainer) -> dict[str, float]:
        """Return the values to log for the steps and machine samples since the last report."""
        window = self._take_steps()
        start, self._window_start = self._window_start, trainer.global_step
        scalars = Record(self._take_samples()).means()
        if window.steps.count:
            scalars["step_seconds"] = window.steps.quantile(0.5)
            scalars["step_p95_seconds"] = window.steps.quantile(0.95)
            for key, rate in window.rates().items():
                scalars[key] = rate * self.record.ranks
            self._check_throughput(trainer, start, window)
        return scalars

    def _take_samples(self) -> list[dict[str, float]]:
        """Return the machine's new samples, and add them to the record."""
        samples = self._sampler.take() if self._sampler is not None else []
        self.record.add(samples)
        return samples

    def _check_throughput(self, trainer: pl.Trainer, start: int, window: Work) -> None:
        """Add a window to the throughput history. Warn once if throughput has fallen."""
        amount = window.samples if self.tokens is None else window.tokens
        self._throughput.add(start, amount, max(window.steps.total, 1e-9))
        fall = None if self._warned else self.fall
        if fall is not None:
            self._warned = True
            if trainer.is_global_zero:
                log.warning(
                    "PerformanceMonitor, step %d: %s DataMonitor measures waiting for data, "
                    "LeakDetector memory growth, and perf/gpu_celsius overheating.",
                    trainer.global_step,
                    describe(fall),
                )

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Read the last steps."""
        if self._clock is not None:
            self._take_steps(wait=True)  # not in the throughput history: the window is incomplete
            self._losses.flush()
        self.release(trainer)

    def report(self) -> Report:
        """Return the measurements of this process in the last run."""
        return build_report(self.record, self.fall)

    def diagnose(self) -> list[Verdict]:
        """Return the verdicts on throughput and convergence."""
        return judge(self.record, self.fall)

    def _tokens_of(self, batch: Any) -> int:
        return 0 if self.tokens is None else tokens_in(batch, self.tokens, "PerformanceMonitor")

    def release(self, trainer: pl.Trainer) -> None:
        """End the sampling thread."""
        if self._sampler is not None:
            self._sampler.stop()
            self._take_samples()
            self._sampler = None
        self._clock = None
        self._losses.clear()

    def state_dict(self) -> dict[str, Any]:
        """Return the number of steps and the throughput history, as plain types."""
        throughput = self._throughput.state_dict()
        return {"steps": self._steps, "throughput": throughput, "warned": self._warned}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the result of :meth:`state_dict`."""
        self._steps, self._warned = state_dict["steps"], state_dict["warned"]
        self._throughput.load_state_dict(state_dict["throughput"])
