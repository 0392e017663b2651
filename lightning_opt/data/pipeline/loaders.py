"""Changes DataLoader settings in place, checks whether they may be changed, and times them."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset
from torch.utils.data._utils.fetch import _MapDatasetFetcher

from lightning_opt.core.modules.patching import do_nothing
from lightning_opt.core.modules.preserve import isolated_random
from lightning_opt.core.modules.state_kinds import GENERATORS
from lightning_opt.data.randomness import random_states

SAMPLER_BATCHES = 4
"""Batches of indices that are drawn to detect a sampler's random draws."""

COUNTER_TYPES = (bool, int, float, str, type(None))
"""Types of attributes in which a sampler may count its epochs."""

MAX_FETCHED_BATCHES = 64
"""The largest number of batches that are fetched without workers."""

FETCH_SECONDS = 0.2
"""Seconds after which no more batches are fetched without workers."""

MIN_TIMED_BATCHES, MAX_TIMED_BATCHES = 4, 2000
"""Minimum and maximum batches of one measurement with workers."""


@dataclass(frozen=True)
class LoaderSettings:
    """The settings that are tuned.

    Attributes:
        workers: ``num_workers``.
        prefetch: ``prefetch_factor``, or None without workers.
        pin: ``pin_memory``.
    """

    workers: int = 0
    prefetch: int | None = None
    pin: bool = False


def settings_of(loader: DataLoader[Any]) -> LoaderSettings:
    return LoaderSettings(loader.num_workers, loader.prefetch_factor, loader.pin_memory)


def attributes_for(loader: DataLoader[Any], settings: LoaderSettings) -> dict[str, Any]:
    """Return the values of the loader's attributes under ``settings``.

    A loader reads these attributes when it is iterated, so it need not be built again: dataset,
    sampler, generator, collate function and subclass stay the same.
    """
    return {
        "num_workers": settings.workers,
        "prefetch_factor": settings.prefetch if settings.workers else None,
        "pin_memory": settings.pin,
        # If users do not keep workers for all epochs, their dataset may change between epochs.
        "persistent_workers": loader.persistent_workers and settings.workers > 0,
        "timeout": loader.timeout if settings.workers else 0,  # torch allows it with workers only
        # Silences torch's warning about more workers than CPUs: the number was chosen by measuring.
        "check_worker_number_rationality": do_nothing,
    }


def reason_to_skip(loader: Any) -> str | None:
    """Return the reason why the settings of ``loader`` must not be changed, or None."""
    if not isinstance(loader, DataLoader):
        return f"{type(loader).__qualname__} is not a torch DataLoader"
    if isinstance(loader.dataset, IterableDataset):
        return (
            "its dataset is iterable: the samples of each worker and their order depend on the "
            "number of workers, and without sharding each worker reads everything"
        )
    if loader._iterator is not None:
        return "its workers are already running"
    return _reason_to_skip_sampler(loader)


def _reason_to_skip_sampler(loader: DataLoader[Any]) -> str | None:
    """Return the reason why workers could change the order of a sampler, or None.

    A loader with workers calls ``iter`` on its sampler twice, and draws indices ahead of time.
    """
    sampler = loader._index_sampler
    sampler_copy = copied_sampler(loader)
    with isolated_random(torch.device("cpu")):
        before = random_states(), _attributes(sampler_copy, COUNTER_TYPES)
        iterator = iter(sampler_copy)
        if (random_states(), _attributes(sampler_copy, COUNTER_TYPES)) != before:
            return (
                f"{type(sampler).__qualname__}.__iter__ draws or counts when it is called, and a "
                "loader with workers calls it twice at the start; make it a generator (`yield`)"
            )
        states = [random_states() for _ in zip(range(SAMPLER_BATCHES), iterator, strict=False)]
    if any(state != states[0] for state in states):
        return (
            f"{type(sampler).__qualname__} draws random numbers batch by batch from the global "
            "generators, and workers make it run ahead of the model's own draws; draw all of them "
            "at the start"
        )
    if not loader.num_workers and any(_attributes(sampler, GENERATORS)):
        return (
            "its sampler has its own generator. Workers run it to its end, where torch's "
            "RandomSampler draws once more, so later epochs would have another order. Set "
            "num_workers=1 to have the other settings tuned, or seed globally instead"
        )
    return None


def _attributes(sampler: Any, types: tuple[type, ...]) -> list[dict[str, Any]]:
    """Return the attributes of these types, of a sampler and of the sampler inside it."""
    return [
        {name: value for name, value in vars(part).items() if isinstance(value, types)}
        for part in (sampler, getattr(sampler, "sampler", None))
        if hasattr(part, "__dict__")
    ]


def copied_sampler(loader: DataLoader[Any]) -> Any:
    parts = (loader.sampler, loader.batch_sampler)
    kept = [loader.dataset, *(getattr(part, "data_source", None) for part in parts)]
    return copy.deepcopy(loader._index_sampler, {id(source): source for source in kept})


def endless_indices(loader: DataLoader[Any]) -> Iterator[Any]:
    """Yield indices from a copy of the loader's sampler, epoch after epoch.

    Raises:
        ValueError: If the sampler yields nothing.
    """
    sampler_copy = copied_sampler(loader)
    while True:
        index = None
        for index in sampler_copy:
            yield index
        if index is None:
            raise ValueError("its sampler yields nothing")


# --- times ----------------------------------------------------------------------------------------


def probe(
    loader: DataLoader[Any], indices: Iterator[Any], timeout: float
) -> tuple[float, float, Any]:
    """Measure the time of a batch without workers, in a separate process.

    The main process must not fetch items: its dataset might change its state, and might have open
    files when workers are forked.

    Args:
        loader: The loader.
        indices: The indices to fetch.
        timeout: Seconds to wait for the process.

    Returns:
        Seconds to fetch and collate a batch; the share of this time in which the CPU was busy and
        did not wait, for example for a disk; the first batch.

    Raises:
        Exception: If the dataset raises, or the process does not start or does not answer.
    """
    fetcher = _MapDatasetFetcher(
        loader.dataset, loader._auto_collation, loader.collate_fn, loader.drop_last
    )
    process: DataLoader[Any] = DataLoader(
        _TimedFetches(fetcher, list(islice(indices, MAX_FETCHED_BATCHES))),
        batch_size=None,
        collate_fn=tuple,  # has no effect on the item, which is a tuple
        num_workers=1,
        timeout=timeout,
        multiprocessing_context=loader.multiprocessing_context,
        generator=torch.Generator(),
    )
    return next(iter(process))  # type: ignore[no-any-return]


class _TimedFetches(Dataset[tuple[float, float, Any]]):
    """A dataset whose only item is the result of :func:`probe`. The worker measures it."""

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
        return (now - opened) / count, busy, first  # a mean, to include rare slow items


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
    measured = copy.copy(loader)
    sampler = "batch_sampler" if loader._auto_collation else "sampler"
    attributes = attributes_for(loader, settings) | {"persistent_workers": False}
    vars(measured).update({**attributes, sampler: indices, "_iterator": None})
    measured.generator = torch.Generator().manual_seed(0)
    measured.timeout = min(loader.timeout or limit, limit)
    waited, batches, min_batches = 0.0, 0, max(MIN_TIMED_BATCHES, 2 * settings.workers)
    iterator = DataLoader.__iter__(measured)
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
