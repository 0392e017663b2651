"""Measures the share of time that training waits for data."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Any

from lightning_opt.core.arguments import check_at_least, check_fraction
from lightning_opt.core.measure.reading import Schedule
from lightning_opt.core.modules.batches import samples_in
from lightning_opt.core.modules.sharding import data_ranks
from lightning_opt.core.output.loggers import log_scalars
from lightning_opt.core.output.report import Report, Verdict
from lightning_opt.trainer.run_callback import RunCallback

if TYPE_CHECKING:
    import lightning.pytorch as pl

log = logging.getLogger(__name__)

ADVICE = (
    "Add DataPipelineTuner(), which measures how many workers the loader should have. "
    "CachedDataset caches expensive items."
)


class DataMonitor(RunCallback):
    """Logs the share of time that training waits for data, and warns if it is large.

    It measures how long the host waits for each batch, as a share of the time since the last
    report. Validation is excluded. Without workers, the wait is the time to create the batch. On an
    accelerator, where the host runs ahead, the share is an upper bound of the device's wait.

    Logged every ``every_n_steps`` batches, for this process (rank 0 of several):

    ============================= ==================================================================
    ``data/wait_fraction``        share of the time spent waiting for batches
    ``data/samples_per_second``   samples per second, times the number of ranks
    ============================= ==================================================================

    Args:
        every_n_steps: Batches between reports, at least 1.
        threshold: Wait fraction above which the run counts as data-bound.
        patience: Consecutive reports above the threshold before the warning, given once.

    Raises:
        ValueError: For arguments out of range.

    Example:
        >>> import lightning as L
        >>> import lightning_opt as lo
        >>> monitor = lo.DataMonitor(every_n_steps=100)
        >>> trainer = L.Trainer(callbacks=[monitor], logger=False)
    """

    def __init__(self, every_n_steps: int = 50, threshold: float = 0.2, patience: int = 3) -> None:
        self._schedule = Schedule(every_n_steps)
        self.threshold = check_fraction("threshold", threshold)
        self.patience = check_at_least("patience", patience, 1)
        self._reset()

    def _reset(self) -> None:
        self._batches = self._samples = self._high_reports = 0
        self._warned = False
        self._total_wait = self._total_time = 0.0
        # Since the last report: seconds of waiting and of validation.
        self._wait = self._validation = 0.0
        self._interval_start: float | None = None
        self._fetch_start = self._validation_start = 0.0

    @property
    def wait_fraction(self) -> float | None:
        """Share of the time of the last run spent waiting, or None before the first report."""
        return self._total_wait / self._total_time if self._total_time else None

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Start to measure the time of each fetch."""
        self.release(trainer)
        self._reset()
        loop = trainer.fit_loop.epoch_loop
        before, after = loop._on_before_fetch, loop._on_after_fetch

        # The loop calls these methods around each fetch, for its profiler.
        def on_before_fetch() -> None:
            before()
            self._fetch_start = time.perf_counter()
            if self._interval_start is None:
                self._interval_start = self._fetch_start

        def on_after_fetch() -> None:
            self._wait += time.perf_counter() - self._fetch_start
            after()

        self._replace(loop, _on_before_fetch=on_before_fetch, _on_after_fetch=on_after_fetch)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Count the batch, and report if a report is due."""
        self._batches += 1
        self._samples += samples_in(batch, default=1)
        if self._schedule.is_due(self._batches):
            self._report(trainer)

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Exclude validation from the measured time."""
        self._validation_start = time.perf_counter()

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Add the duration of validation."""
        self._validation += time.perf_counter() - self._validation_start

    def _report(self, trainer: pl.Trainer) -> None:
        now = time.perf_counter()
        if self._interval_start is None:
            return
        elapsed = max(now - self._interval_start - self._validation, 1e-9)
        share = min(1.0, self._wait / elapsed)
        rate = self._samples * data_ranks(trainer) / elapsed
        self._total_wait += self._wait
        self._total_time += elapsed
        self._interval_start, self._samples = now, 0
        self._wait = self._validation = 0.0
        # The first report includes the start of workers.
        is_high = share > self.threshold and self._batches > self._schedule.every_n_steps
        self._high_reports = self._high_reports + 1 if is_high else 0
        log_scalars(trainer, {"data/wait_fraction": share, "data/samples_per_second": rate})
        if self._high_reports >= self.patience and not self._warned:
            self._warned = True
            log.warning(
                "Training waits for data %.0f%% of the time (step %d). %s",
                100 * share, trainer.global_step, ADVICE,
            )  # fmt: skip

    def diagnose(self) -> list[Verdict]:
        """Return whether training waits for data."""
        share = self.wait_fraction
        if share is None:
            finding = f"There were {self._batches} batches, too few for a report."
            return [Verdict("data", "unknown", finding, "Train longer, or report more often.")]
        finding = f"Training waits for data {share:.0%} of the time."
        if share <= self.threshold:
            return [Verdict("data", "ok", finding)]
        return [Verdict("data", "look", finding, ADVICE, gain=share)]

    def report(self) -> Report:
        """Return the shares of the last run as a table."""
        share = self.wait_fraction
        rows = [
            {"time": "waiting for data", "share": share},
            {"time": "everything else", "share": None if share is None else 1 - share},
        ]
        return Report(f"DataMonitor: {self._total_time:.1f} s of training", rows)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Stop measuring: later fetches are not for training."""
        self.release(trainer)
