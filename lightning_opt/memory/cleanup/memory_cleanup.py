"""Cleans up when memory runs short, and only then, and only as long as that is of use."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback

from lightning_opt.core.arguments import at_least, between
from lightning_opt.core.loggers import log_scalars
from lightning_opt.core.memory import MB, GrowthCounter, MemoryLimits, Usage, device_memory
from lightning_opt.core.report import Report
from lightning_opt.core.schedule import Schedule
from lightning_opt.core.sharding import wants_host
from lightning_opt.memory.cleanup.actions import ACTIONS, Action, Cleaner, Effect, advise
from lightning_opt.memory.cleanup.pressure import Pressure

if TYPE_CHECKING:
    import lightning.pytorch as pl

log = logging.getLogger(__name__)

FAR = 5
"""Steps between two looks at the counter while less than half of the threshold is used."""

LOG_EVERY = 5
"""Readings from one logging to the next; each cleanup is logged."""

EVENTS = 1000
"""Cleanups that are remembered."""

DELAY = 2
"""Steps from asking all ranks to reading their answer on an accelerator."""


class MemoryCleanup(Callback):
    """Cleans up when memory runs short: collects garbage, empties caches, trims the heap.

    Each limit is watched on its own: the device, the machine, the control group of the container,
    ``RLIMIT_AS``. What counts as used is what cannot be had, so that a full cache of the CUDA
    allocator, which the next step takes its memory from, is no reason to empty it. Every cleanup
    is measured. One that frees next to nothing raises the level of the next one, after three in a
    row there are no more, and what would help instead is said once: a working set that is simply
    large is not garbage. When use falls below ``release``, all is forgotten.

    Use is read every ``every_n_steps`` steps. In between, on a single process, each step (while
    memory is plentiful, each fifth) looks at one cheap counter, and use is read early if that has
    grown by half of what was left to the threshold. Several ranks agree every ``every_n_steps``
    steps, in one all-reduce, and clean all or none.

    Logged at every fifth reading on the schedule, and at each cleanup:

    ========================== ================================================================
    ``memory/used_fraction``   share that is used of the limit that is nearest, on any rank
    ``memory/freed_mb``        freed by all cleanups so far, in MB of that limit
    ``memory/cleanups``        cleanups so far
    ``memory/cleanup_seconds`` what they took
    ========================== ================================================================

    Args:
        threshold: Share of a limit from which to clean, above ``release`` and below 1.
        release: Share below which memory is no longer short.
        cooldown_steps: Steps from one cleanup to the next; see above for the exceptions.
        actions: Any of ``"gc"`` (collect reference cycles), ``"cuda_cache"`` (give the cache of the
            CUDA allocator back) and ``"malloc_trim"`` (give the free pages of the C library's heap
            back). Each is left out for a while after two attempts without effect.
        system: Watch the limits of host memory too, not only the device's. A CPU has no other.
        every_n_steps: Steps from one reading to the next, at least 1.
        count_cache: Count the cache of the CUDA allocator as used, for a GPU that is shared with
            other processes.

    Raises:
        ValueError: In ``__init__`` for arguments out of range; in ``setup`` if there is nothing to
            watch.

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
        system: bool = True,
        every_n_steps: int = 20,
        count_cache: bool = False,
    ) -> None:
        if not 0 <= between("release", release, 0, 1) < between("threshold", threshold, 0, 1) < 1:
            raise ValueError(
                "threshold must be above release and below 1, got "
                f"threshold={threshold!r}, release={release!r}."
            )
        unknown = [action for action in actions if action not in ACTIONS]
        if unknown or not actions or isinstance(actions, str):
            raise ValueError(f"actions must be some of {list(ACTIONS)}, got {actions!r}.")
        self.threshold, self.release = threshold, release
        self.cooldown_steps = at_least("cooldown_steps", cooldown_steps, 0)
        self.actions = list(actions)
        self.system, self.count_cache = system, count_cache
        self._schedule = Schedule(every_n_steps)
        self._reset()

    def _reset(self) -> None:
        self._steps = self._cleanups = 0
        self._freed = self._seconds = 0.0
        self._events: list[dict[str, Any]] = []
        self._advised: set[str] = set()
        self._pressures: dict[str, Pressure] = {}
        self._release()

    def _release(self) -> None:
        counter: GrowthCounter | None = getattr(self, "_counter", None)
        if counter is not None:
            counter.close()
        self._counter: GrowthCounter | None = None
        self._limits: MemoryLimits | None = None
        self._cleaner: Cleaner | None = None
        self._asked: torch.Tensor | None = None
        self._asked_at = 0
        self._seen: tuple[int, ...] = ()
        self._far = False
        self._room: float = 0.0
        self._look_at: float = 0.0

    @property
    def events(self) -> list[dict[str, Any]]:
        """The newest 1000 cleanups, oldest first, each a plain ``dict``.

        ``step``; ``source``, the limit that was nearest; the share of it that was used ``before``
        and ``after``; ``freed_mb`` and ``seconds`` of each action; and whether it was ``useful``.
        """
        return self._events

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Check that there is something to watch."""
        if stage == "fit" and not self.system and trainer.strategy.root_device.type != "cuda":
            raise ValueError(
                "MemoryCleanup(system=False) watches the device alone, and "
                f"{trainer.strategy.root_device} has no memory of its own that can be read. "
                "Leave system=True."
            )

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Find out what limits this process and its device."""
        self._reset()
        device = trainer.strategy.root_device
        self._limits = MemoryLimits(device, host=self.system, count_cache=self.count_cache)
        self._cleaner = Cleaner(self.actions, device)
        self._counter = GrowthCounter(device)

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
        if trainer.world_size > 1 and dist.is_initialized():
            self._ask_all(trainer, pl_module, due=due)
        elif due or self._has_grown(self._steps):
            self._look(trainer, pl_module, due=due)

    def on_validation_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Look, if this is the only process: others may have fewer batches to validate."""
        if self._limits is not None and trainer.world_size == 1 and self._has_grown(batch_idx):
            self._look(trainer, pl_module, due=False)

    def _has_grown(self, batch: int) -> bool:
        """Return whether half of what was left to the threshold may be gone since the last look.

        Or whether a cooldown ends that has been waited for.
        """
        assert self._limits is not None
        if not self._seen or self._steps == self._look_at:
            return True
        if self._far and batch % FAR:
            return False
        now = self._counter.read() if self._counter is not None else ()
        return any(a - b > self._room for a, b in zip(now, self._seen, strict=False))

    def _read(self) -> list[Usage]:
        """Read all limits, and find out when they have to be read again."""
        assert self._limits is not None
        usages = self._limits.read()
        device = self._limits.device
        self._seen = self._counter.read() if self._counter is not None else ()
        self._room = self._look_at = float("inf")
        self._far = all(usage.fraction < self.threshold / 2 for usage in usages)
        for usage in usages:
            pressure = self._pressure(usage)
            self._look_at = min(self._look_at, pressure.rests_until(usage.fraction))
            # The counter that is looked at in between is the device's: it says nothing of others.
            if device.type == "cpu" or usage.source == str(device):
                for level in (pressure.level, pressure.urgent):
                    if usage.fraction < level < 1:
                        # Not at every step just because a limit is close.
                        room = max(level - usage.fraction, 0.01) * usage.total
                        self._room = min(self._room, room / 2)
        return usages

    def _pressure(self, usage: Usage) -> Pressure:
        if usage.source not in self._pressures:
            self._pressures[usage.source] = Pressure(
                self.threshold, self.release, self.cooldown_steps
            )
        return self._pressures[usage.source]

    def _wanting(self, usages: Sequence[Usage]) -> list[Usage]:
        return [u for u in usages if self._pressure(u).wants(self._steps, u.fraction)]

    def _look(self, trainer: pl.Trainer, pl_module: pl.LightningModule, due: bool) -> None:
        usages = self._read()
        wanting = self._wanting(usages)
        if wanting:
            self._clean(trainer, pl_module, usages, wanting)
            usages = self._read()
        if wanting or (due and self._is_log_due()):
            self._log(trainer, max((u.fraction for u in usages), default=0.0))

    def _is_log_due(self) -> bool:
        return self._steps // self._schedule.every_n_steps % LOG_EVERY == 0

    def _ask_all(self, trainer: pl.Trainer, pl_module: pl.LightningModule, due: bool) -> None:
        """Ask all ranks on the schedule, and act on their answer at one and the same step."""
        device = trainer.strategy.root_device
        if due:
            usages = self._read()
            largest = max((u.fraction for u in usages), default=0.0)
            self._asked = torch.tensor([float(bool(self._wanting(usages))), largest], device=device)
            self._asked_at = self._steps
            dist.all_reduce(self._asked, op=dist.ReduceOp.MAX)
        delay = 0 if wants_host(device) else min(DELAY, self._schedule.every_n_steps - 1)
        if self._asked is None or self._steps < self._asked_at + delay:
            return
        wanted, largest = self._asked.tolist()
        self._asked = None
        if wanted:
            usages = self._read()
            self._clean(trainer, pl_module, usages, self._wanting(usages))
        if wanted or self._is_log_due():
            self._log(trainer, largest)

    def _clean(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        before: Sequence[Usage],
        wanting: Sequence[Usage],
    ) -> None:
        """Clean, measure, and judge for each limit that wanted it whether it was of use."""
        assert self._limits is not None
        assert self._cleaner is not None
        resting = self._cleaner.resting()
        effects = self._cleaner.clean()
        after = {usage.source: usage for usage in self._limits.read()}
        useful = False
        freed = 0
        for usage in wanting:
            now = after.get(usage.source, usage)
            gained = _gain(usage, now, effects)
            freed = max(freed, gained)
            pressure = self._pressure(usage)
            if pressure.cleaned(self._steps, now.fraction, gained / usage.total):
                useful = True
            elif usage.source not in self._advised:
                self._advised.add(usage.source)
                self._advise(trainer, pl_module, now, gained)
        if not wanting:  # another rank's need
            freed = sum(max(0, effect.freed) for effect in effects if effect.action != "gc")
        elif not useful and resting:
            self._cleaner.retry()
        self._cleanups += 1
        self._freed += freed / MB
        self._seconds += sum(effect.seconds for effect in effects)
        worst = max(wanting or before, key=lambda usage: usage.fraction, default=None)
        if worst is not None:
            self._note(trainer, worst, after.get(worst.source, worst), effects, useful)

    def _note(
        self,
        trainer: pl.Trainer,
        before: Usage,
        after: Usage,
        effects: Sequence[Effect],
        useful: bool,
    ) -> None:
        event = {
            "step": trainer.global_step,
            "source": before.source,
            "before": before.fraction,
            "after": after.fraction,
            "freed_mb": {effect.action: effect.freed / MB for effect in effects},
            "seconds": {effect.action: effect.seconds for effect in effects},
            "useful": useful,
        }
        self._events = [*self._events, event][-EVENTS:]
        log.info(
            "MemoryCleanup, step %d: %s was %.0f%% full, now %.0f%% (%s).",
            trainer.global_step, before.source, 100 * before.fraction, 100 * after.fraction,
            ", ".join(f"{e.action} {e.freed / MB:,.1f} MB in {e.seconds:.3f} s" for e in effects),
        )  # fmt: skip

    def _advise(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, usage: Usage, freed: int
    ) -> None:
        assert self._limits is not None
        log.warning(
            "MemoryCleanup freed only %.1f MB of the %.0f MB in use (%s, %.0f%% full): this is "
            "what the training needs, not garbage. It tries again when half of the rest is gone, "
            "three times at most. What helps: %s.",
            freed / MB, usage.used / MB, usage.source, 100 * usage.fraction,
            advise(usage, trainer, pl_module, device_memory(self._limits.device)),
        )  # fmt: skip

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

    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        """Watch no longer."""
        self._release()

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Watch no longer."""
        self._release()


def _gain(before: Usage, after: Usage, effects: Sequence[Effect]) -> int:
    """Return the bytes of a limit that a cleanup freed.

    Resident memory does not fall when the heap keeps what was freed in it, so that for host memory
    what the heap has regained for the next tensor counts as well.
    """
    heap = max((e.freed for e in effects if e.action == "gc"), default=0)
    regained = heap if not before.source.startswith("cuda") else 0
    return max(0, before.used - after.used, regained)
