"""How often Python's garbage collector stops the process, and for how long."""

from __future__ import annotations

import gc
from dataclasses import dataclass
from time import perf_counter
from typing import Any


@dataclass
class Pauses:
    """Collections in a stretch of steps.

    Attributes:
        steps: How many steps.
        collections: How many collections.
        seconds: Their time together.
        longest: The time of the longest.
        collected: Objects that they freed.
    """

    steps: int = 0
    collections: int = 0
    seconds: float = 0.0
    longest: float = 0.0
    collected: int = 0

    def add(self, seconds: float, collected: int) -> None:
        """Count one collection."""
        self.collections += 1
        self.seconds += seconds
        self.longest = max(self.longest, seconds)
        self.collected += collected


class PauseWatch:
    """Times every collection of this process, whoever starts it, while it is watching.

    Attributes:
        pauses: Where they are counted; replace it to begin a new count.
    """

    def __init__(self) -> None:
        self.pauses = Pauses()
        self._start: float | None = None

    def start(self) -> None:
        """Begin to watch."""
        if self not in gc.callbacks:
            gc.callbacks.append(self)

    def stop(self) -> None:
        """Watch no longer."""
        if self in gc.callbacks:
            gc.callbacks.remove(self)
        self._start = None

    def __call__(self, phase: str, info: dict[str, Any]) -> None:
        """Take a call of the garbage collector, before and after its work."""
        if phase == "start":
            self._start = perf_counter()
        elif self._start is not None:
            self.pauses.add(perf_counter() - self._start, info["collected"])
            self._start = None
