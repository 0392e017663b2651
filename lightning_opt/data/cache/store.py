"""A store of encoded items in an LMDB file of limited size, for processes that may be killed."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterable, Mapping
from mmap import PAGESIZE
from pathlib import Path
from typing import Any

import psutil

from lightning_opt.data.encoding import MISSING, Policy

try:
    import lmdb
except ModuleNotFoundError as error:
    raise ModuleNotFoundError("A cache needs lmdb: pip install 'lightning-opt[cache]'") from error

log = logging.getLogger(__name__)

NETWORK_FILE_SYSTEMS = ("9p", "afs", "beegfs", "ceph", "cifs", "gpfs", "lustre", "nfs", "smb")

MAX_READERS = 2048
"""Maximum number of processes that use one file at the same time."""

ITEM, USE, ORDER = b"0", b"1", b"2"
"""Key prefixes. ITEM + name: the item; USE + name: its use number; ORDER + use number: its name."""

TREE_PAGES = 3
"""Maximum number of pages by which LMDB's tree grows with one item."""

GROWTH_BYTES = 64 * PAGESIZE
"""Bytes added to the file when its free pages are too few to write even one eviction."""

MAX_EVICTIONS = 4
"""Eviction transactions per batch. LMDB reuses freed pages only two transactions later."""

_lock = threading.RLock()
_environments: dict[Path, lmdb.Environment] = {}
"""The open environments of this process. LMDB allows one per file. Forks must not inherit them."""


def _close_before_fork() -> None:
    _lock.acquire()
    while _environments:
        _environments.popitem()[1].close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=_close_before_fork, after_in_parent=_lock.release, after_in_child=_lock.release
    )


def close(folder: Path) -> None:
    """Close the file in ``folder``; a store opens it again when needed."""
    with _lock:
        if environment := _environments.pop(folder, None):
            environment.close()


class Store:
    """Stores encoded items by name in an LMDB file, in pages that take at most ``max_bytes``.

    LMDB locks the file between processes and never overwrites pages in use. So stored items stay
    complete even if a process or the machine stops at any time. The file may be larger than
    ``max_bytes`` by an eighth and 4 MB, for pages that are being replaced.

    Args:
        folder: A folder for the file, to which only trusted users can write.
        max_bytes: The limit.
        policy: ``"lru"`` evicts the least recently used items; ``"keep"`` evicts nothing, and
            stores nothing more once it is full.

    Raises:
        ValueError: If the file cannot be opened, or is on a network file system.
    """

    def __init__(self, folder: Path, max_bytes: int, policy: Policy = "lru") -> None:
        self.folder, self.max_bytes, self.policy = folder, max_bytes, policy
        self._recent_reads: dict[bytes, None] = {}
        self._warned = False
        check_local(folder)
        close(folder)  # the folder may have been deleted and created again
        try:
            with _lock:
                self._environment()
        except lmdb.Error as error:
            raise ValueError(
                f"The cache in {folder} cannot be opened: {error}. If it is damaged, delete this "
                "folder. If its file system has no locks or memory maps, use another one."
            ) from error

    def __reduce__(self) -> tuple[Any, ...]:
        return Store, (self.folder, self.max_bytes, self.policy)

    def _environment(self) -> lmdb.Environment:
        environment = _environments.get(self.folder)
        if environment is None:
            environment = _environments[self.folder] = lmdb.open(
                str(self.folder),
                map_size=self.max_bytes + self.max_bytes // 8 + (4 << 20),
                # A commit flushes its items; the next commit flushes its metadata. So a power
                # failure can undo the last commit, but it damages nothing.
                sync=True,
                metasync=False,
                mode=0o700,
                readahead=False,
                meminit=False,
                max_readers=MAX_READERS,
            )
        return environment

    def _begin(self, write: bool = False) -> lmdb.Transaction[memoryview]:
        environment = self._environment()
        while True:
            try:
                return environment.begin(write=write, buffers=True)
            except lmdb.MapResizedError:  # another process has grown the file
                environment.set_mapsize(0)

    def get(self, name: str, decode: Callable[[memoryview], Any]) -> Any:
        """Return the decoded item, or ``MISSING``.

        Args:
            name: The name of the item.
            decode: Called with a view of the file that is valid during the call.
        """
        key = name.encode()
        try:
            with _lock, self._begin() as transaction:
                data = transaction.get(ITEM + key)
                if data is None:
                    return MISSING
                item = decode(data)
        except lmdb.Error as error:
            self._warn(error)
            return MISSING
        if self.policy == "lru":  # the next write stores the order of these reads
            self._recent_reads.pop(key, None)
            self._recent_reads[key] = None
        return item

    def put(self, items: Mapping[str, bytes]) -> int:
        """Store encoded items if there is room, and return the number of evicted items.

        A batch is one transaction, so it waits for the disk once. A batch that is large compared
        with the cache is stored item by item: a transaction needs free pages of its own size.
        """
        groups: Iterable[Mapping[str, bytes]] = (items,)
        if sum(map(len, items.values())) > self.max_bytes // 16:
            groups = ({name: data} for name, data in items.items())
        try:
            with _lock:
                return sum(map(self._put_group, groups))
        except lmdb.Error as error:
            self._warn(error)
            return 0

    def _put_group(self, items: Mapping[str, bytes]) -> int:
        if self.policy == "keep":  # a full file needs no write lock, so check before waiting for it
            room = self.max_bytes - self.statistics()["bytes"]
            items = {name: data for name, data in items.items() if size_of(data) <= room}
        evicted = 0
        for _ in range(MAX_EVICTIONS if items else 0):
            try:
                return evicted + self._write(items)
            except lmdb.MapFullError:  # free pages are fragmented, or still in use
                more = self._make_room(sum(map(size_of, items.values())))
                if not more:
                    break
                evicted += more
        return evicted

    def _write(self, items: Mapping[str, bytes]) -> int:
        evicted = 0
        with self._begin(write=True) as transaction:
            self._write_uses(transaction)
            for name, data in items.items():
                key, size = name.encode(), size_of(data)
                if size > self.max_bytes or transaction.get(ITEM + key) is not None:
                    continue
                while used_bytes(transaction.stat()) + size > self.max_bytes:
                    if self.policy == "keep" or not remove_oldest(transaction):
                        break
                    evicted += 1
                else:
                    transaction.put(ITEM + key, data)
                    append_use(transaction, key)
        self._recent_reads = {}
        return evicted

    def _write_uses(self, transaction: lmdb.Transaction[memoryview]) -> None:
        """Store the order of the reads since the last write."""
        for key in self._recent_reads:
            if number := transaction.get(USE + key):
                transaction.delete(ORDER + bytes(number))
                append_use(transaction, key)

    def _make_room(self, size: int) -> int:
        """Evict at least ``size`` bytes if possible, and return the number of items evicted."""
        if self.policy == "keep":
            return 0
        environment, evicted = self._environment(), 0
        environment.reader_check()  # frees pages that killed processes were reading
        try:
            with self._begin(write=True) as transaction:
                self._write_uses(transaction)
                target = used_bytes(transaction.stat()) - size
                while used_bytes(transaction.stat()) > target and remove_oldest(transaction):
                    evicted += 1
        except lmdb.MapFullError:
            # With readers, freed pages are still in use: skip this batch. Without readers, the
            # remaining free pages can never hold an eviction: grow the file.
            if not any(line.split()[-1] != "-" for line in environment.readers().splitlines()[1:]):
                environment.set_mapsize(environment.info()["map_size"] + GROWTH_BYTES)
            return 0
        self._recent_reads = {}
        return evicted

    def statistics(self) -> dict[str, int]:
        """Return the bytes and the number of items."""
        try:
            with _lock, self._begin() as transaction:
                stat = transaction.stat()
        except lmdb.Error:
            return {"bytes": 0, "items": 0}
        items = stat["entries"] // 3
        return {"bytes": used_bytes(stat) if items else 0, "items": items}

    def clear(self) -> None:
        with _lock, self._begin(write=True) as transaction:
            transaction.drop(self._environment().open_db(txn=transaction), delete=False)

    def _warn(self, error: lmdb.Error) -> None:
        if not self._warned:
            self._warned = True
            log.warning("The cache in %s cannot be used: %s.", self.folder, error)


def check_local(folder: Path) -> None:
    """Raise if ``folder`` is on a network file system, where LMDB's locks and maps do not work."""
    mounts = [
        mount
        for mount in psutil.disk_partitions(all=True)
        if folder.resolve().is_relative_to(mount.mountpoint)
    ]
    kind = max(mounts, key=lambda mount: len(mount.mountpoint)).fstype if mounts else ""
    if kind.removeprefix("fuse.").startswith(NETWORK_FILE_SYSTEMS):
        raise ValueError(
            f"The cache folder {folder} is on a network file system ({kind}), where processes "
            "cannot share a memory-mapped file safely. Use a folder on a local disk."
        )


def size_of(data: bytes) -> int:
    """Return the maximum number of bytes that an item adds to the file."""
    return (-(-(len(data) + 32) // PAGESIZE) + TREE_PAGES) * PAGESIZE


def used_bytes(stat: Mapping[str, Any]) -> int:
    pages = stat["branch_pages"] + stat["leaf_pages"] + stat["overflow_pages"]
    return int(pages * stat["psize"])


def append_use(transaction: lmdb.Transaction[memoryview], key: bytes) -> None:
    """Make ``key`` the most recently used."""
    cursor = transaction.cursor()
    is_first = not cursor.set_range(ORDER)
    last = 0 if is_first or not cursor.last() else int.from_bytes(bytes(cursor.key())[1:], "big")
    number = (last + 1).to_bytes(8, "big")
    transaction.put(ORDER + number, key)
    transaction.put(USE + key, number)


def remove_oldest(transaction: lmdb.Transaction[memoryview]) -> bool:
    cursor = transaction.cursor()
    found = cursor.set_range(ORDER)
    if found:
        order, key = bytes(cursor.key()), bytes(cursor.value())
        for stored in (order, USE + key, ITEM + key):
            transaction.delete(stored)
    return found
