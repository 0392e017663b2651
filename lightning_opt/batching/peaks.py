"""The peak of memory over some steps, against everything that limits it."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

import torch

from lightning_opt.core.malloc import malloc_trim
from lightning_opt.core.memory import (
    MB,
    MemoryLimits,
    device_memory,
    process_memory,
    resident_memory,
)


@dataclass(frozen=True)
class Peak:
    """How near a limit was.

    Attributes:
        share: The peak over the limit, of the limit that was nearest.
        rest: The same for what is in use now.
        source: What is limited.
    """

    share: float
    rest: float
    source: str


class PeakMeter:
    """Measures the peak of memory from :meth:`start` on, without looking at each step.

    On CUDA it is what tensors hold at most, of what torch's allocator can have. On a CPU it is
    resident memory, which the kernel keeps the peak of (Linux), on top of what else the machine's
    memory, control groups and ``RLIMIT_AS`` say is in use. Elsewhere :meth:`look` samples it.

    Args:
        device: The device that trains.
        budget_mb: Another limit: what this process may take of the device, or on a CPU altogether.
        leave_out: Sources of limits that do not count.
    """

    def __init__(
        self,
        device: torch.device,
        budget_mb: float | None = None,
        leave_out: Collection[str] = (),
    ) -> None:
        self._device, self._leave_out = device, frozenset(leave_out)
        self._budget = None if budget_mb is None else int(budget_mb * MB)
        self._limits = MemoryLimits(device, host=True)
        self._sampled = 0
        self.samples = device.type != "cuda" and not _reset_peak()

    def start(self) -> None:
        """Begin anew."""
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
            return
        malloc_trim()  # what is kept for reuse would count as the peak
        self._sampled = resident_memory()
        if not self.samples:
            _reset_peak()

    def look(self) -> None:
        """Take a sample, where there is no other way."""
        if self.samples:
            self._sampled = max(self._sampled, resident_memory())

    def read(self) -> Peak:
        """Return the peak since :meth:`start`."""
        if self._device.type == "cuda":
            return self._read_cuda()
        peak = self._sampled if self.samples else process_memory().peak or 0
        malloc_trim()  # what is kept for reuse is not in use, so it is no part of `now` either
        now = resident_memory()
        more = max(0, peak - now)
        found = [
            (usage.used, usage.total, usage.source)
            for usage in self._limits.read()
            if usage.source not in self._leave_out
        ]
        if self._budget is not None:
            found.append((now, self._budget, "budget"))
        peaks = [Peak((used + more) / total, used / total, source) for used, total, source in found]
        return max(peaks, key=lambda peak: peak.share)

    def _read_cuda(self) -> Peak:
        memory = device_memory(self._device)
        assert memory is not None
        total = memory.free + memory.reserved
        source = str(self._device)
        if self._budget is not None and self._budget < total:
            total, source = self._budget, "budget"
        peak = torch.cuda.max_memory_allocated(self._device)
        return Peak(peak / total, memory.allocated / total, source)


def _reset_peak() -> bool:
    """Have the kernel begin anew with this process's peak, and return whether it does."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True
