"""How long batches take: without workers, measured in a process apart, and with them."""

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

BATCHES = 64
"""The most batches that are fetched without workers."""

FETCHING = 0.2
"""Seconds after which it is enough of them."""

FEW, MOST = 4, 2000
"""The fewest and the most batches of one measurement."""


class ProbeError(Exception):
    """A loader that cannot be measured, with the reason."""


def probe(
    loader: DataLoader[Any], indices: Iterator[Any], timeout: float
) -> tuple[float, float, Any, str | None]:
    """Find out, in a process of its own, what a batch takes without workers.

    The main process never touches the dataset, so that what it opens, counts or draws there stays
    as it was, and nothing is open when workers are forked.

    Args:
        loader: The loader.
        indices: What its sampler would yield.
        timeout: Seconds to wait for it.

    Returns:
        Seconds of fetching and collating a batch; the share of them in which a CPU worked, where
        the rest waits, as for a disk; the first batch; and how the items show that they are random,
        or None.

    Raises:
        ProbeError: If it fails; with the error.
    """
    context: Any = loader.multiprocessing_context or multiprocessing.get_context(
        torch.multiprocessing.get_start_method()
    )
    ours, theirs = context.Pipe(duplex=False)
    fetcher = _MapDatasetFetcher(
        loader.dataset, loader._auto_collation, loader.collate_fn, loader.drop_last
    )
    arguments = (theirs, fetcher, list(islice(indices, BATCHES)))
    process = context.Process(target=_fetch, args=arguments, daemon=True)
    try:
        process.start()
    except Exception as error:
        raise ProbeError(
            "its dataset or collate function cannot go to a process that is started by "
            f"{context.get_start_method()!r}: {error}"
        ) from error
    theirs.close()
    try:
        if not ours.poll(timeout):
            raise ProbeError(f"a batch was not there after {timeout:g} s")
        answer: Any = decode(ours.recv_bytes())
    except EOFError as error:
        raise ProbeError("a process that fetched a batch died") from error
    finally:
        process.kill()
        process.join()
        ours.close()
    if isinstance(answer, str):
        raise ProbeError(f"a process apart could not fetch a batch: {answer}")
    return answer  # type: ignore[no-any-return]


def _fetch(pipe: Any, fetcher: Any, indices: list[Any]) -> None:
    """Answer with what :func:`probe` returns, or with an error as text."""
    torch.set_num_threads(1)  # as a worker: threads of OpenMP do not survive a fork
    try:
        used, begin = time.process_time(), time.perf_counter()
        first, count = fetcher.fetch(indices[0]), 0  # it opens files, so it is not counted
        opened = now = time.perf_counter()
        for index in indices[1:]:
            fetcher.fetch(index)
            now, count = time.perf_counter(), count + 1
            if now > begin + FETCHING:
                break
        busy = (time.process_time() - used) / (now - begin)
        index = indices[0][0] if fetcher.auto_collation else indices[0]
        sign = find_randomness(fetcher.dataset, [index])
        # Of all of them together: items that are seldom slow count too.
        answer = encode(((now - opened) / count, busy, first, sign))
    except Exception as error:  # noqa: BLE001 - whatever the user's dataset raises
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
        seconds: About how long to measure.
        limit: Seconds after which the trial fails, and the longest wait for one batch.

    Raises:
        RuntimeError: If the trial exceeds ``limit``, or whatever a worker raises. A worker that is
            forked from a process with threads can hang, so waiting needs a limit.
    """
    copy = measuring_copy(loader, settings, indices)
    copy.timeout = min(loader.timeout or limit, limit)
    waited, batches, fewest = 0.0, 0, max(FEW, 2 * settings.workers)
    start_of_trial = time.perf_counter()

    def check_limit() -> None:
        if time.perf_counter() - start_of_trial > limit:
            raise RuntimeError(f"the trial took longer than {limit:g} s")

    iterator = DataLoader.__iter__(copy)
    try:
        for _ in range(settings.workers):  # the first batch of each worker includes its start
            step(next(iterator))
            check_limit()
        begin = end = time.perf_counter()
        while batches < fewest or (end - begin < seconds and batches < MOST):
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
def signals_put_back() -> Iterator[None]:
    """Put back the handler with which torch watches workers: there are none any more."""
    sets_it = threading.current_thread() is threading.main_thread() and sys.platform != "win32"
    before = signal.getsignal(signal.SIGCHLD) if sets_it else None
    try:
        yield
    finally:
        if sets_it and signal.getsignal(signal.SIGCHLD) is not before:
            signal.signal(signal.SIGCHLD, before)
            signal_handling._SIGCHLD_handler_set = False
