"""How much memory there is and how much of it is taken: one source for each number, never a guess.

Every function asks the kernel, the allocator or the driver, and returns ``None`` where it gets no
answer. Amounts are bytes. What is *used* is what cannot be had: memory that an allocator holds in
reserve and would hand out again does not count, nor do files that the kernel merely keeps cached.
"""

from __future__ import annotations

import math
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar
from weakref import WeakSet

import torch

from lightning_opt.core.measure.cgroups import find_memory_groups
from lightning_opt.core.measure.malloc import malloc_info

MB = 2**20


@dataclass(frozen=True)
class Usage:
    """One limit and how near it is.

    Attributes:
        source: What is limited: ``"cuda:0"``, ``"system"``, ``"cgroup"``, ``"address space"``.
        used: Bytes that cannot be had.
        total: Bytes at which an allocation fails or the process is killed.
    """

    source: str
    used: int
    total: int

    @property
    def fraction(self) -> float:
        """Used over total."""
        return self.used / self.total


def process_memory() -> tuple[int, int]:
    """Return physical memory and address space of this process: the cheapest reading on Linux."""
    try:
        with open(_STATM, "rb") as file:  # noqa: PTH123 - pathlib takes twice as long
            virtual, resident = file.read().split()[:2]
            return int(resident) * _PAGE, int(virtual) * _PAGE
    except OSError:
        import psutil

        memory = psutil.Process().memory_info()
        return memory.rss, memory.vms


def resident_memory() -> int:
    """Return the physical memory of this process."""
    return process_memory()[0]


_STATM = "/proc/self/statm"
_PAGE = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 4096


def _peak_resident() -> int:
    """Return the largest physical memory since :func:`_reset_peak_resident`: on Linux alone."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))


def system_memory() -> Usage:
    """Return the machine's memory; caches that the kernel can give up count as free."""
    import psutil

    memory = psutil.virtual_memory()
    return Usage("system", memory.total - memory.available, memory.total)


def address_space() -> Usage | None:
    """Return the address space under ``RLIMIT_AS``, or None if the process has no such limit.

    Free blocks within the C library's heap count as free: the next tensor may take them.
    """
    if sys.platform == "win32":
        return None
    import resource

    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit == resource.RLIM_INFINITY:
        return None
    heap = malloc_info()
    used = process_memory()[1] - (heap.free if heap is not None else 0)
    return Usage("address space", max(0, used), limit)


class MemoryLimits:
    """Everything that limits this process and its device, found once and read as often as needed.

    Args:
        device: The device that trains.
        host: Whether to read the limits of host memory too: the machine's, those of the control
            groups and ``RLIMIT_AS``.
        root: Where ``proc`` and ``sys`` are found.
    """

    def __init__(self, device: torch.device, host: bool = True, root: Path = Path("/")) -> None:
        self.device = device
        self._groups = find_memory_groups(root) if host else []
        self._host = [system_memory, address_space] if host else []

    def read(self) -> list[Usage]:
        """Return one entry a limit; empty where nothing is limited or nothing can be read."""
        found = [self._device(), *(read() for read in self._host)]
        readings = (group() for group in self._groups)
        found += [Usage("cgroup", *reading) for reading in readings if reading is not None]
        return [usage for usage in found if usage is not None and usage.total > 0]

    def room(self) -> float:
        """Return the bytes to the limit that is nearest."""
        return min((usage.total - usage.used for usage in self.read()), default=math.inf)

    def _device(self) -> Usage | None:
        if self.device.type != "cuda":
            return None
        free, total = torch.cuda.mem_get_info(self.device)
        allocated = torch.cuda.memory_allocated(self.device)
        reusable = torch.cuda.memory_reserved(self.device) - allocated
        return Usage(str(self.device), total - free - reusable, total)


def growth_figures(device: torch.device) -> tuple[int, ...]:
    """Return figures that are cheap enough for every step, and cannot grow unseen towards a limit.

    On CUDA that is what tensors hold, on a CPU resident memory and the address space.
    """
    return (live_bytes(device),) if device.type == "cuda" else process_memory()


def live_bytes(device: torch.device) -> int:
    """Return what tensors and everything else hold right now, from the allocator's own counter.

    On CUDA that is torch's allocator. On a CPU it is the C library's heap, where it can be read
    (glibc 2.33 or newer, and torch allocating through it), else resident memory, which is coarser:
    it does not fall when memory is freed within the heap.
    """
    if device.type == "cuda":
        stats = torch.cuda.memory_stats_as_nested_dict(device)  # unflattened: a fifth of the time
        return int(stats["allocated_bytes"]["all"]["current"]) if stats else 0
    heap = malloc_info()
    return heap.used if heap is not None else resident_memory()


def live_source(device: torch.device) -> str:
    """Return in words where :func:`live_bytes` reads."""
    if device.type == "cuda":
        return "torch's CUDA allocator"
    return "the C library's heap" if malloc_info() is not None else "resident memory of the process"


class PeakMeter:
    """The peak of memory from its start on, whoever else measures peaks at the same time.

    On CUDA it is what tensors hold, or with ``fragments`` what the allocator cannot give back:
    also what lies unused in blocks of which a part is in use, but not more than it had taken from
    the device. Elsewhere it is resident memory, of which Linux keeps the peak; on other systems
    :meth:`sample` has to be called now and then.

    Torch's allocator and the kernel keep one peak for the whole process, which begins anew for all
    at once. So the meter that starts anew first hands what was reached to all the others.

    Args:
        device: The device that trains.
        fragments: Whether memory counts that fragmentation makes useless.

    Attributes:
        samples: Whether the peak is only that of the samples.
    """

    _running: ClassVar[WeakSet[PeakMeter]] = WeakSet()

    def __init__(self, device: torch.device, fragments: bool = False) -> None:
        self._device, self._fragments = device, fragments
        self._counter = str(device) if device.type == "cuda" else "process"
        if self._counter == "cuda":
            self._counter = f"cuda:{torch.cuda.current_device()}"
        self._largest = 0
        self.samples = False
        self.start()
        self._running.add(self)

    def start(self) -> None:
        """Begin anew, with what is held now."""
        for other in self._running:
            if other._counter == self._counter:
                other.sample()
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
        else:
            self.samples = not _reset_peak_resident()
        self._largest = 0
        self.sample()

    def sample(self) -> None:
        """Take note of what was reached, or, where nobody keeps a peak, of what is held now."""
        if self._device.type == "cuda":
            peak = torch.cuda.max_memory_allocated(self._device)
            if self._fragments:
                stats = torch.cuda.memory_stats(self._device)  # empty before the first tensor
                peak += stats.get("inactive_split_bytes.all.peak", 0)
                peak = min(peak, torch.cuda.max_memory_reserved(self._device))
        else:
            peak = resident_memory() if self.samples else _peak_resident()
        self._largest = max(self._largest, peak)

    def read(self) -> int:
        """Return the peak since the start, in bytes."""
        self.sample()
        return self._largest

    def mark(self) -> int:
        """Return the peak since the start or the last mark, and begin anew."""
        peak = self.read()
        self.start()
        return peak


def _reset_peak_resident() -> bool:
    """Have the kernel begin anew with this process's peak, and return whether it does."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True
