"""Searches for the fastest loader settings with few measurements."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from lightning_opt.data.pipeline.loaders import LoaderSettings

TRIVIAL_SECONDS = 2e-4
"""Workers are not tried for faster batches: receiving a batch from a worker takes as long."""

MAX_WAIT = 0.03
"""Maximum share of time spent waiting at which the loader is not the bottleneck."""

MIN_GAIN = 0.03
"""Minimum gain of a better setting; less is noise."""

MIN_WORKER_GAIN = 0.05
"""Minimum gain of workers over no workers."""


PREFETCH, LARGE_PREFETCH = 2, 4
"""torch's default ``prefetch_factor``, and a larger one to try if the loader is the bottleneck."""


@dataclass(frozen=True)
class Measured:
    """The times of one setting.

    Attributes:
        settings: The setting.
        seconds: Seconds per batch with its training step.
        wait: Share of these seconds that is spent waiting for data.
    """

    settings: LoaderSettings
    seconds: float
    wait: float


@dataclass
class Search:
    """Finds the fastest setting with few measurements.

    Args:
        measure: Measures one setting, or returns None when the time is up.
        max_workers: The largest number of workers.
        min_workers: The smallest number of workers.
        pin: ``pin_memory`` of every setting.

    Attributes:
        tried: All measurements, in order.
        reason: The reason why the search ended.
    """

    measure: Callable[[LoaderSettings], Measured | None]
    max_workers: int
    min_workers: int = 0
    pin: bool = False
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
        wait = fetch / total if total else 0.0
        without_workers = Measured(LoaderSettings(pin=self.pin), total, wait)
        if not self.min_workers:
            self.tried.append(without_workers)
            if fetch < TRIVIAL_SECONDS:
                self.reason = "receiving a batch from a worker takes longer than fetching it"
                return without_workers.settings
            if without_workers.wait <= MAX_WAIT:
                self.reason = "the loader is not the bottleneck"
                return without_workers.settings
        if self.max_workers >= 1:
            guess = math.ceil(1.1 * fetch / step) if step else self.max_workers
            self._try_numbers_of_workers(guess)
            if self._best is not None and not self._is_enough():
                self._try(replace(self._best.settings, prefetch=LARGE_PREFETCH))
        limit = math.inf if self.min_workers else (1 - MIN_WORKER_GAIN) * without_workers.seconds
        if self._best is not None and self._best.seconds > limit:
            self._try(self._best.settings)  # measure again: the machine may have been slow
        if self._best is not None and self._best.seconds <= limit:
            return self._best.settings
        if self.min_workers:
            return self._with_workers(self.min_workers)
        if self._best is not None:
            self.reason = "workers gained too little"
        return without_workers.settings

    def _try_numbers_of_workers(self, guess: int) -> None:
        """Try ``guess`` workers. Double them while that is faster, halve them while as fast."""
        start = workers = max(1, self.min_workers, min(self.max_workers, guess))
        best = self._try(self._with_workers(workers))
        while best and workers < self.max_workers and not self._is_enough():
            workers = min(self.max_workers, 2 * workers)
            more = self._try(self._with_workers(workers))
            if more is None or more.seconds > (1 - MIN_GAIN) * best.seconds:
                break
            best = more
        if best is None or best.settings.workers > start:
            return
        workers, fastest = best.settings.workers, best.seconds
        while workers > max(1, self.min_workers):
            workers = max(workers // 2, self.min_workers, 1)
            fewer = self._try(self._with_workers(workers))
            if fewer is None or fewer.seconds > (1 + MIN_GAIN) * fastest:
                break
            self._best = fewer  # as fast, with fewer processes

    def _with_workers(self, workers: int) -> LoaderSettings:
        return LoaderSettings(workers, PREFETCH, self.pin)

    def _try(self, settings: LoaderSettings) -> Measured | None:
        measured = self.measure(settings)
        if measured is None:
            self.reason = "the time was up"
            return None
        self.tried.append(measured)
        if self._best is None or measured.seconds < (1 - MIN_GAIN) * self._best.seconds:
            self._best = measured
        return measured

    def _is_enough(self) -> bool:
        if self._best is None or self._best.wait > MAX_WAIT:
            return False
        self.reason = "the loader is not the bottleneck"
        return True
