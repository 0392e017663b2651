"""The callback that detects steady memory growth and names the object that grows."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, Literal, get_args

from lightning_opt.core.arguments import check_at_least, check_positive
from lightning_opt.core.measure.memory import MemoryLimits
from lightning_opt.core.measure.reading import Schedule
from lightning_opt.core.output.loggers import log_scalars
from lightning_opt.core.output.report import Report, Verdict
from lightning_opt.memory.leaks.suspects import (
    MIN_SAMPLES,
    Census,
    MemoryTrend,
    Suspect,
    Walk,
    find_suspects,
    read_counters,
    take_census,
    user_modules,
)
from lightning_opt.trainer.run_callback import RunCallback

if TYPE_CHECKING:
    import lightning.pytorch as pl

log = logging.getLogger(__name__)

COUNT_INTERVALS = (3, 3, 2)
"""Samples between counts. They differ, so that a periodic change does not look like growth."""

FIRST_PAUSE = 100
"""Steps to pause after the first search that found nothing. Each further one doubles it."""

Phase = Literal["train", "validation"]


class LeakDetector(RunCallback):
    """Notices steady memory growth, and names the object that grows and what holds it.

    On a schedule it reads cheap counters: heap, Python allocator, resident memory, device memory.
    If one of them has a significant trend (Mann-Kendall, slope by Theil-Sen) that does not flatten,
    it counts, four times over the next steps, the containers and autograd graphs that your module,
    callbacks, loggers, data and Python modules reference. It reports the ones that grew every time,
    with the path that leads to them. Some containers are cleared at the end of an epoch. So a
    container is reported only if it still grows in the next epoch, or if memory would run out
    first. Without a trend, nothing is counted.

    ============= ===============================================================================
    kind          meaning
    ============= ===============================================================================
    ``graph``     losses kept with their graphs, or one tensor whose graph gets longer
    ``container`` any other container: a cache, a queue, hooks, a metric that is never reset
    ============= ===============================================================================

    Logged whenever there are enough new samples for a test:

    ======================== ====================================================================
    ``leaks/kb_per_step``    slope of the fastest significant trend of training, in KB; else 0
    ``leaks/suspects``       suspects reported so far
    ======================== ====================================================================

    Args:
        every_n_steps: Batches from one sample to the next, at least 1. A trend needs eight samples.
        warmup_steps: Batches at the start that are ignored, at least 0.
        min_kb_per_step: Growth per step, in KB, below which nothing is reported.

    Raises:
        ValueError: In ``__init__`` for arguments out of range.

    Example:
        >>> import lightning as L
        >>> import lightning_opt as lo
        >>> leaks = lo.LeakDetector()
        >>> trainer = L.Trainer(callbacks=[leaks], logger=False)
        >>> leaks.suspects
        []

    References:
        Sen (1968), *Estimates of the Regression Coefficient Based on Kendall's Tau*. Mann (1945),
        *Nonparametric Tests Against Trend*.
    """

    def __init__(
        self, every_n_steps: int = 10, warmup_steps: int = 50, min_kb_per_step: float = 0.5
    ) -> None:
        self._schedule = Schedule(every_n_steps)
        self.warmup_steps = check_at_least("warmup_steps", warmup_steps, 0)
        self.min_bytes_per_step = 1024 * check_positive("min_kb_per_step", min_kb_per_step)
        self._reset()

    def _reset(self) -> None:
        self._steps = self._searches = 0
        self.suspects: list[Suspect] = []  # oldest first
        self._pause = FIRST_PAUSE
        self._paused_until = 0
        self._end_search()
        self._trends: dict[Phase, MemoryTrend] = {
            phase: MemoryTrend(self.min_bytes_per_step) for phase in get_args(Phase)
        }

    def _end_search(self) -> None:
        self._counts: list[Census] = []
        self._phase: Phase = "train"
        self._next_step = self._next_epoch = 0

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Reset all state: samples of another run do not apply to this one."""
        self._reset()

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any, **kwargs: Any) -> None:
        """Take a sample, and continue or start a search."""
        self._steps += 1
        if self._steps <= self.warmup_steps or not self._schedule.is_due(self._steps):
            return
        self._sample_and_search(trainer, "train")
        trend = self._trends["train"]
        if trend.is_due():
            slope = max(trend.growing().values(), default=0.0)
            found = float(len(self.suspects))
            log_scalars(trainer, {"leaks/kb_per_step": slope / 1024, "leaks/suspects": found})

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Take a sample; validation has its own series."""
        is_of_training = trainer.state.fn == "fit" and not trainer.sanity_checking
        if is_of_training and self._steps > self.warmup_steps:
            self._sample_and_search(trainer, "validation")

    def _sample_and_search(self, trainer: pl.Trainer, phase: Phase) -> None:
        trend = self._trends[phase]
        trend.add(self._steps, read_counters(trainer.strategy.root_device))
        if not self._counts:
            if trend.is_due() and self._steps >= self._paused_until and trend.growing():
                self._phase = phase
                self._searches += 1
                self._count(trainer)
            return
        is_due = phase == "validation" or self._steps >= self._next_step
        if phase == self._phase and is_due and trainer.current_epoch >= self._next_epoch:
            self._count(trainer)

    def _count(self, trainer: pl.Trainer) -> None:
        walk = Walk(self._roots(trainer), excluded=self)
        self._counts.append(take_census(self._steps, trainer.current_epoch, walk))
        if len(self._counts) > len(COUNT_INTERVALS):
            self._evaluate_counts(trainer, walk)
        else:
            interval = COUNT_INTERVALS[len(self._counts) - 1]
            self._next_step = self._steps + interval * self._schedule.every_n_steps

    def _evaluate_counts(self, trainer: pl.Trainer, walk: Walk) -> None:
        """Compare the counts: report, wait for the end of the epoch, or end the search."""
        suspects = find_suspects(self._counts, walk, self.min_bytes_per_step)
        epoch_has_ended = self._counts[-1].epoch > self._counts[0].epoch
        confirmed = [
            s
            for s in suspects
            if epoch_has_ended or s.kind == "graph" or self._phase == "validation"
            or self._would_not_fit(trainer, s)
        ]  # fmt: skip
        if suspects and not confirmed:
            self._next_epoch = self._counts[-1].epoch + 1
            self._counts = [self._counts[0], *self._counts[-2:]]  # bounds the memory
            return
        self._end_search()
        known = {(s.kind, s.where) for s in self.suspects}
        new = [s for s in confirmed if (s.kind, s.where) not in known]
        if not new:
            self._paused_until = self._steps + self._pause
            self._pause *= 2
        self.suspects.extend(new)
        for suspect in new:
            log.warning("LeakDetector, step %d: %s What to do: %s.", self._steps, suspect,
                        suspect.advice)  # fmt: skip

    def _would_not_fit(self, trainer: pl.Trainer, suspect: Suspect) -> bool:
        batches_left = trainer.num_training_batches - trainer.fit_loop.batch_idx
        room = MemoryLimits(trainer.strategy.root_device).room()
        return 1024 * suspect.kb_per_step * batches_left > room

    def _roots(self, trainer: pl.Trainer) -> list[tuple[str, Any]]:
        callbacks = [c for c in trainer.callbacks if c is not self]  # type: ignore[attr-defined]
        data = trainer.datamodule  # type: ignore[attr-defined]
        things = [trainer.lightning_module, *trainer.loggers, *callbacks, data]
        roots = [(type(thing).__name__, thing) for thing in things if thing is not None]
        return [*roots, ("trainer", trainer), *user_modules()]

    def diagnose(self) -> list[Verdict]:
        """Return a verdict on the fastest-growing suspect."""
        if self.suspects:
            first = max(self.suspects, key=lambda suspect: suspect.kb_per_step)
            advice = first.advice[0].upper() + first.advice[1:] + "."
            return [Verdict("leaks", "look", str(first), advice)]
        if self._trends["train"].samples_taken < MIN_SAMPLES:
            finding = f"LeakDetector has fewer than the {MIN_SAMPLES} samples that a trend needs."
            advice = "Train longer, or with fewer warmup_steps."
            return [Verdict("leaks", "unknown", finding, advice)]
        return [Verdict("leaks", "ok", f"Nothing has grown steadily in {self._steps} batches.")]

    def report(self) -> Report:
        """Return one row per suspect."""
        rows = [
            {
                "step": suspect.step,
                "kind": suspect.kind,
                "where": suspect.where,
                "items per step": suspect.per_step,
                "of": suspect.items,
                "KB per step": suspect.kb_per_step,
                "what to do": suspect.advice,
            }
            for suspect in self.suspects
        ]
        notes = [f"{self._steps} batches, {self._searches} searches."]
        if not rows:
            notes.insert(0, "No leak was found.")
            notes += [
                f"The {name} grows by {slope / 1024:.3g} KB per step, but no container that "
                "your objects hold: check libraries, extensions and data loading."
                for name, slope in self._trends["train"].growing().items()
                if name in ("heap", "device")
            ]
        return Report("LeakDetector", rows, notes)

    def release(self, trainer: pl.Trainer) -> None:
        """End a running search."""
        self._end_search()
