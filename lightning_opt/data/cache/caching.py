"""The base class of cached datasets and functions, with store, folder and counters."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
import weakref
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args

import torch
from torch.utils.data import get_worker_info

from lightning_opt.core.arguments import check_at_least, check_one_of
from lightning_opt.core.output.report import Report
from lightning_opt.data.encoding import MISSING, Policy, decode, digest

if TYPE_CHECKING:
    from lightning_opt.data.cache.store import Store

try:
    import fcntl
except ImportError:  # pragma: no cover - on Windows leftovers of killed processes stay
    fcntl = None  # type: ignore[assignment]

Storage: TypeAlias = Literal["memory", "disk"]

MEMORY_PREFIX = "lightning_opt_cache_"
"""Prefix of the names of folders in memory."""

COUNTERS = ("hits", "misses", "evictions")

COUNTER_ROWS = 129
"""A row for the main process, and one for each of 128 workers; further workers share rows."""


class Caching:
    """A store with shared counters and a report."""

    _store: Store

    def _open(
        self,
        max_bytes: int,
        policy: Policy,
        storage: Storage,
        key: str | None,
        folder: str | None,
        name: str,
    ) -> None:
        """Check the arguments and open the store.

        Args:
            max_bytes: See :class:`~lightning_opt.CachedDataset`.
            policy: The same.
            storage: The same.
            key: The same.
            folder: The same.
            name: Name of the dataset's class or of the function. On disk, items are found only
                under the same key and name.
        """
        from lightning_opt.data.cache.store import Store  # needs lmdb

        check_at_least("max_bytes", max_bytes, 1)
        check_one_of("policy", policy, get_args(Policy))
        check_one_of("storage", storage, get_args(Storage))
        if storage == "disk":
            if not key:
                raise ValueError(
                    'storage="disk" needs key=, a name for the version of the items such as '
                    '"scans 224px v1". Later runs find items by it, so change it whenever the '
                    "items change."
                )
            default = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
            parent = Path(folder or default / "lightning_opt")
            # A readable name shows users which folders they can delete.
            readable = re.sub(r"[^\w.-]+", "_", f"{name}-{key}")[:80]
            directory = parent / f"{readable}-{digest(name, key).hex()[:16]}"
            check_private(parent)
            check_private(directory)
        elif key is not None or folder is not None:
            raise ValueError('key= and folder= need storage="disk", got storage="memory".')
        else:
            directory = memory_folder(max_bytes, self)
        self._store = Store(directory, max_bytes, policy)
        self._storage = storage
        # One row per process, so that no lock is needed. A DataLoader's workers, forked or spawned,
        # share this memory. Other pickled copies count separately.
        self._counts = torch.zeros(COUNTER_ROWS, len(COUNTERS), dtype=torch.int64).share_memory_()

    def _count(self, counter: str, number: int) -> None:
        worker = get_worker_info()
        row = 0 if worker is None else 1 + worker.id % (COUNTER_ROWS - 1)
        self._counts.numpy()[row, COUNTERS.index(counter)] += number

    def _look_up(self, name: str) -> Any:
        """Return the stored item, or ``MISSING``."""
        item = self._store.get(name, decode)
        self._count("misses" if item is MISSING else "hits", 1)
        return item

    def _put(self, encoded: dict[str, bytes]) -> None:
        self._count("evictions", self._store.put(encoded))

    def statistics(self) -> dict[str, int]:
        """Return ``hits``, ``misses``, ``evictions``, ``bytes`` and ``items``.

        Counts include this process and the workers of its loaders.
        """
        counts = dict(zip(COUNTERS, self._counts.sum(0).tolist(), strict=True))
        return {**counts, **self._store.statistics()}

    def report(self) -> Report:
        """Return the statistics as a table."""
        counts = self.statistics()
        lookups = counts["hits"] + counts["misses"]
        row = {**counts, "hit rate": counts["hits"] / lookups if lookups else None}
        return Report(f"{self!r}", [row])

    def clear(self) -> None:
        """Delete all cached items."""
        self._store.clear()


def check_private(folder: Path) -> None:
    """Create ``folder`` if needed, and raise if other users could write items to it.

    Items are pickles, so a user who writes them can run code in the process that reads them. Root
    may use other users' folders, because containers usually run as root and mount them.

    Raises:
        ValueError: If the folder belongs to another user, or if everybody may write to it.
    """
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    if not folder.is_dir() or not hasattr(os, "getuid"):
        return
    status, user = folder.stat(), os.getuid()
    if user not in (status.st_uid, 0):
        raise ValueError(
            f"The cache folder {folder} belongs to another user (uid {status.st_uid}), who could "
            "run code in this process through cached items. Use a folder of your own."
        )
    if status.st_mode & 0o002:
        raise ValueError(
            f"Every user can write to the cache folder {folder}, and so could run code in this "
            f"process through cached items. Use a folder of your own, or run: chmod o-w {folder}"
        )


def memory_folder(max_bytes: int, owner: object) -> Path:
    """Create a private folder in memory that is removed together with ``owner``."""
    root = Path("/dev/shm")
    if not os.access(root, os.W_OK):
        root = Path(tempfile.gettempdir())  # the system caches its files in memory if it can
    _remove_leftovers(root)
    free = shutil.disk_usage(root).free
    if max_bytes > free:
        raise ValueError(
            f"max_bytes={max_bytes} is more than the {free} bytes that are free in {root}. Lower "
            'it, give the container more (docker run --shm-size=...), or use storage="disk".'
        )
    # A new folder with an unpredictable name, which only this user can open.
    folder = Path(tempfile.mkdtemp(prefix=MEMORY_PREFIX, dir=root))
    lock = (folder / "new lock").open("wb")
    _lock(lock)
    # Other processes look for `lock`, so the file gets this name only after it is locked.
    (folder / "new lock").rename(folder / "lock")
    weakref.finalize(owner, _remove, folder, os.getpid(), lock)
    return folder


def _lock(file: Any) -> bool:
    if fcntl is not None:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
    return True


def _remove(folder: Path, pid: int, lock: Any) -> None:
    if pid == os.getpid():  # a forked worker must not remove the folder
        from lightning_opt.data.cache.store import close

        close(folder)
        shutil.rmtree(folder, ignore_errors=True)
        lock.close()


def _remove_leftovers(root: Path) -> None:
    """Remove the folders of this user's killed processes, whose locks are free."""
    if fcntl is None:
        return
    for folder in root.glob(f"{MEMORY_PREFIX}*"):
        with suppress(OSError):  # another process creates or removes it
            if folder.lstat().st_uid == os.getuid():
                with (folder / "lock").open("rb") as lock:
                    if _lock(lock):
                        shutil.rmtree(folder, ignore_errors=True)
