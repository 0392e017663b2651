"""Cheap figures that a leak must raise, and whether one does: the question before the search."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Mapping

import torch

from lightning_opt.core.measure.malloc import malloc_info
from lightning_opt.core.measure.memory import resident_memory
from lightning_opt.core.numerics.trend import mann_kendall, theil_sen

PYTHON_BLOCK = 96
"""Bytes of a typical block of Python's own allocator, which counts blocks and not bytes."""

WINDOW = 24
SAMPLES = 8
SIGNIFICANT = 0.01


def read_signals(device: torch.device) -> dict[str, float]:
    """Return, in bytes, what grows when something leaks; a source that is missing is left out.

    Resident memory also grows by fragmentation, so that alone it is a reason to look, not to warn.
    """
    signals = {
        "resident": float(resident_memory()),
        "python": float(PYTHON_BLOCK * sys.getallocatedblocks()),
    }
    heap = malloc_info()
    if heap is not None:
        signals["heap"] = float(heap.used)
    if device.type == "cuda":
        signals["device"] = float(torch.cuda.memory_allocated(device))
    return signals


class Signals:
    """The newest samples of one phase, taken at the same point of a step each time.

    Args:
        min_rate: Bytes a step below which growth does not matter.
    """

    def __init__(self, min_rate: float) -> None:
        self._min_rate = min_rate
        self._samples: deque[tuple[int, Mapping[str, float]]] = deque(maxlen=WINDOW)
        self.taken = 0

    def add(self, step: int, values: Mapping[str, float]) -> None:
        """Add one sample."""
        self._samples.append((step, values))
        self.taken += 1

    def is_due(self) -> bool:
        """Return whether there are enough new samples for a test to be worth its time."""
        return self.taken >= SAMPLES and self.taken % (SAMPLES // 2) == 0

    def growing(self) -> dict[str, float]:
        """Return what grows, steadily and without flattening, with bytes a step; fastest first."""
        found = {}
        for name in self._samples[0][1] if self._samples else ():
            steps = [float(step) for step, values in self._samples if name in values]
            series = [values[name] for _, values in self._samples if name in values]
            slope = theil_sen(steps, series)
            if slope < self._min_rate or mann_kendall(series)[1] >= SIGNIFICANT:
                continue
            # A cache or an allocator that fills up grows at first and then no more.
            half = len(steps) // 2
            if theil_sen(steps[half:], series[half:]) >= max(slope / 4, self._min_rate / 2):
                found[name] = slope
        return dict(sorted(found.items(), key=lambda item: -item[1]))
