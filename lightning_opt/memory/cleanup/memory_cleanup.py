"""The callback that frees memory when it runs low."""

from __future__ import annotations

import gc
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from time import perf_counter
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist

from lightning_opt.core.arguments import check_between
from lightning_opt.core.measure.memory import MB, MemoryLimits, Usage, live_bytes, malloc_trim
from lightning_opt.core.measure.reading import DelayedReads, Schedule
from lightning_opt.core.modules.sharding import Groups, reads_are_free, reduce_over, step_groups
from lightning_opt.core.output.loggers import log_scalars
from lightning_opt.core.output.report import Report
from lightning_opt.trainer.run_callback import RunCallback

if TYPE_CHECKING:
    import lightning.pytorch as pl

log = logging.getLogger(__name__)

Action = Literal["gc", "cuda_cache", "malloc_trim"]

MIN_GAIN_SHARE = 0.25
"""A cleanup is useful if it frees at least this share of ``threshold - release``."""

MAX_FAILURES = 3
"""Maximum number of consecutive failed cleanups; then cleaning stops."""


class Pressure:
    """Decides when to clean, for one memory limit.

    Levels are shares of the limit. After a cleanup, the next level is halfway between the current
    use and 1; after three consecutive cleanups that free almost nothing, there are no more. When
    use falls below ``release``, the level and the failures are reset.
    """

    def __init__(self, threshold: float, release: float) -> None:
        self._threshold, self._release = threshold, release
        self._reset()

    def _reset(self) -> None:
        self.level = self._threshold
        self._failures = 0

    def is_high(self, fraction: float) -> bool:
        if fraction < self._release:
            self._reset()
        return fraction >= self.level

    def record_cleanup(self, fraction: float, freed: float) -> bool:
        """Record a cleanup that freed the share ``freed``, and return whether it succeeded."""
        if fraction < self._release:
            self._reset()
            return True
        is_useful = freed >= MIN_GAIN_SHARE * (self._threshold - self._release)
        self._failures = 0 if is_useful else self._failures + 1
        self.level = (fraction + 1) / 2 if self._failures < MAX_FAILURES else math.inf
        return is_useful


_ACTIONS: Mapping[Action, Callable[[], object]] = {
    "gc": gc.collect,
    "cuda_cache": torch.cuda.empty_cache,  # has no effect before CUDA is used
    "malloc_trim": malloc_trim,
}

ACTIONS = tuple(_ACTIONS)
"""In the order of execution: each action can return memory that the previous one freed."""


ADVICE = (
    'a smaller batch with accumulate_grad_batches, precision="bf16-mixed", or '
    'lightning_opt.ActivationCheckpointing("auto"); if weights and optimizer state take most of '
    'it: strategy="fsdp", precision="bf16-true", or an optimizer with less state'
)


MAX_EVENTS = 1000
"""Maximum number of cleanups in ``events``."""


class MemoryCleanup(RunCallback):
    """Cleans up when memory runs low: collects garbage, empties caches, trims the heap.

    Each limit is watched separately: the device, the machine, the container's control group,
    ``RLIMIT_AS``. Only memory that cannot be reclaimed counts as used; the cache of the CUDA
    allocator does not, because the next step uses it. Every cleanup is measured. If use stays above
    ``release``, the next cleanup starts at a higher use. If a cleanup frees almost nothing, one
    warning suggests other ways to save memory; after three such cleanups in a row, cleaning stops
    until use falls below ``release``.

    Use is read every ``every_n_steps`` batches. Several ranks agree in one all-reduce: either all
    ranks clean up or none. On an accelerator they read the result at the next reading, so no host
    waits.

    Logged at every reading:

    ========================== ================================================================
    ``memory/used_fraction``   used share of the fullest limit, as the maximum over ranks
    ``memory/freed_mb``        freed by all cleanups so far, in MB of that limit
    ``memory/cleanups``        cleanups so far
    ``memory/cleanup_seconds`` seconds they took
    ========================== ================================================================

    ``events`` has the newest 1000 cleanups, oldest first, each a plain ``dict``: ``step``;
    ``limit``, the fullest limit; its used share ``before`` and ``after``; ``freed_mb``;
    ``seconds``; and whether it was ``useful``.

    Args:
        threshold: Share of a limit from which to clean, above ``release`` and below 1.
        release: Share below which memory is no longer low, and ``threshold`` applies again.
        actions: Any of ``"gc"`` (collect reference cycles), ``"cuda_cache"`` (empty the cache of
            the CUDA allocator) and ``"malloc_trim"`` (return free pages of the C library's heap to
            the system).
        every_n_steps: Batches from one reading to the next, at least 1. A single process also
            counts batches of validation.

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
        actions: Sequence[Action] = ACTIONS,
        every_n_steps: int = 5,
    ) -> None:
        check_between("release", release, 0, 1)
        check_between("threshold", threshold, 0, 1)
        if not release < threshold < 1:
            raise ValueError(
                "threshold must be above release and below 1, got "
                f"threshold={threshold!r}, release={release!r}."
            )
        unknown = [action for action in actions if action not in ACTIONS]
        if unknown or not actions or isinstance(actions, str):
            raise ValueError(f"actions must be some of {list(ACTIONS)}, got {actions!r}.")
        self.threshold, self.release_below = threshold, release
        self.actions = list(actions)
        self._schedule = Schedule(every_n_steps)
        self._limits: MemoryLimits | None = None
        self._reset()

    def _reset(self) -> None:
        self._steps = self._cleanups = 0
        self._freed = self._seconds = 0.0
        self.events: list[dict[str, Any]] = []
        self._advised: set[str] = set()
        self._pressures: dict[str, Pressure] = {}
        self._pending_results: DelayedReads[None] = DelayedReads()

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Find the limits of this process and its device."""
        self._reset()
        self._limits = MemoryLimits(trainer.strategy.root_device)

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any, **kwargs: Any) -> None:
        """Read memory use if it is due, and clean if it is high."""
        self._steps += 1
        if self._limits is None or not self._schedule.is_due(self._steps):
            return
        if groups := step_groups(trainer):
            self._agree(trainer, groups)
            return
        usages, high = self._read()
        if high:
            self._clean(trainer, high)
            usages, _ = self._read()
        self._log(trainer, _largest(usages))

    def on_validation_batch_end(self, trainer: pl.Trainer, *args: Any, **kwargs: Any) -> None:
        """Read and clean, but only in a single process: ranks may validate unequal batch counts."""
        if trainer.world_size == 1:
            self.on_train_batch_end(trainer)

    def _read(self) -> tuple[list[Usage], list[Usage]]:
        """Return the usage of all limits, and of the limits whose usage is high."""
        assert self._limits is not None
        usages, high = self._limits.read(), []
        for usage in usages:
            new = Pressure(self.threshold, self.release_below)
            pressure = self._pressures.setdefault(usage.source, new)
            if pressure.is_high(usage.fraction):
                high.append(usage)
        return usages, high

    def _agree(self, trainer: pl.Trainer, groups: Groups) -> None:
        """If one rank needs a cleanup, all ranks clean at the same step."""
        device = trainer.strategy.root_device
        if not reads_are_free(device):
            self._act_on_agreement(trainer)
        usages, high = self._read()
        values = torch.tensor([float(bool(high)), _largest(usages)], device=device)
        reduce_over(values, groups, dist.ReduceOp.MAX)
        self._pending_results.push(values, None)
        if reads_are_free(device):
            self._act_on_agreement(trainer)

    def _act_on_agreement(self, trainer: pl.Trainer) -> None:
        for (needed, largest), _ in self._pending_results.flush():
            if needed:
                usages, high = self._read()
                self._clean(trainer, high or usages)
            self._log(trainer, largest)

    def _clean(self, trainer: pl.Trainer, high: Sequence[Usage]) -> None:
        """Clean, and record for each limit in ``high`` whether it succeeded."""
        assert self._limits is not None
        start, allocated = perf_counter(), live_bytes(torch.device("cpu"))
        for action, perform in _ACTIONS.items():
            if action in self.actions:
                perform()
        seconds, allocated = perf_counter() - start, allocated - live_bytes(torch.device("cpu"))
        after = {usage.source: usage for usage in self._limits.read()}
        # `high` is empty if another rank needs the cleanup and no limit of this rank can be read.
        worst = max(high, key=lambda usage: usage.fraction, default=Usage("none", 0, 1))
        freed, useful = 0.0, False
        for usage in high:
            now = after.get(usage.source, usage)
            # Resident memory does not fall while the heap keeps freed blocks.
            in_heap = 0 if "cuda" in usage.source else allocated
            gained = max(0, usage.used - now.used, in_heap)
            if usage is worst:
                freed = gained / MB
            pressure = self._pressures[usage.source]
            if usage.fraction < pressure.level:
                continue  # only another rank needs the cleanup
            if pressure.record_cleanup(now.fraction, gained / usage.total):
                useful = True
            elif usage.source not in self._advised:
                self._advised.add(usage.source)
                log.warning(
                    "MemoryCleanup freed only %.1f MB of the %.0f MB in use (%s, %.0f%% full): "
                    "the run needs this memory. The next cleanup runs when half of the free "
                    "memory is used; after three failures there are no more. What helps: %s.",
                    gained / MB, now.used / MB, now.source, 100 * now.fraction, ADVICE,
                )  # fmt: skip
        self._cleanups += 1
        self._freed += freed
        self._seconds += seconds
        event = {
            "step": trainer.global_step,
            "limit": worst.source,
            "before": worst.fraction,
            "after": after.get(worst.source, worst).fraction,
            "freed_mb": freed,
            "seconds": seconds,
            "useful": useful,
        }
        self.events = [*self.events, event][-MAX_EVENTS:]
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
        """Return one row per cleanup, with their totals below."""
        note = (
            f"{self._cleanups} cleanups in {self._steps} steps freed {self._freed:,.0f} MB in "
            f"{self._seconds:.3g} s."
        )
        return Report(f"MemoryCleanup(threshold={self.threshold})", self.events, [note])

    def release(self, trainer: pl.Trainer) -> None:
        """Stop watching."""
        self._limits = None
        self._pending_results.clear()


def _largest(usages: Sequence[Usage]) -> float:
    return max((usage.fraction for usage in usages), default=0.0)
