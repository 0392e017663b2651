"""A store of bytes in an SQLite file of limited size, shared by processes that may be killed."""

from __future__ import annotations

import os
import sqlite3
import threading
import zlib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, TypeAlias, TypeVar

Policy: TypeAlias = Literal["lru", "keep"]
T = TypeVar("T")

PAGE_BYTES = 4096
MAX_ITEM_BYTES = 10**9 - PAGE_BYTES
"""Bytes that SQLite accepts as one value."""

BEGIN = "BEGIN IMMEDIATE"
"""Locks the file at once. The connection's context commits, or rolls back after an error."""

TABLES = """
    PRAGMA journal_mode = TRUNCATE;
    PRAGMA synchronous = OFF;
    BEGIN IMMEDIATE;
    CREATE TABLE IF NOT EXISTS items (
        id INTEGER PRIMARY KEY, version TEXT, name TEXT, used INTEGER, UNIQUE (version, name)
    );
    CREATE INDEX IF NOT EXISTS by_use ON items (used);
    CREATE TABLE IF NOT EXISTS contents (id INTEGER PRIMARY KEY, checksum INTEGER, data BLOB);
    COMMIT;
"""
EMPTY_PAGES = 5
"""Pages of an empty file."""

TOUCH = """
    UPDATE items SET used = (SELECT max(used) + 1 FROM items) WHERE version = ? AND name = ?
"""
ADD = """
    INSERT OR IGNORE INTO items (version, name, used)
    VALUES (?, ?, (SELECT ifnull(max(used), 0) + 1 FROM items))
"""
OLDEST = "SELECT id FROM items ORDER BY used LIMIT 1"
OTHERS = """
    SELECT id FROM items WHERE version < ?1 UNION ALL
    SELECT id FROM items WHERE version > ?1 LIMIT 1
"""


class Store:
    """Stores bytes by name in an SQLite file whose pages take at most ``max_bytes``.

    SQLite locks the file between processes, including processes in different containers. It stores
    an item completely or not at all, and limits the size. The cost to store or evict an item does
    not depend on the number of items. Each item has a checksum. An item with a wrong checksum, for
    example after a bad sector, is deleted and counts as a miss. The file is not flushed to the
    disk, so after a power failure it may be unreadable. It is then deleted and created again.

    An error of the file counts as a miss; an item that cannot be written is not stored.

    Args:
        file: The file, in a folder that exists and to which only trusted users can write.
        max_bytes: The limit.
        policy: ``"lru"`` evicts the least recently used item; ``"keep"`` evicts only items of other
            versions, and stores nothing more once it is full.
        version: Items of other versions are never found.
    """

    def __init__(
        self, file: Path, max_bytes: int, policy: Policy = "lru", version: str = ""
    ) -> None:
        self.file, self.max_bytes, self.policy, self.version = file, max_bytes, policy, version
        self._reset()

    def _reset(self) -> None:
        self._connection: sqlite3.Connection | None = None
        self._lock, self._pid = threading.Lock(), os.getpid()
        self._touched: dict[str, None] = {}
        # The smallest size for which a full cache has no room.
        self._min_rejected_size = MAX_ITEM_BYTES

    def __reduce__(self) -> tuple[Any, ...]:
        return Store, (self.file, self.max_bytes, self.policy, self.version)

    def _attempt(self, work: Callable[[sqlite3.Connection], T], default: T) -> T:
        """Return ``work(connection)``, or ``default`` if SQLite raises."""
        if self._pid != os.getpid():
            self._reset()  # a connection must not be used on both sides of a fork
        with self._lock:
            try:
                if self._connection is None:
                    self._connection = self._connect()
                return work(self._connection)
            except sqlite3.OperationalError:
                pass  # the file is locked for too long, does not fit on the disk, or is gone
            except sqlite3.DatabaseError as error:
                if type(error) is not sqlite3.DatabaseError:
                    raise
                self._connection = None
                with suppress(OSError):
                    self.file.unlink()  # unreadable
        return default

    def _connect(self) -> sqlite3.Connection:
        connection = sqlite3.connect(
            self.file, timeout=60.0, isolation_level=None, check_same_thread=False
        )
        connection.executescript(TABLES)
        connection.execute(f"PRAGMA max_page_count = {EMPTY_PAGES + self.max_bytes // PAGE_BYTES}")
        return connection

    def get(self, name: str) -> bytes | None:
        """Return the data stored under ``name`` if its checksum matches, or None."""

        def find(database: sqlite3.Connection) -> bytes | None:
            query = "SELECT id, checksum, data FROM items JOIN contents USING (id)"
            named = (self.version, name)
            row = database.execute(f"{query} WHERE version = ? AND name = ?", named).fetchone()
            if row is None:
                return None
            key, checksum, data = row
            if checksum != self._checksum(name, data):
                with database:
                    database.execute(BEGIN)
                    _delete(database, key)
                return None
            if self.policy == "lru":  # the next stored item writes it to the file
                self._touched.pop(name, None)
                self._touched[name] = None
            return data  # type: ignore[no-any-return]

        return self._attempt(find, None)

    def put(self, name: str, data: bytes) -> int:
        """Store ``data`` if there is room, and return how many items were evicted for it."""
        if len(data) > min(self.max_bytes, MAX_ITEM_BYTES) or len(data) >= self._min_rejected_size:
            return 0

        def add(database: sqlite3.Connection) -> int:
            evicted = 0
            while not self._insert(database, name, data):
                more = self._evict(database, len(data))
                if not more:
                    if self.policy == "keep":
                        self._min_rejected_size = len(data)  # no room will become free
                    break
                evicted += more
            return evicted

        return self._attempt(add, 0)

    def _insert(self, database: sqlite3.Connection, name: str, data: bytes) -> bool:
        try:
            with database:
                database.execute(BEGIN)
                self._write_touches(database)
                added = database.execute(ADD, (self.version, name))
                if added.rowcount:
                    database.execute(
                        "INSERT OR REPLACE INTO contents VALUES (?, ?, ?)",
                        (added.lastrowid, self._checksum(name, data), data),
                    )
        except sqlite3.OperationalError as error:
            if "is full" in str(error):
                return False
            raise
        self._touched = {}
        return True

    def _write_touches(self, database: sqlite3.Connection) -> None:
        """Write the order of the reads since the last stored item."""
        database.executemany(TOUCH, [(self.version, used) for used in self._touched])

    def _evict(self, database: sqlite3.Connection, size: int) -> int:
        """Evict one or more items until ``size`` bytes may fit, and return how many."""
        evicted = 0
        with database:
            database.execute(BEGIN)
            self._write_touches(database)
            while not evicted or _pragma(database, "freelist_count") * PAGE_BYTES < size:
                query = (OLDEST, ()) if self.policy == "lru" else (OTHERS, (self.version,))
                row = database.execute(*query).fetchone()
                if row is None:
                    break
                _delete(database, row[0])
                evicted += 1
        return evicted

    def statistics(self) -> dict[str, int]:
        """Return the bytes of all versions, and the number of items of this version."""

        def count(database: sqlite3.Connection) -> dict[str, int]:
            pages = _pragma(database, "page_count") - _pragma(database, "freelist_count")
            mine = "SELECT count(*) FROM items WHERE version = ?"
            items = database.execute(mine, (self.version,)).fetchone()[0]
            return {"bytes": max(0, pages - EMPTY_PAGES) * PAGE_BYTES, "items": items}

        return self._attempt(count, {"bytes": 0, "items": 0})

    def clear(self) -> None:
        def empty(database: sqlite3.Connection) -> None:
            mine, version = "FROM items WHERE version = ?", (self.version,)
            with database:
                database.execute(BEGIN)
                database.execute(f"DELETE FROM contents WHERE id IN (SELECT id {mine})", version)
                database.execute(f"DELETE {mine}", version)

        self._attempt(empty, None)
        self._min_rejected_size = MAX_ITEM_BYTES

    def _checksum(self, name: str, data: bytes) -> int:
        return zlib.crc32(data, zlib.crc32(f"{self.version}/{name}/".encode()))


def _pragma(database: sqlite3.Connection, name: str) -> int:
    return int(database.execute(f"PRAGMA {name}").fetchone()[0])


def _delete(database: sqlite3.Connection, key: int) -> None:
    database.execute("DELETE FROM items WHERE id = ?", (key,))
    database.execute("DELETE FROM contents WHERE id = ?", (key,))
