"""The C library's heap: bytes in use, bytes free, and returning free memory to the system.

On a CPU torch allocates with ``malloc`` and keeps no statistics, but glibc counts the bytes in use.
"""

from __future__ import annotations

import ctypes
import functools
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

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

    It needs glibc 2.33 or newer, and torch must allocate through it: a test allocation checks that
    once. A call takes 5 us to 0.5 ms, growing with the number of free blocks.
    """
    read = _reader()
    return None if read is None else read()


@functools.cache
def _reader() -> Callable[[], MallocInfo] | None:
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
    # Growth by half of the probe is enough: another thread may have freed memory meanwhile.
    return read if grown >= probe.numel() // 2 else None


def malloc_trim() -> bool | None:
    """Return the heap's free pages to the system; None if the C library cannot do that."""
    function = libc_function("malloc_trim")
    if function is None:
        return None
    function.argtypes = [ctypes.c_size_t]
    return bool(function(0))


@functools.cache
def libc_function(name: str) -> Any | None:
    if not sys.platform.startswith("linux"):
        return None
    try:
        function = getattr(ctypes.CDLL(None), name)
    except (AttributeError, OSError):
        return None
    return function
