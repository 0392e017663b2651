"""Items of a dataset, or results of a function, that are computed once and kept within a bound."""

from __future__ import annotations

import functools
import operator
import os
import shutil
import tempfile
import threading
import weakref
from collections.abc import Callable, Hashable, Sequence
from pathlib import Path
from typing import Any, Literal, TypeAlias

from torch.utils.data import Dataset, IterableDataset, get_worker_info

from lightning_opt.core.arguments import at_least
from lightning_opt.core.report import Report
from lightning_opt.data.cache.counters import Counters
from lightning_opt.data.cache.file_store import FileStore, is_alive
from lightning_opt.data.cache.fingerprint import fingerprint
from lightning_opt.data.cache.memory_store import MemoryStore, Policy
from lightning_opt.data.encoding import decode, digest, encode
from lightning_opt.data.randomness import attributes_put_back, find_randomness

Storage: TypeAlias = Literal["memory", "shared", "disk"]

SHM = Path("/dev/shm")
MARK = "lightning_opt_cache_"


class _Cache:
    """What datasets and functions share: a store that is right in every process.

    Args:
        store: Files that all processes share, or None for memory of each process.
        max_bytes: The bound.
        policy: Of the store.
    """

    def __init__(self, store: FileStore | None, max_bytes: int, policy: Policy) -> None:
        self._files, self._max_bytes, self._policy = store, max_bytes, policy
        self._counters = Counters()
        self._begin(MemoryStore(max_bytes, policy))

    def _begin(self, memory: MemoryStore, inherited: MemoryStore | None = None) -> None:
        self._memory, self._inherited = memory, inherited
        self._pid, self._lock = os.getpid(), threading.Lock()

    def __getstate__(self) -> dict[str, Any]:
        state = vars(self).copy()
        # What is held stays held where it is, and comes off the budget of whoever unpickles this.
        state["_held"] = self._memory.used
        for name in ("_memory", "_inherited", "_lock", "_pid"):
            del state[name]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        held = state.pop("_held")
        vars(self).update(state)
        self._begin(self._share(held))

    def _share(self, held: int) -> MemoryStore:
        """Return a store with this process's part of the budget."""
        worker = get_worker_info()
        self._counters.use_row(None if worker is None else worker.id)
        if worker is None:
            return MemoryStore(self._max_bytes, self._policy)
        return MemoryStore(max(0, self._max_bytes - held) // worker.num_workers, self._policy)

    def _store(self) -> None:
        """Notice that this process was forked: what was cached before is shared with the parent."""
        if self._pid != os.getpid():
            self._begin(self._share(self._memory.used), self._memory)

    def get(self, key: Hashable) -> bytes | None:
        """Return what is stored, and count it as a hit or a miss."""
        self._store()
        if self._files is not None:
            data = self._files.get(_name(key))
        else:
            with self._lock:
                data = self._memory.get(key)
                if data is None and self._inherited is not None:
                    data = self._inherited.get(key)
        if data is None:
            self._counters.add(misses=1)
        else:
            self._counters.add(hits=1)
        return data

    def put(self, key: Hashable, data: bytes) -> None:
        """Store it, if there is room or room can be made."""
        if self._files is not None:
            self._counters.add(evictions=self._files.put(_name(key), data))
            return
        with self._lock:
            self._counters.add(evictions=self._memory.put(key, data))
            self._counters.hold(self._memory.used, len(self._memory))

    def statistics(self) -> dict[str, int]:
        """Return counts of all processes."""
        total = self._counters.total()
        if self._files is not None:
            total["bytes"], total["items"] = self._files.used, len(self._files)
        return total

    def clear(self) -> None:
        """Forget everything that this process can forget."""
        self._store()
        if self._files is not None:
            self._files.clear()
        self._inherited = None
        self._memory.clear()
        self._counters.hold(0, 0)


class _WithStatistics:
    _cache: _Cache

    def statistics(self) -> dict[str, int]:
        """Return ``hits``, ``misses``, ``evictions``, ``bytes`` and ``items``.

        Counts are those of this process and of the workers of its loaders together.
        """
        return self._cache.statistics()

    def report(self) -> Report:
        """Return the statistics as a table."""
        counts = self.statistics()
        asked = counts["hits"] + counts["misses"]
        row = {**counts, "hit rate": counts["hits"] / asked if asked else None}
        return Report(f"{self!r}", [row])

    def clear(self) -> None:
        """Forget what is cached: in this process, or on the disk; running workers keep theirs."""
        self._cache.clear()


class CachedDataset(_WithStatistics, Dataset[Any]):
    """A map-style dataset whose items are computed once and then taken from a bounded cache.

    Items are kept as bytes and a new item is made of them at each fetch, so that whoever changes
    an item changes nothing in the cache, and what counts towards ``max_bytes`` is what is there.
    Tensors come back contiguous; everything else as pickle brings it back.

    Args:
        dataset: Has ``__getitem__``, and ``__len__`` if the sampler needs it. An item is a function
            of its index: put random augmentation behind the cache, not before it.
        max_bytes: The bound on everything that is cached, at least 1.
        policy: ``"lru"`` gives up the item that was used least recently. ``"keep"`` gives nothing
            up: once it is full it stays as it is, which is better for whole epochs that do not fit.
        storage: ``"memory"``: in each process; workers of a loader share the bound equally and
            have each their own items. ``"shared"``: in memory that all workers share, until this
            object is gone. ``"disk"``: in files, for later runs too.
        key: A name of the dataset's version that takes the place of its computed fingerprint.
            Cached items of another version are never served.
        folder: Where the files are, for ``"disk"``; default is ``lightning_opt`` in the user's
            cache folder. Datasets may share a folder, and then its bound.
        allow_random: Do not look whether items are random; the first draw is then kept.

    Raises:
        TypeError: For an iterable dataset; while fetching, for items that cannot be pickled.
        ValueError: For arguments out of range, for random items, and where no fingerprint can be
            had.

    Example:
        >>> import torch
        >>> import lightning_opt as lo
        >>> squares = lo.CachedDataset([torch.tensor(i * i) for i in range(4)], max_bytes=2**20)
        >>> [squares[i].item() for i in (1, 2, 1)]
        [1, 4, 1]
        >>> squares.statistics()["hits"], squares.statistics()["misses"]
        (1, 2)

    References:
        J. Mohan et al. (2021), *Analyzing and Mitigating Data Stalls in DNN Training*: why a cache
        that never gives up an item (``"keep"``) suits epochs.
    """

    def __init__(
        self,
        dataset: Any,
        max_bytes: int,
        policy: Policy = "lru",
        storage: Storage = "memory",
        key: str | None = None,
        folder: str | None = None,
        allow_random: bool = False,
    ) -> None:
        if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__"):
            raise TypeError(
                "CachedDataset takes a map-style dataset, whose items have an index, got "
                f"{type(dataset).__qualname__}."
            )
        _check(max_bytes, policy, storage, folder)
        self.dataset = dataset
        probes = _probes(dataset)
        if not allow_random and (sign := find_randomness(dataset, probes)) is not None:
            raise ValueError(
                f"This {type(dataset).__qualname__} is random: {sign}. A cache would repeat the "
                "first draw for ever. Cache what comes before the augmentation and augment "
                "afterwards, or say allow_random=True."
            )
        version = key
        if storage == "disk" and key is None:
            with attributes_put_back(dataset):
                items = [] if allow_random else [digest(dataset[index]) for index in probes]
            version = fingerprint(dataset, items)
        prefix = digest(version).hex()[:16] + "-"
        store = _open(storage, max_bytes, policy, folder, prefix, self)
        self._storage = storage
        self._cache = _Cache(store, max_bytes, policy)

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: Any) -> Any:
        key = _key(index)
        data = self._cache.get(key)
        if data is not None:
            return decode(data)
        return self._keep(key, self.dataset[index])

    def __getitems__(self, indices: Sequence[Any]) -> list[Any]:
        """Return the items of a batch, the missing ones fetched at once if the dataset can."""
        keys = [_key(index) for index in indices]
        found = [self._cache.get(key) for key in keys]
        missing = [place for place, data in enumerate(found) if data is None]
        fetch = getattr(self.dataset, "__getitems__", None)
        if callable(fetch):
            fetched = fetch([indices[place] for place in missing]) if missing else []
        else:
            fetched = [self.dataset[indices[place]] for place in missing]
        items = [None if data is None else decode(data) for data in found]
        for place, item in zip(missing, fetched, strict=True):
            items[place] = self._keep(keys[place], item)
        return items

    def _keep(self, key: Hashable, item: Any) -> Any:
        data = encode(item)
        self._cache.put(key, data)
        return decode(data)  # as at every later fetch: contiguous, shared with nobody

    def __repr__(self) -> str:
        return f"CachedDataset({type(self.dataset).__qualname__}, storage={self._storage!r})"


class CachedFunction(_WithStatistics):
    """A function whose results are kept; :func:`cached` makes it."""

    def __init__(
        self,
        fn: Callable[..., Any],
        max_bytes: int,
        symmetric: bool = False,
        policy: Policy = "lru",
        storage: Storage = "memory",
        key: str | None = None,
        folder: str | None = None,
    ) -> None:
        if not callable(fn):
            raise TypeError(f"fn must be callable, got {fn!r}.")
        _check(max_bytes, policy, storage, folder)
        self._fn, self._symmetric = fn, symmetric
        version = fingerprint(fn) if storage == "disk" and key is None else key
        prefix = digest(version).hex()[:16] + "-"
        self._cache = _Cache(
            _open(storage, max_bytes, policy, folder, prefix, self), max_bytes, policy
        )
        functools.update_wrapper(self, fn, updated=())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the result for these arguments, which are compared by value."""
        if self._symmetric and len(args) != 2:
            raise TypeError(
                f"A symmetric function takes two positional arguments, got {len(args)}."
            )
        parts = [digest(arg) for arg in args]
        if self._symmetric:
            parts.sort()
        key = digest(parts, sorted((name, digest(value)) for name, value in kwargs.items()))
        data = self._cache.get(key)
        if data is None:
            data = encode(self._fn(*args, **kwargs))
            self._cache.put(key, data)
        return decode(data)

    def __repr__(self) -> str:
        return f"cached({getattr(self._fn, '__qualname__', self._fn)})"


def cached(
    fn: Callable[..., Any],
    max_bytes: int,
    symmetric: bool = False,
    policy: Policy = "lru",
    storage: Storage = "memory",
    key: str | None = None,
    folder: str | None = None,
) -> CachedFunction:
    """Return ``fn`` with a bounded cache of its results: distances of pairs, tokens of a text.

    Arguments are compared by value, of tensors and arrays too, and by type: ``f(1)`` and ``f(1.0)``
    are two results. Results are new objects at each call. An error is not cached.

    Args:
        fn: A function of its arguments and of nothing else. To send it to spawned workers, give the
            cached one another name than the function's.
        max_bytes: The bound on the results that are cached.
        symmetric: ``fn(a, b)`` equals ``fn(b, a)``: compute one of them.
        policy: As of :class:`CachedDataset`.
        storage: As of :class:`CachedDataset`.
        key: As of :class:`CachedDataset`; the fingerprint is that of the function's code.
        folder: As of :class:`CachedDataset`.

    Raises:
        TypeError: For what is not callable; in a call, for arguments or results that cannot be
            pickled, and for a symmetric function without exactly two positional arguments.
        ValueError: For arguments out of range.

    Example:
        >>> import lightning_opt as lo
        >>> def slow_distance(a, b):
        ...     return abs(a - b)
        >>> distance = lo.cached(slow_distance, max_bytes=2**20, symmetric=True)
        >>> distance(2, 5), distance(5, 2)
        (3, 3)
        >>> distance.statistics()["hits"]
        1
    """
    return CachedFunction(fn, max_bytes, symmetric, policy, storage, key, folder)


def _check(max_bytes: int, policy: str, storage: str, folder: str | None) -> None:
    at_least("max_bytes", max_bytes, 1)
    if policy not in ("lru", "keep"):
        raise ValueError(f'policy must be "lru" or "keep", got {policy!r}.')
    if storage not in ("memory", "shared", "disk"):
        raise ValueError(f'storage must be "memory", "shared" or "disk", got {storage!r}.')
    if folder is not None and storage != "disk":
        raise ValueError(f'folder={folder!r} goes with storage="disk", got storage={storage!r}.')


def _probes(dataset: Any) -> list[int]:
    try:
        length = len(dataset)
    except TypeError:
        return [0]
    return sorted({0, length // 2, length - 1}) if length else []


def _key(index: Any) -> Hashable:
    try:
        return operator.index(index)  # one key for 3, np.int64(3) and torch.tensor(3)
    except TypeError:
        return digest(index)


def _name(key: Hashable) -> str:
    return key.hex() if isinstance(key, bytes) else str(key)


def _open(
    storage: Storage,
    max_bytes: int,
    policy: Policy,
    folder: str | None,
    prefix: str,
    owner: object,
) -> FileStore | None:
    if storage == "memory":
        return None
    if storage == "disk":
        default = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        return FileStore(Path(folder or default / "lightning_opt"), max_bytes, policy, prefix)
    if not SHM.is_dir():
        raise ValueError(
            'storage="shared" keeps items in /dev/shm, which this system does not have. Use '
            'storage="disk", or "memory".'
        )
    _sweep()
    free = shutil.disk_usage(SHM).free
    if max_bytes > free:
        raise ValueError(
            f"max_bytes={max_bytes} is more than the {free} bytes that are free in /dev/shm. Lower "
            'it, give the container more (docker run --shm-size=...), or use storage="disk".'
        )
    private = Path(tempfile.mkdtemp(prefix=f"{MARK}{os.getpid()}_", dir=SHM))
    weakref.finalize(owner, _remove, private, os.getpid())
    return FileStore(private, max_bytes, policy, durable=False)


def _remove(folder: Path, pid: int) -> None:
    if pid == os.getpid():  # not at the end of a forked worker
        shutil.rmtree(folder, ignore_errors=True)


def _sweep() -> None:
    """Remove what killed processes of this user have left behind."""
    for folder in SHM.glob(f"{MARK}*"):
        pid = folder.name.removeprefix(MARK).partition("_")[0]
        if pid.isdigit() and not is_alive(int(pid)):
            shutil.rmtree(folder, ignore_errors=True)
