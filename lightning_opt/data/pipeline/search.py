"""Which settings to try, in which order, and when to stop: decisions alone, from measured times."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from lightning_opt.data.pipeline.loaders import LoaderSettings

FLOOR = 2e-4
"""Seconds a batch below which workers cannot pay: about what it takes to receive one."""

ENOUGH = 0.03
"""Share of the time spent waiting at which the loader is no bottleneck."""

BETTER = 0.03
"""Gain for which another setting is taken; less is noise."""

WORTH = 0.05
"""Gain over no workers for which processes are started at all."""


@dataclass(frozen=True)
class Measured:
    """What one setting takes.

    Attributes:
        settings: The setting.
        seconds: Of a batch and its training step.
        wait: Share of them that is spent waiting for data.
    """

    settings: LoaderSettings
    seconds: float
    wait: float


@dataclass
class Search:
    """Finds the fastest setting with few measurements.

    Args:
        measure: Measures one setting, or returns None when the time is up.
        max_workers: The most workers.
        min_workers: The fewest.
        prefetch: Values of ``prefetch_factor``; the first is used while workers are chosen.
        pins: Values of ``pin_memory``; the first is used until the end.
        persistent: Of every setting with workers.

    Attributes:
        tried: All that was measured, in order.
        reason: Why it ended.
    """

    measure: Callable[[LoaderSettings], Measured | None]
    max_workers: int
    min_workers: int = 0
    prefetch: Sequence[int] = (2, 4)
    pins: Sequence[bool] = (False,)
    persistent: bool = False
    tried: list[Measured] = field(default_factory=list)
    reason: str = ""
    _best: Measured | None = None

    def run(self, fetch: float, step: float) -> LoaderSettings:
        """Return the best setting.

        Args:
            fetch: Seconds to fetch and collate a batch without workers.
            step: Seconds of a training step, 0 if unknown.
        """
        self.reason = "no other setting was better"
        total = fetch + step
        alone = Measured(LoaderSettings(pin=self.pins[0]), total, fetch / total if total else 0.0)
        if not self.min_workers:
            self.tried.append(alone)
            if fetch < FLOOR:
                self.reason = "a batch takes less than a worker takes to hand it over"
                return alone.settings
            if alone.wait <= ENOUGH:
                self.reason = "the loader is no bottleneck"
                return alone.settings
        if self.max_workers >= 1:
            self._workers(math.ceil(1.1 * fetch / step) if step else self.max_workers)
            self._prefetch()
            self._pins()
        enough = math.inf if self.min_workers else (1 - WORTH) * alone.seconds
        if self._best is not None and self._best.seconds > enough:
            self._try(self._best.settings)  # the machine may have been slow for that half second
        if self._best is not None and self._best.seconds <= enough:
            return self._best.settings
        if self.min_workers:
            return LoaderSettings(self.min_workers, self.prefetch[0], self.pins[0], self.persistent)
        if self._best is not None:
            self.reason = "workers gained too little"
        return alone.settings

    def _workers(self, guess: int) -> None:
        """From the number that should do upwards while it helps, then down while it is no loss."""
        start = workers = max(1, self.min_workers, min(self.max_workers, guess))
        best = self._try_workers(workers)
        while best and workers < self.max_workers and not self._is_enough():
            workers = min(self.max_workers, 2 * workers)
            more = self._try_workers(workers)
            if more is None or more.seconds > (1 - BETTER) * best.seconds:
                break
            best = more
        if best is None or best.settings.workers > start:
            return
        workers, fastest = best.settings.workers, best.seconds
        while workers > max(1, self.min_workers):
            workers = max(workers // 2, self.min_workers, 1)
            fewer = self._try_workers(workers)
            if fewer is None or fewer.seconds > (1 + BETTER) * fastest:
                break
            self._best = fewer  # as good, with fewer processes

    def _try_workers(self, workers: int) -> Measured | None:
        return self._try(LoaderSettings(workers, self.prefetch[0], self.pins[0], self.persistent))

    def _prefetch(self) -> None:
        for prefetch in self.prefetch[1:]:
            if self._best is None or self._is_enough():
                return
            self._try(replace(self._best.settings, prefetch=prefetch))

    def _pins(self) -> None:
        for pin in self.pins[1:]:
            if self._best is not None:
                self._try(replace(self._best.settings, pin=pin))

    def _try(self, settings: LoaderSettings) -> Measured | None:
        measured = self.measure(settings)
        if measured is None:
            self.reason = "the time was up"
            return None
        self.tried.append(measured)
        if self._best is None or measured.seconds < (1 - BETTER) * self._best.seconds:
            self._best = measured
        return measured

    def _is_enough(self) -> bool:
        if self._best is None or self._best.wait > ENOUGH:
            return False
        self.reason = "the loader is no bottleneck"
        return True
