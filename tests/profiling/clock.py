"""A clock that advances only where a test says so."""

from collections import defaultdict
from typing import Any


class Clock:
    """A simulated ``time.perf_counter``, and a stand-in for the module ``time``.

    Attributes:
        now: The time in seconds.
        tick: Seconds that pass at each reading.
        spent: The seconds given to :meth:`spend`, by name.
    """

    def __init__(self, tick: float = 0.0) -> None:
        self.now, self.tick = 100.0, tick
        self.spent: dict[Any, float] = defaultdict(float)

    def perf_counter(self) -> float:
        self.now += self.tick
        return self.now

    __call__ = perf_counter

    def spend(self, seconds: float, name: Any = None) -> None:
        self.now += seconds
        self.spent[name] += seconds
