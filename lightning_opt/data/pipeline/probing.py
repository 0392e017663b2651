"""How long batches take: without workers, measured in a process apart, and with them."""

from __future__ import annotations

import multiprocessing
import signal
import statistics
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any

import torch
from torch.utils.data import DataLoader
from torch.utils.data._utils import signal_handling
from torch.utils.data._utils.fetch import _MapDatasetFetcher

from lightning_opt.data.encoding import decode, encode
from lightning_opt.data.pipeline.loaders import LoaderSettings, apply, measuring_copy
from lightning_opt.data.randomness import find_randomness

BATCHES = 64
"""The most batches that are fetched without workers."""

FETCHING = 0.2
"""Seconds after which it is enough of them."""

FEW, MOST = 4, 2000
"""The fewest and the most batches of one measurement."""


class ProbeError(Exception):
    """A loader that cannot be measured, with the reason."""


class Probe:
    """What a batch takes without workers, found out in a process of its own.

    The main process never touches the dataset, so that what it opens, counts or draws there stays
    as it was, and nothing is open when workers are forked.

    Args:
        loader: The loader.
        indices: What its sampler would yield.
        timeout: Seconds to wait for it.

    Raises:
        ProbeError: If it fails; with the error.

    Attributes:
        seconds: Of fetching and collating a batch.
        busy: Share of them in which a CPU worked; the rest waits, as for a disk.
        batch: The first batch.
        random: How the items show that they are random, or None.
    """

    def __init__(self, loader: DataLoader[Any], indices: Iterator[Any], timeout: float) -> None:
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
            answer = ours.recv_bytes()
        except EOFError as error:
            raise ProbeError("a process that fetched a batch died") from error
        finally:
            process.kill()
            process.join()
            ours.close()
        failed, self.seconds, self.busy, self.batch, self.random = decode(answer)
        if failed is not None:
            raise ProbeError(f"a process apart could not fetch a batch: {failed}")


def _fetch(pipe: Any, fetcher: Any, indices: list[Any]) -> None:
    """Answer with what the attributes of a probe tell, or with an error."""
    torch.set_num_threads(1)  # as a worker: threads of OpenMP do not survive a fork
    try:
        times, first, used = [], None, time.process_time()
        begin = now = time.perf_counter()
        for number, index in enumerate(indices):
            start = time.perf_counter()
            batch = fetcher.fetch(index)
            now = time.perf_counter()
            times.append(now - start)
            if number == 0:
                first = batch
            if now > begin + FETCHING and number >= 1:
                break
        busy = (time.process_time() - used) / (now - begin)
        index = indices[0][0] if fetcher.auto_collation else indices[0]
        sign = find_randomness(fetcher.dataset, [index])
        # The first one opens files; with a mean, seldom slow items count.
        answer = encode((None, statistics.fmean(times[1:] or times), busy, first, sign))
    except Exception as error:  # noqa: BLE001 - whatever the user's dataset raises
        answer = encode((f"{type(error).__name__}: {error}", 0.0, 1.0, None, None))
    pipe.send_bytes(answer)


def time_loader(
    loader: DataLoader[Any],
    indices: Iterator[Any],
    settings: LoaderSettings,
    step: Callable[[Any], object],
    seconds: float,
) -> tuple[float, float]:
    """Return seconds a batch with its step, and the share of them that is spent waiting.

    Args:
        loader: The loader, which stays untouched.
        indices: What its sampler would yield.
        settings: With workers.
        step: Called with each batch.
        seconds: How long to measure, about.
    """
    twin = measuring_copy(loader, indices)
    apply(twin, LoaderSettings(settings.workers, settings.prefetch, settings.pin))
    waited, batches, fewest = 0.0, 0, max(FEW, 2 * settings.workers)
    with warnings.catch_warnings():
        # More workers than CPUs are tried where items wait, or the user has said so.
        warnings.filterwarnings("ignore", message="This DataLoader will create")
        iterator = DataLoader.__iter__(twin)
        try:
            for _ in range(settings.workers):  # the first batch of each comes with its start
                step(next(iterator))
            begin = end = time.perf_counter()
            while batches < fewest or (end - begin < seconds and batches < MOST):
                start = end
                batch = next(iterator)
                waited += time.perf_counter() - start
                step(batch)
                end = time.perf_counter()
                batches += 1
        finally:
            del iterator  # ends its workers
    return (end - begin) / batches, waited / (end - begin)


@contextmanager
def signals_put_back() -> Iterator[None]:
    """Put back the handler with which torch watches workers: there are none any more."""
    main = threading.current_thread() is threading.main_thread() and sys.platform != "win32"
    if not main:
        yield
        return
    before = signal.getsignal(signal.SIGCHLD)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGCHLD) is not before:
            signal.signal(signal.SIGCHLD, before)
            signal_handling._SIGCHLD_handler_set = False
