"""Memory peak over several steps, as a share of the nearest limit."""

from __future__ import annotations

from typing import NamedTuple

import torch

from lightning_opt.core.measure.exhaustion import empty_cache
from lightning_opt.core.measure.memory import (
    MB,
    MemoryLimits,
    PeakMeter,
    malloc_trim,
    resident_memory,
)


class Peak(NamedTuple):
    """Memory as shares of the nearest limit.

    Attributes:
        share: The peak, divided by the limit.
        current: The current memory, divided by the limit.
    """

    share: float
    current: float


class LimitMeter:
    """Measures the memory peak against all limits, at no cost per step.

    On CUDA, the peak counts tensors and fragments in torch's allocator. The limit is the memory
    that the allocator can get. On a CPU, the peak counts this process's peak of resident memory and
    all other memory in use under the limit. The limits are the machine's memory, control groups and
    ``RLIMIT_AS``.

    Args:
        device: The training device.
        budget_mb: An additional limit on the memory of this process on the device.
    """

    def __init__(self, device: torch.device, budget_mb: float | None = None) -> None:
        self._device = device
        self._budget = None if budget_mb is None else int(budget_mb * MB)
        self._limits = MemoryLimits(device, host=device.type != "cuda")
        self._meter = PeakMeter(device, fragments=True)
        self.sample = self._meter.sample  # for systems that record no peak

    def start(self) -> None:
        # Memory kept for reuse would count as the peak. Garbage collection would slow the batch.
        empty_cache(self._device)
        self._meter.start()

    def read(self) -> Peak:
        peak = self._meter.read()
        if self._device.type == "cuda":
            now = torch.cuda.memory_allocated(self._device)
            total = now + self._limits.room()
            uses = [(now, min(total, self._budget or total))]
        else:
            malloc_trim()  # memory kept for reuse is not in use
            now = resident_memory()
            uses = [(usage.used, usage.total) for usage in self._limits.read()]
            if self._budget is not None:
                uses.append((now, self._budget))
        above_now = max(0, peak - now)
        peaks = [Peak((used + above_now) / total, used / total) for used, total in uses]
        return max(peaks, default=Peak(0.0, 0.0))
