"""How much of the run waits for data."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Any

from lightning_opt.core.arguments import at_least, fraction
from lightning_opt.core.measure.schedule import Schedule
from lightning_opt.core.modules.counting import samples_in
from lightning_opt.core.modules.patching import Patches, replaced
from lightning_opt.core.output.loggers import log_scalars
from lightning_opt.core.output.report import Report
from lightning_opt.core.output.verdicts import Verdict
from lightning_opt.trainer.run_callback import RunCallback

if TYPE_CHECKING:
    import lightning.pytorch as pl

log = logging.getLogger(__name__)

ADVICE = (
    "Add DataPipelineTuner(), which measures how many workers the loader should have. "
    "CachedDataset keeps what is expensive to make."
)


class DataMonitor(RunCallback):
    """Logs the share of time that training waits for data, and says what to do if it is large.

    It measures the host's time from asking the loader for a batch to having it, as a share of the
    time since the last report, without validation. Without workers, that is the time to make the
    batch. On an accelerator, whose host runs ahead, it is an upper bound of the device's wait: the
    device may be busy in the meantime.

    Logged every ``every_n_steps`` batches, for this process (rank 0 where there are several):

    ============================= ==================================================================
    ``data/wait_fraction``        share of the time spent waiting for batches
    ``data/samples_per_second``   samples trained on, of all ranks if they have as many each
    ============================= ==================================================================

    Args:
        every_n_steps: Batches from one report to the next, at least 1.
        threshold: Wait fraction from which the run counts as data-bound.
        patience: Reports in a row above the threshold until the warning, which comes once.

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
        self.threshold = fraction("threshold", threshold)
        self.patience = at_least("patience", patience, 1)
        self._patches = Patches()
        self._clear()

    def _clear(self) -> None:
        self._batches = self._samples = self._reports = self._high = 0
        self._warned = False
        self._total_wait = self._total_time = 0.0
        self._wait = self._apart = 0.0
        self._begin: float | None = None
        self._asked = self._validation = 0.0

    @property
    def wait_fraction(self) -> float | None:
        """Share of the time of the last run spent waiting, or None before the first report."""
        return self._total_wait / self._total_time if self._total_time else None

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Begin to look at the clock before and after each batch is fetched."""
        self.release(trainer)
        self._clear()
        loop = trainer.fit_loop.epoch_loop
        before, after = loop._on_before_fetch, loop._on_after_fetch

        # The loop calls these anyway, for its profiler.
        def on_before_fetch() -> None:
            before()
            self._asked = time.perf_counter()
            if self._begin is None:
                self._begin = self._asked

        def on_after_fetch() -> None:
            self._wait += time.perf_counter() - self._asked
            after()

        self._patches.enter_context(
            replaced(loop, _on_before_fetch=on_before_fetch, _on_after_fetch=on_after_fetch)
        )

    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Count, and report if it is time."""
        self._batches += 1
        self._samples += samples_in(batch)
        if self._schedule.is_due(self._batches):
            self._report(trainer)

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Stop the clock."""
        self._validation = time.perf_counter()

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Go on."""
        self._apart += time.perf_counter() - self._validation

    def _report(self, trainer: pl.Trainer) -> None:
        now = time.perf_counter()
        if self._begin is None:
            return
        passed = max(now - self._begin - self._apart, 1e-9)
        share = min(1.0, self._wait / passed)
        rate = self._samples * trainer.world_size / passed
        self._total_wait += self._wait
        self._total_time += passed
        self._begin, self._wait, self._apart, self._samples = now, 0.0, 0.0, 0
        self._reports += 1
        # The first report holds the start of workers and of much else.
        self._high = self._high + 1 if share > self.threshold and self._reports > 1 else 0
        log_scalars(trainer, {"data/wait_fraction": share, "data/samples_per_second": rate})
        if self._high >= self.patience and not self._warned:
            self._warned = True
            log.warning(
                "Training waits for data %.0f%% of the time (step %d). %s",
                100 * share, trainer.global_step, ADVICE,
            )  # fmt: skip

    def diagnose(self) -> list[Verdict]:
        """Return whether training has waited for data."""
        share = self.wait_fraction
        if share is None:
            finding = f"DataMonitor has seen {self._batches} batches, too few for a report."
            return [Verdict("data", "unknown", finding, "Train longer, or report more often.")]
        finding = f"It waits for data {share:.0%} of the time."
        if share <= self.threshold:
            return [Verdict("data", "ok", finding)]
        return [Verdict("data", "look", finding, ADVICE)]

    def report(self) -> Report:
        """Return the shares of the last run."""
        share = self.wait_fraction
        rows = [
            {"time": "waiting for data", "share": share},
            {"time": "everything else", "share": None if share is None else 1 - share},
        ]
        return Report(f"DataMonitor: {self._total_time:.1f} s of training", rows)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Look no more: what is fetched from here on is not for training."""
        self.release(trainer)

    def release(self, trainer: pl.Trainer) -> None:
        """Give the loop back what it called."""
        self._patches.close()
