"""Measures how long batches take: without workers in a separate process, and with workers."""

from __future__ import annotations

import multiprocessing
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any

import torch
from torch.utils.data import DataLoader
from torch.utils.data._utils import signal_handling
from torch.utils.data._utils.fetch import _MapDatasetFetcher

from lightning_opt.data.encoding import decode, encode
from lightning_opt.data.pipeline.loaders import LoaderSettings, measuring_copy
from lightning_opt.data.randomness import find_randomness

MAX_FETCHED_BATCHES = 64
"""The largest number of batches that are fetched without workers."""

FETCH_SECONDS = 0.2
"""Seconds after which no more batches are fetched without workers."""

MIN_TIMED_BATCHES, MAX_TIMED_BATCHES = 4, 2000
"""Minimum and maximum batches of one measurement with workers."""


class ProbeError(Exception):
    """Raised with the reason if a loader cannot be measured."""


def probe(
    loader: DataLoader[Any], indices: Iterator[Any], timeout: float
) -> tuple[float, float, Any, str | None]:
    """Measure the time of a batch without workers, in a separate process.

    The main process never fetches an item, so its dataset keeps its state and has no open file when
    workers are forked.

    Args:
        loader: The loader.
        indices: The indices to fetch.
        timeout: Seconds to wait for the process.

    Returns:
        Seconds to fetch and collate a batch; the share of this time in which the CPU was busy,
        instead of waiting for example for a disk; the first batch; and the evidence that items are
        random, or None.

    Raises:
        ProbeError: If the process fails; the message has the reason.
    """
    context: Any = loader.multiprocessing_context or multiprocessing.get_context(
        torch.multiprocessing.get_start_method()
    )
    receiver, sender = context.Pipe(duplex=False)
    fetcher = _MapDatasetFetcher(
        loader.dataset, loader._auto_collation, loader.collate_fn, loader.drop_last
    )
    arguments = (sender, fetcher, list(islice(indices, MAX_FETCHED_BATCHES)))
    process = context.Process(target=_fetch, args=arguments, daemon=True)
    try:
        process.start()
    except Exception as error:
        raise ProbeError(
            "its dataset or collate function cannot be sent to a process that is started by "
            f"{context.get_start_method()!r}: {error}"
        ) from error
    sender.close()
    try:
        if not receiver.poll(timeout):
            raise ProbeError(f"a batch took longer than {timeout:g} s")
        answer: Any = decode(receiver.recv_bytes())
    except EOFError as error:
        raise ProbeError("a process that fetched a batch died") from error
    finally:
        process.kill()
        process.join()
        receiver.close()
    if isinstance(answer, str):
        raise ProbeError(f"a separate process could not fetch a batch: {answer}")
    return answer  # type: ignore[no-any-return]


def _fetch(pipe: Any, fetcher: Any, indices: list[Any]) -> None:
    """Send the result of :func:`probe`, or an error as text."""
    torch.set_num_threads(1)  # as in a worker: threads of OpenMP do not survive a fork
    try:
        used, begin = time.process_time(), time.perf_counter()
        first, count = fetcher.fetch(indices[0]), 0  # not timed, because it opens files
        opened = now = time.perf_counter()
        for index in indices[1:]:
            fetcher.fetch(index)
            now, count = time.perf_counter(), count + 1
            if now > begin + FETCH_SECONDS:
                break
        busy = (time.process_time() - used) / (now - begin)
        index = indices[0][0] if fetcher.auto_collation else indices[0]
        evidence = find_randomness(fetcher.dataset, [index])
        # The mean also covers items that are rarely slow.
        answer = encode(((now - opened) / count, busy, first, evidence))
    except Exception as error:  # noqa: BLE001 - the user's dataset may raise anything
        answer = encode(f"{type(error).__name__}: {error}")
    pipe.send_bytes(answer)


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
        limit: Seconds after which the trial fails, and the longest wait for one batch.

    Raises:
        RuntimeError: If the trial exceeds ``limit``, or if a worker raises. A worker that is forked
            from a process with threads can hang, so waiting needs a limit.
    """
    copy = measuring_copy(loader, settings, indices)
    copy.timeout = min(loader.timeout or limit, limit)
    waited, batches, min_batches = 0.0, 0, max(MIN_TIMED_BATCHES, 2 * settings.workers)
    trial_start = time.perf_counter()

    def check_limit() -> None:
        if time.perf_counter() - trial_start > limit:
            raise RuntimeError(f"the trial took longer than {limit:g} s")

    iterator = DataLoader.__iter__(copy)
    try:
        for _ in range(settings.workers):  # the first batch of each worker includes its start
            step(next(iterator))
            check_limit()
        begin = end = time.perf_counter()
        while batches < min_batches or (end - begin < seconds and batches < MAX_TIMED_BATCHES):
            start = end
            batch = next(iterator)
            waited += time.perf_counter() - start
            step(batch)
            end = time.perf_counter()
            batches += 1
            check_limit()
    finally:
        del iterator  # ends its workers
    return (end - begin) / batches, waited / (end - begin)


@contextmanager
def signal_handler_restored() -> Iterator[None]:
    """Restore the handler of SIGCHLD, which torch replaces to watch workers."""
    replaces_it = threading.current_thread() is threading.main_thread() and sys.platform != "win32"
    before = signal.getsignal(signal.SIGCHLD) if replaces_it else None
    try:
        yield
    finally:
        if replaces_it and signal.getsignal(signal.SIGCHLD) is not before:
            signal.signal(signal.SIGCHLD, before)
            signal_handling._SIGCHLD_handler_set = False
