"""How often Python's garbage collector stops the process, and for how long."""

from __future__ import annotations

import gc
from time import perf_counter
from typing import Any


class PauseWatch:
    """Times every collection of this process, whoever starts it, while it is watching.

    Attributes:
        seconds: Of each collection.
    """

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._start = 0.0

    def start(self) -> None:
        """Begin to watch, and count from zero."""
        self.stop()
        self.seconds = []
        gc.callbacks.append(self._note)

    def stop(self) -> None:
        """Watch no longer."""
        if self._note in gc.callbacks:
            gc.callbacks.remove(self._note)

    def _note(self, phase: str, info: dict[str, Any]) -> None:
        if phase == "start":
            self._start = perf_counter()
        elif self._start:
            self.seconds.append(perf_counter() - self._start)
