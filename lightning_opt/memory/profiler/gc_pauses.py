"""How often Python's garbage collector stops the process, and for how long."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import Any


@contextmanager
def timing_collections(seconds: list[float]) -> Iterator[None]:
    """Add the time of every collection of this process, whoever starts it, to ``seconds``."""
    start = 0.0

    def note(phase: str, info: dict[str, Any]) -> None:
        nonlocal start
        if phase == "start":
            start = perf_counter()
        elif start:
            seconds.append(perf_counter() - start)

    gc.callbacks.append(note)
    try:
        yield
    finally:
        gc.callbacks.remove(note)
