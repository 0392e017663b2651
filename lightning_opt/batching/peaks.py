"""The peak of memory over some steps, against everything that limits it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from lightning_opt.core.measure.malloc import malloc_trim
from lightning_opt.core.measure.memory import MB, MemoryLimits, PeakMeter, resident_memory


@dataclass(frozen=True)
class Peak:
    """How near a limit was.

    Attributes:
        share: The peak over the limit, of the limit that was nearest.
        rest: The same for what is in use now.
    """

    share: float
    rest: float


class LimitMeter:
    """Measures how near the peak of memory comes to a limit, without looking at each step.

    On CUDA it is what torch's allocator could not give back, tensors and fragments, of what it can
    have from the device. On a CPU it is resident memory, on top of what else the machine's memory,
    control groups and ``RLIMIT_AS`` say is in use.

    Args:
        device: The device that trains.
        budget_mb: Another limit: what this process may take of the device, or on a CPU altogether.
    """

    def __init__(self, device: torch.device, budget_mb: float | None = None) -> None:
        self._device = device
        self._budget = None if budget_mb is None else int(budget_mb * MB)
        self._limits = MemoryLimits(device, host=device.type != "cuda")
        self._meter = PeakMeter(device, fragments=True)
        self.sample = self._meter.sample

    @property
    def samples(self) -> bool:
        """Whether the system keeps no peak, so that :meth:`sample` is to be called."""
        return self._meter.samples

    def start(self) -> None:
        """Begin anew."""
        if self._device.type == "cpu":
            malloc_trim()  # what is kept for reuse would count as the peak
        elif self._device.type == "cuda":
            torch.cuda.empty_cache()
        self._meter.start()

    def read(self) -> Peak:
        """Return the peak since :meth:`start`."""
        peak = self._meter.read()
        if self._device.type == "cuda":
            now = torch.cuda.memory_allocated(self._device)
            free, _ = torch.cuda.mem_get_info(self._device)
            total = free + torch.cuda.memory_reserved(self._device)
            found = [(now, min(total, self._budget or total))]
        else:
            malloc_trim()  # what is kept for reuse is not in use, so it is no part of `now` either
            now = resident_memory()
            found = [(usage.used, usage.total) for usage in self._limits.read()]
            if self._budget is not None:
                found.append((now, self._budget))
        more = max(0, peak - now)
        return max(
            (Peak((used + more) / total, used / total) for used, total in found),
            key=lambda near: near.share,
            default=Peak(0.0, 0.0),
        )
