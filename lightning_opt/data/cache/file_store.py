"""A bounded store of bytes in a folder, which processes share and any of which may be killed."""

from __future__ import annotations

import contextlib
import hashlib
import os
import struct
import time
from collections.abc import Iterator
from pathlib import Path

from lightning_opt.data.cache.memory_store import Policy

try:
    import fcntl
except ImportError:  # pragma: no cover - Windows
    fcntl = None  # type: ignore[assignment]

MAGIC = b"lopt\x01"
HEADER = struct.Struct("<5sQ16s")
"""Magic with the version of the layout, length of the data, blake2b of the data."""

BLOCK = 4096
"""A file takes whole blocks of a disk."""

ITEM, PART = ".item", ".part"
ABANDONED = 3600.0
"""Seconds after which a part is rubbish, whoever may have begun it."""


class FileStore:
    """Bytes by name in files of one folder, together never more than ``max_bytes``.

    An item is written into a file of another name, flushed to the disk, and renamed: there is the
    whole of it or nothing. Each file carries length and checksum of its data, and one that does
    not fit them, after a power failure or a bad sector, is deleted and counts as missing.

    The bound holds over all processes that use the folder. Space is set aside under a lock before
    anything is written, so a process that is killed leaves at most space that is thought taken
    until the next count.

    Args:
        folder: Where; made if it is not there. Only trusted users may write there.
        max_bytes: The bound, in whole blocks of files.
        policy: As of :class:`MemoryStore`; recency is the files' time of modification.
        prefix: Beginning of the names of this user's items. Under ``"keep"`` the items of others
            are given up.
        durable: Flush to the disk.
    """

    def __init__(
        self,
        folder: Path,
        max_bytes: int,
        policy: Policy = "lru",
        prefix: str = "",
        durable: bool = True,
    ) -> None:
        if fcntl is None:  # pragma: no cover
            raise ValueError(
                'storage="disk" and storage="shared" need the file locks of a POSIX system. '
                'Use storage="memory".'
            )
        self.folder, self.max_bytes, self.policy = folder, max_bytes, policy
        self.prefix, self.durable = prefix, durable
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with self._lock():
            self._write_total(self._count())

    @property
    def used(self) -> int:
        """Bytes that are taken, by all users of the folder, those set aside included."""
        with self._lock():
            return self._read_total()

    def __len__(self) -> int:
        return sum(name.startswith(self.prefix) for name in self._names(ITEM))

    def get(self, name: str) -> bytes | None:
        """Return the whole and unharmed data stored under ``name``, or None."""
        path = self._path(name)
        try:
            content = path.read_bytes()
        except OSError:  # FileNotFoundError above all; a disk that fails is a miss as well
            return None
        data = _checked(content)
        if data is None:
            self._discard(path, len(content))
        elif self.policy == "lru":
            with contextlib.suppress(OSError):  # given up a moment ago
                os.utime(path)
        return data

    def put(self, name: str, data: bytes) -> int:
        """Store ``data`` if it may be; return how many others were given up for it."""
        path, size = self._path(name), _blocks(HEADER.size + len(data))
        part = self.folder / f"{path.stem}.{os.getpid()}{PART}"
        evicted = 0
        if size > self.max_bytes:
            return 0
        with self._lock():
            if path.exists() or part.exists():
                return 0
            total = self._read_total()
            if total + size > self.max_bytes:
                total, evicted = self._make_room(size)
                if total + size > self.max_bytes:
                    self._write_total(total)
                    return evicted
            # Its full length from the first moment: a count sees what was set aside.
            with part.open("wb") as file:
                file.truncate(HEADER.size + len(data))
            self._write_total(total + size)
        try:
            with part.open("r+b") as file:
                file.write(HEADER.pack(MAGIC, len(data), _checksum(data)))
                file.write(data)
                file.flush()
                if self.durable:
                    os.fsync(file.fileno())
            part.replace(path)
        except OSError:  # a full disk, or another host's count has cleared the part away
            self._discard(part, HEADER.size + len(data))
        return evicted

    def clear(self) -> None:
        """Delete this user's items."""
        with self._lock():
            for name in self._names(ITEM):
                if name.startswith(self.prefix):
                    (self.folder / name).unlink(missing_ok=True)
            self._write_total(self._count())

    def _path(self, name: str) -> Path:
        return self.folder / f"{self.prefix}{name}{ITEM}"

    def _names(self, suffix: str) -> list[str]:
        with os.scandir(self.folder) as entries:
            return [entry.name for entry in entries if entry.name.endswith(suffix)]

    @contextlib.contextmanager
    def _lock(self) -> Iterator[None]:
        # Opened anew each time: a lock belongs to the open file, which a fork would share.
        with (self.folder / "lock").open("ab") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def _read_total(self) -> int:
        try:
            return int((self.folder / "total").read_text())
        except (OSError, ValueError):  # killed while it was written
            return self._count()

    def _write_total(self, total: int) -> None:
        (self.folder / "total").write_text(str(total))

    def _count(self) -> int:
        """Return the bytes of all files, after clearing away the parts of dead writers."""
        total = 0
        for name in self._names(PART):
            path = self.folder / name
            with contextlib.suppress(OSError):  # renamed meanwhile, and counted below
                if _is_abandoned(path):
                    path.unlink()
                else:
                    total += _blocks(path.stat().st_size)
        for name in self._names(ITEM):
            with contextlib.suppress(OSError):
                total += _blocks((self.folder / name).stat().st_size)
        return total

    def _make_room(self, size: int) -> tuple[int, int]:
        """Give items up until ``size`` more fit; return the bytes left and the items given up.

        A twentieth more than needed, so that the folder is not read for each item anew.
        """
        total, evicted = self._count(), 0
        found = []
        for name in self._names(ITEM):
            if self.policy == "keep" and name.startswith(self.prefix):
                continue
            with contextlib.suppress(OSError):
                status = (self.folder / name).stat()
                found.append((status.st_mtime_ns, name, _blocks(status.st_size)))
        if total + size <= self.max_bytes:
            return total, 0
        for _, name, freed in sorted(found):
            (self.folder / name).unlink(missing_ok=True)
            total -= freed
            evicted += 1
            if total + size <= self.max_bytes - self.max_bytes // 20:
                break
        return total, evicted

    def _discard(self, path: Path, size: int) -> None:
        with self._lock(), contextlib.suppress(OSError):
            path.unlink()
            self._write_total(max(0, self._read_total() - _blocks(size)))


def _checked(content: bytes) -> bytes | None:
    if len(content) < HEADER.size:
        return None
    magic, length, checksum = HEADER.unpack_from(content)
    data = content[HEADER.size :]
    if magic != MAGIC or length != len(data) or checksum != _checksum(data):
        return None
    return data


def _checksum(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=16).digest()


def _blocks(size: int) -> int:
    return -(-size // BLOCK) * BLOCK


def _is_abandoned(part: Path) -> bool:
    pid = part.stem.rpartition(".")[2]
    if not pid.isdigit() or time.time() - part.stat().st_mtime > ABANDONED:
        return True
    return not is_alive(int(pid))


def is_alive(pid: int) -> bool:
    """Return whether there is a process of this number on this host."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True  # somebody else's
    return True
