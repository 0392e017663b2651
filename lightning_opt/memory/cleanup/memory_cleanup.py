"""Cleans up when memory runs short, and only then, and only as long as that is of use."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from lightning_opt.core.arguments import at_least, between
from lightning_opt.core.measure.delayed import DelayedReads
from lightning_opt.core.measure.memory import MB, MemoryLimits, Usage, growth_figures
from lightning_opt.core.measure.schedule import Schedule
from lightning_opt.core.modules.sharding import Groups, ranks_of_a_step, sum_over, wants_host
from lightning_opt.core.output.loggers import log_scalars
from lightning_opt.core.output.report import Report
from lightning_opt.memory.cleanup.actions import ACTIONS, Action, Effect, advise, clean
from lightning_opt.memory.cleanup.pressure import Pressure
from lightning_opt.trainer.run_callback import RunCallback

if TYPE_CHECKING:
    import lightning.pytorch as pl

log = logging.getLogger(__name__)

EVENTS = 1000
"""Cleanups that are remembered."""


class MemoryCleanup(RunCallback):
    """Cleans up when memory runs low: collects garbage, empties caches, trims the heap.

    Each limit is watched separately: the device, the machine, the container's control group,
    ``RLIMIT_AS``. Only memory that cannot be reclaimed counts as used, so a full cache of the CUDA
    allocator, which serves the next step, is no reason to empty it. Every cleanup is measured. One
    that frees next to nothing raises the level of the next; after three in a row it gives up, and
    says once what would help instead: a working set that is simply large is not garbage. When use
    falls below ``release``, it starts afresh.

    Use is read every ``every_n_steps`` steps. In between, on a single process, each step checks one
    cheap counter, and reads use early if that counter grew by half of the remaining distance to the
    threshold. Several ranks agree every ``every_n_steps`` steps, in one all-reduce, and either all
    clean up or none; on an accelerator they read the answer at the next such step, so no host
    waits.

    Logged at every reading on the schedule, and at each cleanup:

    ========================== ================================================================
    ``memory/used_fraction``   share that is used of the limit that is nearest, on any rank
    ``memory/freed_mb``        freed by all cleanups so far, in MB of that limit
    ``memory/cleanups``        cleanups so far
    ``memory/cleanup_seconds`` what they took
    ========================== ================================================================

    Args:
        threshold: Share of a limit from which to clean, above ``release`` and below 1.
        release: Share below which memory is no longer short.
        cooldown_steps: Steps after a cleanup in which the next one waits until half of what lies
            above the threshold is gone.
        actions: Any of ``"gc"`` (collect reference cycles), ``"cuda_cache"`` (give the cache of the
            CUDA allocator back) and ``"malloc_trim"`` (give the free pages of the C library's heap
            back).
        every_n_steps: Steps from one reading to the next, at least 1.

    Raises:
        ValueError: In ``__init__`` for arguments out of range.

    Example:
        >>> import lightning as L
        >>> import lightning_opt as lo
        >>> cleanup = lo.MemoryCleanup(threshold=0.9, actions=["gc", "malloc_trim"])
        >>> trainer = L.Trainer(callbacks=[cleanup], logger=False)
    """

    def __init__(
        self,
        threshold: float = 0.8,
        release: float = 0.7,
        cooldown_steps: int = 50,
        actions: Sequence[Action] = ACTIONS,
        every_n_steps: int = 20,
    ) -> None:
        if not 0 <= between("release", release, 0, 1) < between("threshold", threshold, 0, 1) < 1:
            raise ValueError(
                "threshold must be above release and below 1, got "
                f"threshold={threshold!r}, release={release!r}."
            )
        unknown = [action for action in actions if action not in ACTIONS]
        if unknown or not actions or isinstance(actions, str):
            raise ValueError(f"actions must be some of {list(ACTIONS)}, got {actions!r}.")
        self.threshold, self.release_below = threshold, release
        self.cooldown_steps = at_least("cooldown_steps", cooldown_steps, 0)
        self.actions = list(actions)
        self._schedule = Schedule(every_n_steps)
        self._limits: MemoryLimits | None = None
        self._begin()

    def _begin(self) -> None:
        self._steps = self._cleanups = 0
        self._freed = self._seconds = 0.0
        self._events: list[dict[str, Any]] = []
        self._advised: set[str] = set()
        self._pressures: dict[str, Pressure] = {}
        self._answers: DelayedReads[None] = DelayedReads()
        self._seen: tuple[int, ...] = ()
        self._room = 0.0

    @property
    def events(self) -> list[dict[str, Any]]:
        """The newest 1000 cleanups, oldest first, each a plain ``dict``.

        ``step``; ``source``, the limit that was nearest; the share of it that was used ``before``
        and ``after``; ``freed_mb`` and ``seconds`` of each action; and whether it was ``useful``.
        """
        return self._events

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Find out what limits this process and its device."""
        self.release(trainer)
        self._begin()
        self._limits = MemoryLimits(trainer.strategy.root_device)

    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Look, and clean if it is time."""
        if self._limits is None:
            return
        self._steps += 1
        due = self._schedule.is_due(self._steps)
        if groups := ranks_of_a_step(trainer):
            if due:
                self._ask_all(trainer, pl_module, groups)
        elif due or self._has_grown():
            self._look(trainer, pl_module, due=due)

    def on_validation_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any, **kwargs: Any
    ) -> None:
        """Look, if this is the only process: others may have fewer batches to validate."""
        if self._limits is not None and trainer.world_size == 1 and self._has_grown():
            self._look(trainer, pl_module, due=False)

    def _has_grown(self) -> bool:
        """Return whether half of what was left to the threshold may be gone since the last look."""
        assert self._limits is not None
        now = growth_figures(self._limits.device)
        return not self._seen or any(
            after - before > self._room for after, before in zip(now, self._seen, strict=True)
        )

    def _read(self) -> tuple[list[Usage], list[Usage]]:
        """Return all limits and those that are short, and find out when to read them again."""
        assert self._limits is not None
        usages, short = self._limits.read(), []
        device, self._room = self._limits.device, math.inf
        self._seen = growth_figures(device)
        for usage in usages:
            pressure = self._pressures.setdefault(
                usage.source, Pressure(self.threshold, self.release_below, self.cooldown_steps)
            )
            if pressure.wants(self._steps, usage.fraction):
                short.append(usage)
            # The counter that is looked at in between is the device's: it says nothing of others.
            elif device.type == "cpu" or usage.source == str(device):
                # Not at every step just because a limit is close.
                left = max(pressure.level(self._steps) - usage.fraction, 0.01)
                self._room = min(self._room, left * usage.total / 2)
        return usages, short

    def _look(self, trainer: pl.Trainer, pl_module: pl.LightningModule, due: bool) -> None:
        usages, short = self._read()
        if short:
            self._clean(trainer, pl_module, short)
            usages, _ = self._read()
        if short or due:
            self._log(trainer, _largest(usages))

    def _ask_all(self, trainer: pl.Trainer, pl_module: pl.LightningModule, groups: Groups) -> None:
        """Ask all ranks, and act on their answer at one and the same step."""
        device = trainer.strategy.root_device
        if not wants_host(device):
            self._act_on_answer(trainer, pl_module)  # to what was asked the last time
        usages, short = self._read()
        question = torch.tensor([float(bool(short)), _largest(usages)], device=device)
        sum_over(question, groups, dist.ReduceOp.MAX)
        self._answers.push(question, None)
        if wants_host(device):
            self._act_on_answer(trainer, pl_module)

    def _act_on_answer(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        for (wanted, largest), _ in self._answers.flush():
            if wanted:
                usages, short = self._read()
                self._clean(trainer, pl_module, short or usages)
            self._log(trainer, largest)

    def _clean(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, short: Sequence[Usage]
    ) -> None:
        """Clean, measure, and judge for each limit that is short whether it was of use."""
        assert self._limits is not None
        effects = clean(self.actions, self._limits.device)
        after = {usage.source: usage for usage in self._limits.read()}
        worst = max(short, key=lambda usage: usage.fraction, default=None)
        useful = False
        for usage in short:
            now = after.get(usage.source, usage)
            gained = _gain(usage, now, effects)
            if usage is worst:
                self._freed += gained / MB
            pressure = self._pressures[usage.source]
            if usage.fraction < pressure.level(self._steps):
                continue  # it is another rank that is short
            if pressure.cleaned(self._steps, now.fraction, gained / usage.total):
                useful = True
            elif usage.source not in self._advised:
                self._advised.add(usage.source)
                log.warning(
                    "MemoryCleanup freed only %.1f MB of the %.0f MB in use (%s, %.0f%% full): "
                    "this is what the run needs, not garbage. It tries again when half of "
                    "the rest is gone, three times at most. What helps: %s.",
                    gained / MB, now.used / MB, now.source, 100 * now.fraction,
                    advise(now, pl_module, trainer.optimizers),
                )  # fmt: skip
        self._cleanups += 1
        self._seconds += sum(effect.seconds for effect in effects)
        if worst is None:
            return
        event = {
            "step": trainer.global_step,
            "source": worst.source,
            "before": worst.fraction,
            "after": after.get(worst.source, worst).fraction,
            "freed_mb": {effect.action: effect.freed / MB for effect in effects},
            "seconds": {effect.action: effect.seconds for effect in effects},
            "useful": useful,
        }
        self._events = [*self._events, event][-EVENTS:]
        log.info("MemoryCleanup: %s", event)

    def _log(self, trainer: pl.Trainer, used: float) -> None:
        values = {
            "used_fraction": used,
            "freed_mb": self._freed,
            "cleanups": float(self._cleanups),
            "cleanup_seconds": self._seconds,
        }
        log_scalars(trainer, {f"memory/{key}": value for key, value in values.items()})

    def report(self) -> Report:
        """Return the cleanups, one a row, with what they did together below."""
        rows = [
            {
                "step": event["step"],
                "limit": event["source"],
                "before": event["before"],
                "after": event["after"],
                **{f"{action} MB": mb for action, mb in event["freed_mb"].items()},
                "seconds": sum(event["seconds"].values()),
                "of use": event["useful"],
            }
            for event in self._events
        ]
        note = (
            f"{self._cleanups} cleanups in {self._steps} steps freed {self._freed:,.0f} MB in "
            f"{self._seconds:.3g} s."
        )
        return Report(f"MemoryCleanup(threshold={self.threshold})", rows, [note])

    def release(self, trainer: pl.Trainer) -> None:
        """Watch no longer."""
        self._limits = None
        self._answers.clear()


def _largest(usages: Sequence[Usage]) -> float:
    return max((usage.fraction for usage in usages), default=0.0)


def _gain(before: Usage, after: Usage, effects: Sequence[Effect]) -> int:
    """Return the bytes of a limit that a cleanup freed.

    Resident memory does not fall when the heap keeps what was freed in it, so that for host memory
    what the heap has regained for the next tensor counts as well.
    """
    heap = max((e.freed for e in effects if e.action == "gc"), default=0)
    regained = heap if not before.source.startswith("cuda") else 0
    return max(0, before.used - after.used, regained)
