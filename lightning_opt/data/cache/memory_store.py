"""A bounded store of bytes in the memory of one process."""

from __future__ import annotations

from collections.abc import Hashable
from typing import TYPE_CHECKING, Literal, TypeAlias

if TYPE_CHECKING:
    from cachetools import Cache

Policy: TypeAlias = Literal["lru", "keep"]

ENTRY = 600
"""Bytes an entry takes beside its data: two dictionaries, the order, the key, the allocator."""


class MemoryStore:
    """Bytes by key, never more than ``max_bytes`` with what the entries themselves take.

    Args:
        max_bytes: The bound.
        policy: ``"lru"`` gives up what was used least recently; ``"keep"`` gives nothing up, and
            takes nothing more once it is full.
    """

    def __init__(self, max_bytes: int, policy: Policy = "lru") -> None:
        from cachetools import LRUCache

        self.max_bytes, self.policy = max_bytes, policy
        self._entries: Cache[Hashable, bytes] = LRUCache(max_bytes, getsizeof=_size)

    @property
    def used(self) -> int:
        """Bytes that are taken."""
        return int(self._entries.currsize)

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: Hashable) -> bytes | None:
        """Return what was stored under ``key``, or None."""
        return self._entries.get(key)

    def put(self, key: Hashable, data: bytes) -> int:
        """Store ``data`` if it may be; return how many others were given up for it."""
        size = _size(data)
        if size > self.max_bytes or key in self._entries:
            return 0
        if self.policy == "keep" and self.used + size > self.max_bytes:
            return 0
        before = len(self._entries)
        self._entries[key] = data
        return before + 1 - len(self._entries)

    def clear(self) -> None:
        """Forget everything."""
        self._entries.clear()


def _size(data: bytes) -> int:
    return len(data) + ENTRY
