"""Measures in worker processes how long batches take, as if without workers and with workers."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset
from torch.utils.data._utils.fetch import _MapDatasetFetcher

from lightning_opt.data.pipeline.loaders import LoaderSettings, measuring_copy

MAX_FETCHED_BATCHES = 64
"""The largest number of batches that are fetched without workers."""

FETCH_SECONDS = 0.2
"""Seconds after which no more batches are fetched without workers."""

MIN_TIMED_BATCHES, MAX_TIMED_BATCHES = 4, 2000
"""Minimum and maximum batches of one measurement with workers."""


def probe(
    loader: DataLoader[Any], indices: Iterator[Any], timeout: float
) -> tuple[float, float, Any]:
    """Measure the time of a batch without workers, in a separate process.

    The main process never fetches an item, so its dataset keeps its state and has no open file when
    workers are forked.

    Args:
        loader: The loader.
        indices: The indices to fetch.
        timeout: Seconds to wait for the process.

    Returns:
        Seconds to fetch and collate a batch; the share of this time in which the CPU was busy,
        instead of waiting for example for a disk; the first batch.

    Raises:
        Exception: The error of the dataset, or that the process cannot start or does not answer.
    """
    fetcher = _MapDatasetFetcher(
        loader.dataset, loader._auto_collation, loader.collate_fn, loader.drop_last
    )
    process: DataLoader[Any] = DataLoader(
        _TimedFetches(fetcher, list(islice(indices, MAX_FETCHED_BATCHES))),
        batch_size=None,
        collate_fn=tuple,  # unchanged
        num_workers=1,
        timeout=timeout,
        multiprocessing_context=loader.multiprocessing_context,
        generator=torch.Generator(),
    )
    return next(iter(process))  # type: ignore[no-any-return]


class _TimedFetches(Dataset[tuple[float, float, Any]]):
    """Its only item is the result of :func:`probe`, measured by the process that fetches it."""

    def __init__(self, fetcher: Any, indices: list[Any]) -> None:
        self._fetcher, self._indices = fetcher, indices

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> tuple[float, float, Any]:
        used, begin = time.process_time(), time.perf_counter()
        first = self._fetcher.fetch(self._indices[0])  # not timed, because it opens files
        count, opened = 0, time.perf_counter()
        now = opened
        for indices in self._indices[1:]:
            self._fetcher.fetch(indices)
            now, count = time.perf_counter(), count + 1
            if now > begin + FETCH_SECONDS:
                break
        busy = (time.process_time() - used) / (now - begin)
        return (now - opened) / count, busy, first  # the mean covers items that are rarely slow


def time_loader(
    loader: DataLoader[Any],
    indices: Iterator[Any],
    settings: LoaderSettings,
    step: Callable[[Any], object],
    seconds: float,
    limit: float,
) -> tuple[float, float]:
    """Return the seconds per batch with its step, and the share of them spent waiting for data.

    Args:
        loader: The loader; it is not changed.
        indices: The indices to fetch.
        settings: The settings to measure, with at least one worker.
        step: Called with each batch.
        seconds: Approximate duration of the measurement.
        limit: The longest wait for one batch, in seconds.

    Raises:
        RuntimeError: If a batch takes longer than ``limit``, or if a worker raises. A worker that
            is forked from a process with threads can hang, so waiting needs a limit.
    """
    copy = measuring_copy(loader, settings, indices)
    copy.timeout = min(loader.timeout or limit, limit)
    waited, batches, min_batches = 0.0, 0, max(MIN_TIMED_BATCHES, 2 * settings.workers)
    iterator = DataLoader.__iter__(copy)
    try:
        for _ in range(settings.workers):  # the first batch of each worker includes its start
            step(next(iterator))
        begin = end = time.perf_counter()
        while batches < min_batches or (end - begin < seconds and batches < MAX_TIMED_BATCHES):
            start = end
            batch = next(iterator)
            waited += time.perf_counter() - start
            step(batch)
            end = time.perf_counter()
            batches += 1
    finally:
        del iterator  # ends its workers
    return (end - begin) / batches, waited / (end - begin)
