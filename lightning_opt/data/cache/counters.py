"""Numbers that several processes count and any of them can add up."""

from __future__ import annotations

import torch
from torch.utils.data import get_worker_info

NAMES = ("hits", "misses", "evictions")

ROWS = 129
"""One for the main process, and one for each worker of a loader; more workers share rows."""


class Counters:
    """Counts in shared memory, a row for each process, so that none needs a lock.

    Worker processes, forked or spawned by a DataLoader, count in the same memory. A copy by plain
    pickle counts on its own.
    """

    def __init__(self) -> None:
        self._rows = torch.zeros(ROWS, len(NAMES), dtype=torch.int64).share_memory_()

    def add(self, hits: int = 0, misses: int = 0, evictions: int = 0) -> None:
        """Count, for this worker or for the main process."""
        worker = get_worker_info()
        row = self._rows[0 if worker is None else 1 + worker.id % (ROWS - 1)].numpy()
        row += (hits, misses, evictions)

    def total(self) -> dict[str, int]:
        """Return the sums over processes, by name."""
        return dict(zip(NAMES, self._rows.sum(0).tolist(), strict=True))
