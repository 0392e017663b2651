"""Memory limits and usage in bytes, read from the kernel, the allocator or the driver.

*Used* memory excludes memory that can be allocated again: an allocator's reserve and file caches.
"""

from __future__ import annotations

import ctypes
import functools
import math
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar
from weakref import WeakSet

import torch

from lightning_opt.core.measure.machine import find_memory_groups

MB = 2**20


@dataclass(frozen=True)
class Usage:
    """A memory limit and the bytes in use.

    The source is ``"cuda:0"``, ``"this process's share of cuda:0"``, ``"system"``, ``"cgroup"`` or
    ``"address space"``.
    """

    source: str
    used: int
    total: int

    @property
    def fraction(self) -> float:
        return self.used / self.total


def process_memory() -> tuple[int, int]:
    import psutil

    memory = psutil.Process().memory_info()
    return memory.rss, memory.vms


def resident_memory() -> int:
    return process_memory()[0]


def system_memory() -> Usage:
    """Return the machine's memory. The kernel's reclaimable caches count as free."""
    import psutil

    memory = psutil.virtual_memory()
    return Usage("system", memory.total - memory.available, memory.total)


def address_space() -> Usage | None:
    """Return the address space under ``RLIMIT_AS``; free blocks in the heap count as free."""
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
    """All memory limits of this process and its device.

    With ``host`` they include the machine's, the control groups' and ``RLIMIT_AS``.
    """

    def __init__(self, device: torch.device, host: bool = True, root: Path = Path("/")) -> None:
        self.device = device
        self._groups = find_memory_groups(root) if host else []
        self._host = [system_memory, address_space] if host else []

    def read(self) -> list[Usage]:
        """Return one entry per limit that can be read."""
        usages = [self._device(), *(read() for read in self._host)]
        readings = (group() for group in self._groups)
        usages += [Usage("cgroup", *reading) for reading in readings if reading is not None]
        return [usage for usage in usages if usage is not None and usage.total > 0]

    def room(self) -> float:
        """Return the bytes left to the nearest limit."""
        return min((usage.total - usage.used for usage in self.read()), default=math.inf)

    def _device(self) -> Usage | None:
        if self.device.type != "cuda":
            return None
        free, total = torch.cuda.mem_get_info(self.device)
        allocated = torch.cuda.memory_allocated(self.device)
        reusable = torch.cuda.memory_reserved(self.device) - allocated
        allowed = int(total * memory_fraction(self.device))
        if allowed - allocated < free + reusable:
            return Usage(f"this process's share of {self.device}", allocated, allowed)
        return Usage(str(self.device), total - free - reusable, total)


def memory_fraction(device: torch.device) -> float:
    """Return the share of a CUDA device that ``set_per_process_memory_fraction`` leaves torch."""
    read = getattr(torch.cuda, "get_per_process_memory_fraction", None)  # not in torch 2.5
    return 1.0 if read is None else float(read(device))


def peak_memory(device: torch.device) -> int:
    """Return the peak so far: of tensors on CUDA, else of the resident memory of this process.

    Other code may have reset the peak. On systems that record none, it is the current memory.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) if torch.cuda.is_initialized() else 0
    return _process_peak("VmHWM")


def _process_peak(field: str) -> int:
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))
    except (OSError, StopIteration):  # not Linux; gVisor, which records no peak
        resident, virtual = process_memory()
        return virtual if field == "VmPeak" else resident


def peak_usage(device: torch.device) -> Usage | None:
    """Return the limit that this process came closest to, with the peak usage so far."""
    peak = peak_memory(device)
    if device.type == "cuda":
        if not peak:
            return None
        total = torch.cuda.get_device_properties(device).total_memory
        return Usage(str(device), peak, int(total * memory_fraction(device)))
    peaks = {"address space": _process_peak("VmPeak")}
    usages = [
        Usage(now.source, max(now.used, peaks.get(now.source, peak)), now.total)
        for now in MemoryLimits(device).read()
    ]
    return max(usages, key=lambda usage: usage.fraction, default=None)


def live_bytes(device: torch.device) -> int:
    """Return the allocated bytes from the allocator's own counter.

    On a CPU it is the C library's heap if it can be read, else resident memory, which does not fall
    when memory is freed inside the heap.
    """
    if device.type == "cuda":
        # Five times as fast as `memory_stats`.
        stats = torch.cuda.memory_stats_as_nested_dict(device)
        return int(stats["allocated_bytes"]["all"]["current"]) if stats else 0
    heap = malloc_info()
    return heap.used if heap is not None else resident_memory()


def live_source(device: torch.device) -> str:
    """Return the name of the counter that :func:`live_bytes` reads."""
    if device.type == "cuda":
        return "torch's CUDA allocator"
    return "the C library's heap" if malloc_info() is not None else "resident memory of the process"


class PeakMeter:
    """Measures peak memory since its start. Several meters can run at the same time.

    On CUDA it counts the memory of tensors. With ``fragments`` it adds the unused memory in partly
    used blocks; the sum is at most the memory reserved from the device. On other devices it
    measures resident memory. Linux records that peak. On other systems ``samples`` is True, and
    :meth:`sample` must be called regularly.

    torch's allocator and the kernel keep one peak per process. Before a meter resets it, all other
    meters read it.
    """

    _running: ClassVar[WeakSet[PeakMeter]] = WeakSet()

    def __init__(self, device: torch.device, fragments: bool = False) -> None:
        self._device, self._fragments = device, fragments
        self._counter = str(device) if device.type == "cuda" else "process"
        if self._counter == "cuda":
            self._counter = f"cuda:{torch.cuda.current_device()}"
        self.samples = False
        self.start()
        self._running.add(self)

    def start(self) -> None:
        """Reset the peak to the current memory."""
        for other in self._running:
            if other._counter == self._counter:
                other.sample()
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
        else:
            self.samples = True
            with suppress(OSError):  # not Linux
                Path("/proc/self/clear_refs").write_text("5")  # resets the kernel's peak
                self.samples = False
        self._largest = 0
        self.sample()

    def sample(self) -> None:
        """Read the peak, or the current memory on systems that do not record a peak."""
        if self._device.type == "cuda":
            peak = torch.cuda.max_memory_allocated(self._device)
            if self._fragments:
                stats = torch.cuda.memory_stats(self._device)  # empty before the first tensor
                peak += stats.get("inactive_split_bytes.all.peak", 0)
                peak = min(peak, torch.cuda.max_memory_reserved(self._device))
        else:
            peak = resident_memory() if self.samples else _process_peak("VmHWM")
        self._largest = max(self._largest, peak)

    def read(self) -> int:
        """Return the peak since the start, in bytes."""
        self.sample()
        return self._largest

    def mark(self) -> int:
        """Return the peak since the start or the last mark, and reset it."""
        peak = self.read()
        self.start()
        return peak


# --- the C library's heap -------------------------------------------------------------------------
# On a CPU torch allocates with `malloc` and keeps no statistics, but glibc counts the bytes in use.

PROBE_BYTES = 4 * 2**20
"""Size of the test allocation."""


@dataclass(frozen=True)
class MallocInfo:
    """Bytes allocated in the heap (``used``) and kept for reuse (``free``)."""

    used: int
    free: int


class _Mallinfo2(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            "arena", "ordblks", "smblks", "hblks", "hblkhd",
            "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost",
        )
    ]  # fmt: skip


def malloc_info() -> MallocInfo | None:
    """Return the heap of this process, or None if it cannot be read.

    It needs glibc 2.33 or newer, and torch must allocate through glibc. One test allocation checks
    this. A call takes 5 us to 0.5 ms, growing with the number of free blocks.
    """
    read = _heap_reader()
    return None if read is None else read()


@functools.cache
def _heap_reader() -> Callable[[], MallocInfo] | None:
    function = libc_function("mallinfo2")
    if function is None:
        return None
    function.restype = _Mallinfo2

    def read() -> MallocInfo:
        info = function()
        return MallocInfo(info.uordblks + info.hblkhd, info.fordblks)

    before = read().used
    probe = torch.empty(PROBE_BYTES, dtype=torch.uint8, device="cpu")
    grown = read().used - before
    # Half of the probe is enough, because another thread may have freed memory meanwhile.
    return read if grown >= probe.numel() // 2 else None


def malloc_trim() -> None:
    """Return the heap's free pages to the system, if the C library can do that."""
    function = libc_function("malloc_trim")
    if function is not None:
        function.argtypes = [ctypes.c_size_t]
        function(0)


@functools.cache
def libc_function(name: str) -> Any | None:
    return getattr(ctypes.CDLL(None), name, None) if sys.platform.startswith("linux") else None
