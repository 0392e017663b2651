"""The callback that writes one page about a run."""

from __future__ import annotations

import logging
import re
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from textwrap import shorten
from time import perf_counter
from typing import TYPE_CHECKING, Any

from lightning_utilities.core.rank_zero import rank_zero_info

from lightning_opt.core.measure.exhaustion import is_out_of_memory
from lightning_opt.core.measure.memory import MB, peak_memory
from lightning_opt.core.modules.batches import samples_in
from lightning_opt.core.modules.sharding import data_ranks
from lightning_opt.core.output.loggers import (
    HISTORIES,
    History,
    LossHistory,
    folders_of,
    log_image,
    logged_step,
)
from lightning_opt.core.output.report import Verdict
from lightning_opt.profiling.run_report.page import Page, build_page
from lightning_opt.trainer.run_callback import RunCallback

if TYPE_CHECKING:
    import lightning.pytorch as pl

log = logging.getLogger(__name__)

WRITE_SECONDS, MAX_SHARE = 180.0, 0.005
"""Minimum seconds between two pages during a fit, and maximum share of its time for pages."""

OUT_OF_MEMORY = "MicroBatching('auto') splits a batch that does not fit into memory."


class RunReport(RunCallback):
    """Writes ``report.html``, one page about the run.

    The page starts with one sentence about the run and the three most useful findings of
    :func:`doctor`. Pictures, the reports of all callbacks, and the setup follow. The page is one
    file that needs neither JavaScript nor a network. Rank 0 writes it into the loggers' folders, or
    into ``default_root_dir`` without them. It does so at the end, at an exception or Ctrl-C, and
    about every three minutes.

    The page shows the measurements of other callbacks and of ``Trainer(profiler=StepProfiler())``,
    and lists missing measurements. The callback itself records the loss and the number of samples
    of each batch, and peak memory. TensorBoard, W&B and MLflow get the pictures at the end.

    Raises:
        ValueError: In ``setup`` for a second instance.

    Example:
        >>> import lightning as L
        >>> import lightning_opt as lo
        >>> trainer = L.Trainer(callbacks=[lo.RunReport()], logger=False)
    """

    only_one = True
    runs_in_trials = False

    def __init__(self) -> None:
        self._history = History()
        self._is_fitting = self._has_failed = False
        self._reset_run(0)

    def _reset_run(self, first_step: int) -> None:
        self.sentence = ""
        self.events: list[dict[str, Any]] = []
        self._failures: list[Verdict] = []
        self._losses = LossHistory(self._history, delay=16)
        self._started = perf_counter()
        self._next_page = self._started + WRITE_SECONDS
        self._samples, self._first_step = 0, first_step

    def reset_for_model(self, pl_module: pl.LightningModule) -> None:
        """Reset the history."""
        self._history = History()

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Reset the per-run state."""
        super().setup(trainer, pl_module, stage)
        if stage == "fit":
            self._is_fitting, self._has_failed = True, False
            HISTORIES[trainer] = self._history
            self._reset_run(0)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Start the clock."""
        self._reset_run(logged_step(trainer))

    def on_train_batch_start(self, trainer: pl.Trainer, *args: Any, **kwargs: Any) -> None:
        """Write the page if it is due."""
        if perf_counter() > self._next_page:
            self._write(trainer, "Running")

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Record the loss and the number of samples."""
        self._samples += samples_in(batch, default=1)
        self._losses.add(outputs, logged_step(trainer), trainer.accumulate_grad_batches)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Record the validation losses."""
        if not self._is_fitting or trainer.sanity_checking:
            return
        step, metrics = logged_step(trainer), trainer.callback_metrics
        for name in metrics:
            if "val" in name and "loss" in name:
                self._history.add(f"validation/{name}", step, float(metrics[name]))

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Write the final page, after ``on_train_end`` of all callbacks."""
        state = "Finished"
        if trainer.should_stop:
            names = {type(callback).__name__ for callback in _callbacks_of(trainer)}
            known = " or ".join(sorted(names & {"EarlyStopping", "Timer"}))
            state = f"Stopped by {known}" if known else "Stopped early"
        self._write(trainer, state, final=True)

    def on_exception(self, trainer: pl.Trainer, pl_module: Any, exception: BaseException) -> None:
        """Write the final page after the other callbacks have ended their measurements."""
        callbacks = _callbacks_of(trainer)
        if callbacks[-1] is not self:
            callbacks.append(self)  # Lightning iterates over this list and calls this again
            return
        if callbacks.count(self) > 1:
            callbacks.pop()
        message = shorten(f"{type(exception).__name__}: {exception}".rstrip(": "), 120)
        if is_out_of_memory(exception):
            step = logged_step(trainer)
            self.events.append({"step": step, "kind": "out of memory"})
            asked = re.search(r"[Tt](ried to allocate [\d.]+ \w+)", str(exception))
            finding = f"Memory ran out at step {step:,}: {f't{asked[1]}' if asked else message}."
            self._failures = [Verdict("memory", "look", finding, OUT_OF_MEMORY, gain=1.0)]
            message = "a lack of memory"
        self._write(trainer, f"Stopped by {message}", final=True)
        self.release(trainer)

    def _write(self, trainer: pl.Trainer, state: str, final: bool = False) -> None:
        if not trainer.is_global_zero or not self._is_fitting:
            return
        began = perf_counter()
        try:
            self._losses.flush()
            self.sentence = self._describe(trainer, state, began - self._started)
            with TemporaryDirectory() as drawn:
                page = build_page(trainer, self.sentence, Path(drawn), images=final)
                for folder in folders_of(trainer):
                    folder.mkdir(parents=True, exist_ok=True)
                    new = folder / "report.html.new"
                    new.write_text(page, encoding="utf-8")
                    new.replace(folder / "report.html")
                    if final:
                        rank_zero_info(f"RunReport: {folder / 'report.html'}")
                for file in sorted(Path(drawn).glob("*.png")):
                    log_image(trainer, f"report/{file.stem}", file)
        except Exception as error:  # a failing page must not end the run
            log.debug("RunReport failed", exc_info=True)
            if not self._has_failed:
                log.warning("RunReport could not write its page: %r. Training continues.", error)
            self._has_failed = True
        now = perf_counter()
        self._next_page = now + max(WRITE_SECONDS, (now - began) / MAX_SHARE)

    def _describe(self, trainer: pl.Trainer, state: str, seconds: float) -> str:
        since = f" (resumed at {self._first_step:,})" if self._first_step else ""
        rate = self._samples * data_ranks(trainer) / seconds
        peak = peak_memory(trainer.strategy.root_device) / MB
        duration = timedelta(seconds=round(seconds))
        return (
            f"{state} after {logged_step(trainer):,} steps{since} in {duration}: "
            f"{rate:,.{int(rate < 20)}f} samples per second, peak memory {peak:,.0f} MB."
        )

    def diagnose(self) -> list[Verdict]:
        """Return a verdict if memory ran out."""
        return self._failures

    def release(self, trainer: pl.Trainer) -> None:
        """Write no more pages."""
        self._is_fitting = False

    def state_dict(self) -> dict[str, Any]:
        """Return all series, as plain types. Waits for the device."""
        self._losses.flush()
        return self._history.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the result of :meth:`state_dict`."""
        self._history.load_state_dict(state_dict)


def _callbacks_of(trainer: pl.Trainer) -> list[Any]:
    return trainer.callbacks  # type: ignore[attr-defined, no-any-return]


def report(trainer: pl.Trainer) -> Page:
    """Return the page about a Trainer's last fit as HTML, which notebooks display.

    It changes nothing. Without :class:`RunReport` in the Trainer, the page lacks the loss, the
    duration and the peak memory. With several processes, call it on rank 0.

    Args:
        trainer: The Trainer after its run.

    Example:
        >>> import lightning as L
        >>> import lightning_opt as lo
        >>> page = lo.report(L.Trainer(logger=False, enable_checkpointing=False))
        >>> page.startswith("<!doctype html>")
        True
    """
    callbacks = _callbacks_of(trainer)
    sentence = next((c.sentence for c in callbacks if isinstance(c, RunReport)), "")
    with TemporaryDirectory() as folder:
        return Page(build_page(trainer, sentence or f"{trainer.global_step:,} steps", Path(folder)))
