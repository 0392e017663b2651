"""What a cached dataset and a cached function have in common."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, TypeAlias

from lightning_opt.core.arguments import at_least
from lightning_opt.core.report import Report
from lightning_opt.data.cache.counters import Counters
from lightning_opt.data.cache.store import Policy, Store
from lightning_opt.data.encoding import digest

try:
    import fcntl
except ImportError:  # pragma: no cover - Windows: what a killed process leaves behind, stays
    fcntl = None  # type: ignore[assignment]

Storage: TypeAlias = Literal["memory", "disk"]

MARK = "lightning_opt_cache_"
YOUNG = 60.0
"""Seconds for which a folder is let be that nobody holds: it may be about to be."""


class Caching:
    """A store with its counts, and what is said of them."""

    _store: Store

    def _open(
        self,
        max_bytes: int,
        policy: Policy,
        storage: Storage,
        folder: str | None,
        version: Callable[[], str | None],
    ) -> None:
        """Check the arguments and open the store; ``version`` is asked for files that stay."""
        at_least("max_bytes", max_bytes, 1)
        if policy not in ("lru", "keep"):
            raise ValueError(f'policy must be "lru" or "keep", got {policy!r}.')
        if storage not in ("memory", "disk"):
            raise ValueError(f'storage must be "memory" or "disk", got {storage!r}.')
        if folder is not None and storage != "disk":
            raise ValueError(
                f'folder={folder!r} goes with storage="disk", got storage={storage!r}.'
            )
        if storage == "disk":
            default = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
            file = Path(folder or default / "lightning_opt") / "cache.sqlite"
            self._store = Store(file, max_bytes, policy, digest(version()).hex())
        else:
            self._store = Store(memory_folder(max_bytes, self) / "cache.sqlite", max_bytes, policy)
        self._storage = storage
        self._counters = Counters()

    def _look_up(self, key: str) -> bytes | None:
        data = self._store.get(key)
        self._counters.add(hits=int(data is not None), misses=int(data is None))
        return data

    def _keep(self, key: str, data: bytes) -> None:
        self._counters.add(evictions=self._store.put(key, data))

    def statistics(self) -> dict[str, int]:
        """Return ``hits``, ``misses``, ``evictions``, ``bytes`` and ``items``.

        Counts are those of this process and of the workers of its loaders together.
        """
        return {**self._counters.total(), **self._store.statistics()}

    def report(self) -> Report:
        """Return the statistics as a table."""
        counts = self.statistics()
        asked = counts["hits"] + counts["misses"]
        row = {**counts, "hit rate": counts["hits"] / asked if asked else None}
        return Report(f"{self!r}", [row])

    def clear(self) -> None:
        """Forget what is cached."""
        self._store.clear()


def memory_folder(max_bytes: int, owner: object) -> Path:
    """Return a folder in memory that is gone when ``owner`` is, or else when nobody holds it.

    Raises:
        ValueError: If there is no room for ``max_bytes``.
    """
    root = Path("/dev/shm")
    if not os.access(root, os.W_OK):
        root = Path(tempfile.gettempdir())  # which the system keeps in memory while it can
    _sweep(root)
    free = shutil.disk_usage(root).free
    if max_bytes > free:
        raise ValueError(
            f"max_bytes={max_bytes} is more than the {free} bytes that are free in {root}. Lower "
            'it, give the container more (docker run --shm-size=...), or use storage="disk".'
        )
    folder = Path(tempfile.mkdtemp(prefix=MARK, dir=root))
    lock = _hold(folder)
    weakref.finalize(owner, _remove, folder, os.getpid(), lock)
    return folder


def _hold(folder: Path) -> Any:
    """Return a locked file, which forked workers hold too, or None if another process holds it.

    A lock says who is alive in other containers as well, where numbers of processes say nothing.
    """
    lock = (folder / "lock").open("ab")
    if fcntl is not None:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            lock.close()
            return None
    return lock


def _remove(folder: Path, pid: int, lock: Any) -> None:
    if pid == os.getpid():  # not at the end of a forked worker
        shutil.rmtree(folder, ignore_errors=True)
        lock.close()


def _sweep(root: Path) -> None:
    """Remove what killed processes of this user have left behind."""
    for folder in root.glob(f"{MARK}*"):
        try:
            if fcntl is None or time.time() - folder.stat().st_mtime < YOUNG:
                continue
            lock = _hold(folder)
        except OSError:  # somebody else's, or gone meanwhile
            continue
        if lock is not None:
            shutil.rmtree(folder, ignore_errors=True)
            lock.close()
