"""What CachedDataset costs: hits beside other stores, misses by the number of items, and memory.

Supports: a hit takes about twice the time of reading the same array from bare LMDB. The time of a
miss in a full cache does not depend on the number of items. Four workers or two ranks that share a
cache take its memory only once.
"""

from __future__ import annotations

import multiprocessing
import pickle
import statistics
import time
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import diskcache
import lmdb
import psutil
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

import lightning_opt as lo
from benchmarks.harness import parse_arguments, publish

BYTES = 8192
"""Bytes of an item."""

FILE = "data.mdb"
"""Name of a cache's file."""


class Vectors(Dataset[Tensor]):
    """Items of equal size that are ready in memory."""

    def __init__(self, length: int, nbytes: int = BYTES) -> None:
        self.length, self.nbytes = length, nbytes

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Tensor:
        return torch.full((self.nbytes // 4,), float(index))


class Reads(Dataset[float]):
    """Its items are the µs of processor time to read an item from a store."""

    def __init__(self, length: int, opened: Callable[[], Callable[[int], Any]]) -> None:
        self.length, self.opened = length, opened
        self.read: Callable[[int], Any] | None = None

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> float:
        if self.read is None:
            self.read = self.opened()  # in each worker
            self.read(index)
        start = time.process_time()
        self.read(index)
        return 1e6 * (time.process_time() - start)


def stores(dataset: Vectors, folder: str) -> dict[str, Callable[[], Callable[[int], Any]]]:
    """Fill each store with the dataset, and return functions that open it for reading."""
    numbers = range(len(dataset))
    cache = lo.CachedDataset(dataset, 2**30, storage="disk", key="v1", folder=folder)
    encoded = [pickle.dumps(dataset[number].numpy(), protocol=5) for number in numbers]
    lmdb_folder, files = f"{folder}/lmdb", Path(folder)
    with (
        lmdb.open(lmdb_folder, map_size=2**30) as bare,
        bare.begin(write=True) as transaction,
        diskcache.Cache(f"{folder}/diskcache") as peer,
    ):
        for number in numbers:
            _ = cache[number]
            transaction.put(str(number).encode(), encoded[number])
            (files / f"{number}.pickle").write_bytes(encoded[number])
            peer[number] = dataset[number].numpy()

    def open_lmdb() -> Callable[[int], Any]:
        environment = lmdb.open(lmdb_folder, readonly=True, lock=False)

        def read(number: int) -> Any:
            with environment.begin(buffers=True) as transaction:
                return pickle.loads(transaction.get(str(number).encode()))

        return read

    return {
        "CachedDataset": lambda: cache.__getitem__,
        "LMDB": open_lmdb,
        "diskcache": lambda: diskcache.Cache(f"{folder}/diskcache").__getitem__,
        "files": lambda: lambda i: pickle.loads((files / f"{i}.pickle").read_bytes()),
    }


def time_hits(nbytes: int, length: int, workers: int) -> dict[str, Any]:
    """Return the median µs of processor time of a read from each store."""
    with TemporaryDirectory() as folder:
        context = {"multiprocessing_context": "fork", "persistent_workers": True}
        settings: dict[str, Any] = context if workers else {}
        loaders = {
            name: DataLoader(
                Reads(length, opened), batch_size=None, num_workers=workers, **settings
            )
            for name, opened in stores(Vectors(length, nbytes), folder).items()
        }
        times: dict[str, list[float]] = {name: [] for name in loaders}
        for _ in range(7):  # in turns
            for name, loader in loaders.items():
                times[name] += map(float, loader)
        row: dict[str, Any] = {"KB": nbytes / 1024, "workers": workers}
        row |= {f"µs {name}": statistics.median(own) for name, own in times.items()}
        return row


def time_items(items: int, policy: Any, folder: str) -> dict[str, Any]:
    """Fill a cache with ``items``, and return the µs of a hit and of a miss without room."""
    dataset = Vectors(2 * items + 200)
    cache = lo.CachedDataset(dataset, items * 2 * BYTES, policy, "disk", str(items), folder)
    for index in range(2 * items):
        cache[index]

    def median(indices: range) -> float:
        times = []
        for index in indices:
            start = time.perf_counter()
            cache[index]
            times.append(1e6 * (time.perf_counter() - start))
        return statistics.median(times)

    kept = range(items // 2) if policy == "keep" else range(2 * items - items // 2, 2 * items)
    hit, miss = median(kept), median(range(2 * items, 2 * items + 200))
    return {"policy": policy, "items": cache.statistics()["items"], "µs hit": hit, "µs miss": miss}


def memory_of(processes: Iterable[psutil.Process]) -> int:
    """Return the bytes of processes without their maps of the cache's file."""
    maps = (part for process in processes for part in process.memory_maps())
    return sum(part.pss for part in maps if not part.path.endswith(FILE))


def memory_of_files() -> int:
    """Return the bytes of caches in /dev/shm."""
    return sum(512 * file.stat().st_blocks for file in Path("/dev/shm").rglob(FILE))


def memory_of_all() -> int:
    """Return the bytes of this process, its children, and caches in /dev/shm."""
    process = psutil.Process()
    return memory_of((process, *process.children())) + memory_of_files()


def memory(megabytes: int, workers: int) -> float:
    """Return the MB of a full cache and the workers that read all of it."""
    before = memory_of_all()
    length = (megabytes << 20) // BYTES
    cache = lo.CachedDataset(Vectors(length), megabytes << 20)
    for index in range(length):
        cache[index]
    most = memory_of_all()
    for place, _ in enumerate(DataLoader(cache, batch_size=16, num_workers=workers)):
        if place % 50 == 40:
            most = max(most, memory_of_all())
    return (most - before) / 2**20


def rank(rank: int, megabytes: int, folder: str, ranks: int, barrier: Any, taken: Any) -> None:
    """Fill a cache in shared memory as one of several ranks, and report the memory it took."""
    own = (psutil.Process(),)
    before = memory_of(own)
    length = (megabytes << 20) // BYTES
    cache = lo.CachedDataset(
        Vectors(length), megabytes << 20, storage="disk", key="v1", folder=folder
    )
    barrier.wait()
    for part in range(ranks):
        for index in range((rank + part) % ranks, length, ranks):
            cache[index]
        barrier.wait()
    taken.put(memory_of(own) - before + memory_of_files() / ranks)
    barrier.wait()


def memory_of_ranks(megabytes: int, ranks: int) -> float:
    """Return the MB of several ranks that each read all of a dataset through one cache."""
    context = multiprocessing.get_context("spawn")
    barrier, taken = context.Barrier(ranks), context.Queue()
    with TemporaryDirectory(prefix="lightning_opt", dir="/dev/shm") as folder:
        arguments = (megabytes, folder, ranks, barrier, taken)
        processes = [context.Process(target=rank, args=(one, *arguments)) for one in range(ranks)]
        for process in processes:
            process.start()
        total = sum(taken.get(timeout=300) for _ in processes)
        for process in processes:
            process.join()
    return total / 2**20


def main() -> None:
    """Measure the time of items and the memory of caches."""
    arguments = parse_arguments(__doc__)
    warnings.filterwarnings("ignore")  # on more workers than CPUs
    numbers = (50, 500) if arguments.quick else (100, 1000, 5000)
    rows = []
    for policy in ("keep", "lru"):
        for number in numbers:
            with TemporaryDirectory() as folder:
                rows.append(time_items(number, policy, folder))
    small, large = (4, 16) if arguments.quick else (10, 100)
    taken = {
        workers: memory(large, workers) - memory(small, workers)
        for workers in ((0, 2) if arguments.quick else (0, 2, 4))
    }
    of_ranks = {
        ranks: memory_of_ranks(large, ranks) - memory_of_ranks(small, ranks) for ranks in (1, 2)
    }
    notes = [
        f"`items`: number of cached items on disk, of {BYTES} bytes each. `µs hit`: median time "
        "to get a cached item. `µs miss`: median time to get another item when the cache is full.",
        f"Memory of a full cache of {large} MB minus one of {small} MB, over all processes: "
        + ", ".join(f"{value:.0f} MB with {workers} workers" for workers, value in taken.items())
        + "".join(f", {value:.0f} MB with {n} rank{'s'[: n - 1]}" for n, value in of_ranks.items())
        + ".",
    ]
    hits = [
        time_hits(kilobytes << 10, length, workers)
        for kilobytes, length in ((8, 400), (602, 60), (4096, 16))
        for workers in (0, 4)
    ]
    publish(
        "cache_hits",
        lo.Report(
            "Reading a cached array, compared with other stores on disk",
            hits,
            [
                "Median CPU time, in µs, of one process to read an array into its own memory. "
                "`KB`: size of an array. `workers`: loader workers that read at the same time."
            ],
        ),
        arguments,
    )
    publish(
        "cache",
        lo.Report("Cost of CachedDataset", rows, notes),
        arguments,
        memory=taken,
        of_ranks=of_ranks,
    )


if __name__ == "__main__":
    main()
