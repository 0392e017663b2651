"""Numbers that several processes count and any of them can add up."""

from __future__ import annotations

import torch

NAMES = ("hits", "misses", "evictions", "bytes", "items")

ROWS = 129
"""One for the main process, and one for each worker of a loader; more workers share rows."""


class Counters:
    """Counts in shared memory, a row for each process, so that none needs a lock.

    Worker processes, forked or spawned by a DataLoader, count in the same memory. A copy by plain
    pickle counts on its own.
    """

    def __init__(self) -> None:
        self._rows = torch.zeros(ROWS, len(NAMES), dtype=torch.int64).share_memory_()
        self._mine = self._rows[0].numpy()

    def __getstate__(self) -> dict[str, torch.Tensor]:
        return {"_rows": self._rows}

    def __setstate__(self, state: dict[str, torch.Tensor]) -> None:
        self._rows = state["_rows"]
        self._mine = self._rows[0].numpy()

    def use_row(self, worker: int | None) -> None:
        """Count from now on for worker number ``worker``, or for the main process."""
        row = 0 if worker is None else 1 + worker % (ROWS - 1)
        self._mine = self._rows[row].numpy()

    def add(self, hits: int = 0, misses: int = 0, evictions: int = 0) -> None:
        """Count."""
        mine = self._mine
        mine[0] += hits
        mine[1] += misses
        mine[2] += evictions

    def hold(self, held: int, items: int) -> None:
        """Say what this process holds at present."""
        self._mine[3], self._mine[4] = held, items

    def total(self) -> dict[str, int]:
        """Return the sums over processes, by name."""
        return dict(zip(NAMES, self._rows.sum(0).tolist(), strict=True))
