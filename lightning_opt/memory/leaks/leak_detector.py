"""Finds what grows without end, and names who holds it."""

from __future__ import annotations

import logging
import math
import sys
from time import perf_counter
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
import torch.distributed as dist

from lightning_opt.core.arguments import at_least, one_of, positive
from lightning_opt.core.measure.memory import MemoryLimits
from lightning_opt.core.measure.reading import Schedule
from lightning_opt.core.modules.sharding import ranks_of_a_step, sum_over
from lightning_opt.core.output.loggers import log_scalars
from lightning_opt.core.output.report import Report
from lightning_opt.core.output.verdicts import Verdict
from lightning_opt.memory.leaks.census import Census, take_census
from lightning_opt.memory.leaks.signals import SAMPLES, Signals, read_signals
from lightning_opt.memory.leaks.suspects import WRONG_AT_ONCE, Suspect, find_suspects
from lightning_opt.memory.object_graph import Root
from lightning_opt.trainer.run_callback import RunCallback

if TYPE_CHECKING:
    import lightning.pytorch as pl

log = logging.getLogger(__name__)

INTERVALS = (3, 3, 2)
"""Samples from one count to the next: not a period that something else may have too."""

REST = 100
"""Steps without a search after one that found nothing; doubled each time."""

Phase = Literal["train", "validation"]


class LeakDetector(RunCallback):
    """Notices steady memory growth, and reports what grows, what holds it and the line of source.

    On a schedule it reads cheap counters: heap, Python allocator, resident memory, device memory.
    If one of them has a significant trend (Mann-Kendall, slope by Theil-Sen) that does not flatten,
    it counts everything four times over the next steps, and compares: which containers, autograd
    graphs and kinds of garbage grew each time. Only what is confirmed this way is reported, with
    its holder and, if it can be found, the line of source that fills it. Anything that may be
    emptied at the end of an epoch has to outlive one, unless memory would run out before then.
    Without suspicion, nothing is searched.

    ============= ===============================================================================
    kind          what it is
    ============= ===============================================================================
    ``graph``     losses kept with their graphs, or one tensor whose graph gets longer
    ``hook``      hooks registered again and again
    ``exception`` exceptions kept with their tracebacks
    ``container`` a container of anything else: a cache, a queue, a metric that is never reset
    ``cycle``     garbage in reference cycles that hold memory until Python collects it
    ============= ===============================================================================

    Logged whenever there are enough new samples for a test:

    ======================== ====================================================================
    ``leaks/kb_per_step``    slope of the fastest significant trend of training, in KB; else 0
    ``leaks/suspects``       suspects reported so far
    ======================== ====================================================================

    Args:
        every_n_steps: Batches from one sample to the next, at least 1. Eight make a trend.
        warmup_steps: Batches at the start that are ignored, at least 0.
        min_kb_per_step: Growth a step, in KB, that is too small to matter.
        action: ``"warn"`` logs a warning, ``"raise"`` stops the run, on all ranks together.

    Raises:
        ValueError: In ``__init__`` for arguments out of range.
        RuntimeError: While training, with ``action="raise"``, when a leak is confirmed.

    Example:
        >>> import lightning as L
        >>> import lightning_opt as lo
        >>> leaks = lo.LeakDetector(action="raise")
        >>> trainer = L.Trainer(callbacks=[leaks], logger=False)
        >>> leaks.suspects
        []

    References:
        Sen (1968), *Estimates of the Regression Coefficient Based on Kendall's Tau*. Mann (1945),
        *Nonparametric Tests Against Trend*.
    """

    def __init__(
        self,
        every_n_steps: int = 10,
        warmup_steps: int = 50,
        min_kb_per_step: float = 0.5,
        action: Literal["warn", "raise"] = "warn",
    ) -> None:
        self._schedule = Schedule(every_n_steps)
        self.warmup_steps = at_least("warmup_steps", warmup_steps, 0)
        self.min_rate = 1024 * positive("min_kb_per_step", min_kb_per_step)
        self.action = one_of("action", action, ("warn", "raise"))
        self._reset()

    def _reset(self) -> None:
        self._steps = self._searches = 0
        self._seconds = 0.0
        self._suspects: list[Suspect] = []
        self._training = False
        self._rest = REST
        self._rest_until = 0
        self._forget()
        self._signals: dict[Phase, Signals] = {p: Signals(self.min_rate) for p in get_args(Phase)}

    def _forget(self) -> None:
        self._counts: list[Census] = []
        self._phase: Phase = "train"
        self._next_count: float = math.inf
        self._wait_for_epoch: int | None = None

    @property
    def suspects(self) -> list[Suspect]:
        """What was found so far, oldest first."""
        return self._suspects

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Begin anew: memory of another run says nothing about this one."""
        self._reset()
        self._training = True

    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Take a sample, and look closer if there is a reason to."""
        self._steps += 1
        if self._steps <= self.warmup_steps or not self._schedule.is_due(self._steps):
            return
        found = self._sample(trainer, "train")
        signals = self._signals["train"]
        if signals.is_due():
            slope = max(signals.growing().values(), default=0.0)
            log_scalars(
                trainer,
                {"leaks/kb_per_step": slope / 1024, "leaks/suspects": float(len(self._suspects))},
            )
        self._raise_together(trainer, found)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Take a sample of the series of its own that validation has."""
        if self._training and self._steps > self.warmup_steps:
            self._raise_together(trainer, self._sample(trainer, "validation"))

    def _sample(self, trainer: pl.Trainer, phase: Phase) -> list[Suspect]:
        signals = self._signals[phase]
        signals.add(self._steps, read_signals(trainer.strategy.root_device))
        if not self._counts:
            if signals.is_due() and self._steps >= self._rest_until and signals.growing():
                self._phase = phase
                self._count(trainer)
            return []
        if phase != self._phase:
            return []
        if self._wait_for_epoch is not None:
            if trainer.current_epoch < self._wait_for_epoch:
                return []
            self._wait_for_epoch = None
            self._next_count = self._steps + INTERVALS[-1] * self._schedule.every_n_steps
        if phase == "train" and self._steps < self._next_count:
            return []
        self._count(trainer)
        return self._judge(trainer) if len(self._counts) > len(INTERVALS) else []

    def _count(self, trainer: pl.Trainer) -> None:
        start = perf_counter()
        self._counts.append(take_census(self._steps, trainer.current_epoch, self._roots(trainer)))
        place = min(len(self._counts), len(INTERVALS)) - 1
        self._next_count = self._steps + INTERVALS[place] * self._schedule.every_n_steps
        self._searches += len(self._counts) == 1
        self._seconds += perf_counter() - start

    def _judge(self, trainer: pl.Trainer) -> list[Suspect]:
        """Compare the counts: report, or wait for the end of the epoch, or give up."""
        start = perf_counter()
        suspects = find_suspects(self._counts, self._roots(trainer), self.min_rate, self)
        self._seconds += perf_counter() - start
        outlived = self._counts[-1].epoch > self._counts[0].epoch
        sure = [
            s
            for s in suspects
            if outlived or s.kind in WRONG_AT_ONCE or self._phase == "validation"
            or self._would_not_fit(trainer, s)
        ]  # fmt: skip
        if suspects and not sure:
            self._wait_for_epoch = self._counts[-1].epoch + 1
            self._counts = [self._counts[0], *self._counts[-2:]]  # what is judged stays small
            return []
        self._forget()
        known = {(s.kind, s.where) for s in self._suspects}
        new = [s for s in sure if (s.kind, s.where) not in known]
        if not new:
            self._rest_until, self._rest = self._steps + self._rest, 2 * self._rest
        self._suspects.extend(new)
        for suspect in new:
            log.warning("LeakDetector, step %d: %s What to do: %s.", self._steps, suspect,
                        suspect.advice)  # fmt: skip
        return new

    def _would_not_fit(self, trainer: pl.Trainer, suspect: Suspect) -> bool:
        """Return whether memory would run out before the epoch ends."""
        left = trainer.num_training_batches - trainer.fit_loop.batch_idx
        room = MemoryLimits(trainer.strategy.root_device).room()
        return 1024 * suspect.kb_per_step * left > room

    def _raise_together(self, trainer: pl.Trainer, found: list[Suspect]) -> None:
        """With ``action="raise"``, stop all ranks if one has found a leak."""
        if self.action != "raise":
            return
        if groups := ranks_of_a_step(trainer):
            if not self._signals["train"].is_due():  # all ranks have as many samples
                return
            flag = torch.tensor(float(bool(self._suspects)), device=trainer.strategy.root_device)
            sum_over(flag, groups, dist.ReduceOp.MAX)
            if not flag.item():
                return
        elif not found:
            return
        reasons = " ".join(map(str, self._suspects)) or "Another rank has found a leak."
        raise RuntimeError(
            f"LeakDetector(action='raise') stopped the run at step {self._steps}. {reasons}"
        )

    def _roots(self, trainer: pl.Trainer) -> list[Root]:
        module = trainer.lightning_module
        callbacks = [c for c in trainer.callbacks if c is not self]  # type: ignore[attr-defined]
        data = trainer.datamodule  # type: ignore[attr-defined]
        things = [module, *trainer.loggers, *callbacks, *([] if data is None else [data])]
        roots: list[Root] = [(type(thing).__name__, thing) for thing in things]
        roots.append(("trainer", trainer))
        names = dict.fromkeys(type(thing).__module__ for thing in things)
        return roots + [
            (name, vars(sys.modules[name]))
            for name in names
            if name in sys.modules and not name.startswith(("lightning.", "lightning_opt."))
        ]

    def diagnose(self) -> list[Verdict]:
        """Return whether memory has grown, and who holds it."""
        if self._suspects:
            first = max(self._suspects, key=lambda suspect: suspect.kb_per_step)
            advice = first.advice[0].upper() + first.advice[1:] + "."
            return [Verdict("leaks", "look", str(first), advice)]
        taken = self._signals["train"].taken
        if taken < SAMPLES:
            finding = f"LeakDetector has taken {taken} samples, and needs {SAMPLES} for a trend."
            return [
                Verdict("leaks", "unknown", finding, "Train longer, or with fewer warmup_steps.")
            ]
        return [Verdict("leaks", "ok", f"Nothing has grown steadily in {self._steps} batches.")]

    def report(self) -> Report:
        """Return the suspects, one a row."""
        rows = [
            {
                "step": suspect.step,
                "kind": suspect.kind,
                "where": suspect.where,
                "line": suspect.line,
                "items a step": suspect.per_step,
                "of": suspect.what,
                "KB a step": suspect.kb_per_step,
                "what to do": suspect.advice,
            }
            for suspect in self._suspects
        ]
        notes = [
            f"{self._steps} batches, {self._searches} searches, which took {self._seconds:.2g} s."
        ]
        if not rows:
            notes.insert(0, "No leak was found.")
            notes += [
                f"The {name} grows by {slope / 1024:.3g} KB a step, and no container of Python "
                "does: look at extensions, data loading and the allocator."
                for name, slope in self._signals["train"].growing().items()
                if name in ("heap", "device")
            ]
        return Report("LeakDetector", rows, notes)

    def release(self, trainer: pl.Trainer) -> None:
        """Search no more."""
        self._training = False
        self._forget()
