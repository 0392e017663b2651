"""What a PerformanceMonitor has measured: the window up to a report, and the whole run."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from lightning_opt.profiling.durations import Work
from lightning_opt.profiling.monitor.step_times import StepTime


class Record:
    """The steps and samples of a run, and what is known beside them.

    Attributes:
        device: The name of what it runs on.
        ranks: How many processes.
        work: The steps that were timed.
        losses: Of the batches at which a report was due.
        looks: Of each quantity that the thread has sampled: how often, its sum, and its largest.
        notes: Sentences: which GPU the thread asks, or why none, and why it samples no more.
    """

    def __init__(self) -> None:
        self.device, self.ranks = "", 1
        self.work = Work()
        self.losses = Thinned()
        self.looks: dict[str, tuple[int, float, float]] = {}
        self.notes: list[str] = []

    def add(self, times: Sequence[StepTime], looks: Sequence[Mapping[str, float]]) -> None:
        """Take in a window."""
        for time in times:
            self.work.add(*time)
        for look in looks:
            for name, value in look.items():
                number, total, largest = self.looks.get(name, (0, 0.0, value))
                self.looks[name] = number + 1, total + value, max(largest, value)

    def mean(self, name: str) -> float | None:
        """Return the mean of a sampled quantity; None if there is none."""
        number, total, _ = self.looks.get(name, (0, 0.0, 0.0))
        return total / number if number else None

    def largest(self, name: str) -> float | None:
        """Return the largest value of a sampled quantity; None if there is none."""
        return self.looks[name][2] if name in self.looks else None


class Thinned(list[float]):
    """Values of a series of any length, thinned out evenly when there are too many.

    Args:
        most: How many it may hold, an even number.
    """

    def __init__(self, most: int = 96) -> None:
        super().__init__()
        self.most = most
        self._stride, self._seen = 1, 0

    def add(self, value: float) -> None:
        """Take in the next value, or leave it out."""
        if self._seen % self._stride == 0:
            if len(self) == self.most:
                del self[1::2]
                self._stride *= 2
            self.append(value)
        self._seen += 1


def means(looks: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the mean of each quantity over some samples."""
    found: dict[str, list[float]] = {}
    for look in looks:
        for name, value in look.items():
            found.setdefault(name, []).append(value)
    return {name: statistics.fmean(values) for name, values in found.items()}
