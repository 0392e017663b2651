"""What a cached dataset and a cached function have in common."""

from __future__ import annotations

import os
import secrets
import shutil
import tempfile
import weakref
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

from lightning_opt.core.arguments import at_least, one_of
from lightning_opt.core.modules.patching import do_nothing
from lightning_opt.core.output.report import Report
from lightning_opt.data.cache.counters import Counters
from lightning_opt.data.cache.store import Policy, Store
from lightning_opt.data.encoding import digest

try:
    import fcntl
except ImportError:  # pragma: no cover - Windows: what a killed process leaves behind, stays
    fcntl = None  # type: ignore[assignment]

Storage: TypeAlias = Literal["memory", "disk"]

FILE = "cache.sqlite"
MARK = "lightning_opt_cache_"
RUN = "LIGHTNING_OPT_RUN"
"""The environment variable by which the ranks that a process starts know of its caches."""
LAUNCHERS = ("MASTER_ADDR", "MASTER_PORT", "SLURM_JOB_ID", "SLURM_STEP_ID")
"""Variables of which the ranks of a run have the same values."""


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
        shared: Callable[[], object] = do_nothing,
    ) -> None:
        """Check the arguments and open the store.

        ``version`` is asked for files that stay. ``shared`` is asked for memory: it returns what
        stands for the items, or ``None`` where ranks may not share them.
        """
        at_least("max_bytes", max_bytes, 1)
        one_of("policy", policy, get_args(Policy))
        one_of("storage", storage, get_args(Storage))
        if folder is not None and storage != "disk":
            raise ValueError(
                f'folder={folder!r} goes with storage="disk", got storage={storage!r}.'
            )
        if storage == "disk":
            default = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
            file = Path(folder or default / "lightning_opt") / FILE
            self._store = Store(file, max_bytes, policy, digest(version()).hex())
        else:
            self._store = Store(memory_folder(max_bytes, self, shared()) / FILE, max_bytes, policy)
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


def memory_folder(max_bytes: int, owner: object, shared: object) -> Path:
    """Return a folder in memory that is gone when ``owner`` is, or else when nobody holds it.

    Args:
        max_bytes: What it is to hold.
        owner: Whose it is.
        shared: What stands for the content. The ranks of a run on this machine that make the same
            in the same order get the same folder. ``None`` for a separate folder.

    Raises:
        ValueError: If there is no room for ``max_bytes``.
    """
    root = Path("/dev/shm")
    if not os.access(root, os.W_OK):
        root = Path(tempfile.gettempdir())  # which the system keeps in memory while it can
    _sweep(root)
    user = getattr(os, "getuid", int)()
    name = secrets.token_bytes(16) if shared is None else digest(_run(), user, max_bytes, shared)
    _MADE[name] += 1
    name = digest(name, _MADE[name])
    folder = root / f"{MARK}{name.hex()}"
    free = shutil.disk_usage(root).free
    if max_bytes > free and not folder.exists():
        raise ValueError(
            f"max_bytes={max_bytes} is more than the {free} bytes that are free in {root}. Lower "
            'it, give the container more (docker run --shm-size=...), or use storage="disk".'
        )
    lock = None
    while lock is None:  # it may be about to be removed by who was the last, or sweeps
        folder.mkdir(mode=0o700, exist_ok=True)
        with suppress(FileNotFoundError):
            lock = _hold(folder)
    weakref.finalize(owner, _remove, folder, os.getpid(), lock)
    return folder


_MADE: Counter[bytes] = Counter()
"""How many caches of the same content this process has made: each is one of its own."""


def _run() -> str:
    """Return what the ranks of a run have in common.

    Where no launcher says it, this process is the first: it tells those that it will start.
    """
    if RUN not in os.environ:
        said = [os.environ.get(name) for name in LAUNCHERS]
        os.environ[RUN] = " ".join(filter(None, said)) or secrets.token_hex(8)
    return os.environ[RUN]


def _hold(folder: Path, alone: bool = False) -> Any:
    """Return a locked file, which forked workers hold too, or None if that cannot be had.

    A lock says who is alive in other containers as well, where numbers of processes say nothing.
    """
    lock = (folder / "lock").open("ab")
    if not _locked(lock, alone) or not (folder / "lock").exists():
        lock.close()
        return None
    return lock


def _locked(lock: Any, alone: bool) -> bool:
    if fcntl is not None:
        try:
            fcntl.flock(lock, (fcntl.LOCK_EX if alone else fcntl.LOCK_SH) | fcntl.LOCK_NB)
        except OSError:
            return False
    return True


def _remove(folder: Path, pid: int, lock: Any) -> None:
    if pid == os.getpid():  # not at the end of a forked worker
        if _locked(lock, alone=True):  # the last rank that holds it
            shutil.rmtree(folder, ignore_errors=True)
        lock.close()


def _sweep(root: Path) -> None:
    """Remove what killed processes of this user have left behind."""
    for folder in root.glob(f"{MARK}*"):
        with suppress(OSError):  # somebody else's, or gone meanwhile
            if fcntl is not None and (lock := _hold(folder, alone=True)):
                shutil.rmtree(folder, ignore_errors=True)
                lock.close()
