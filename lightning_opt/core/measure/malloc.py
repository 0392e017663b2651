"""The C library's heap: what is in use, what is kept for reuse, and giving that back.

On a CPU torch keeps no statistics, but it allocates with the C library's ``malloc``, and glibc's
counts to the byte what is in use. Small Python objects are not in it; Python has its own allocator.
"""

from __future__ import annotations

import ctypes
import functools
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

PROBE = 4 * 2**20


@dataclass(frozen=True)
class MallocInfo:
    """The heap at one moment.

    Attributes:
        used: Bytes handed out and not yet freed.
        free: Bytes held for reuse.
    """

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
    """Return the heap of this process, or None where that cannot be read.

    Takes from 5 us to half a millisecond, with the number of free blocks, which glibc counts.

    It can with glibc from 2.33 on, unless another allocator has been put in its place: that is
    found out, once, by allocating a tensor and looking whether it is counted.
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
    probe = torch.empty(PROBE, dtype=torch.uint8, device="cpu")
    grown = read().used - before
    # A thread may have freed something meanwhile, so that half of it is proof enough.
    return read if grown >= probe.numel() // 2 else None


def malloc_trim() -> bool | None:
    """Give the heap's free pages back to the system.

    Returns:
        Whether any were given back; None where the C library has no such function.
    """
    function = libc_function("malloc_trim")
    if function is None:
        return None
    function.argtypes = [ctypes.c_size_t]
    return bool(function(0))


@functools.cache
def libc_function(name: str) -> Any | None:
    """Return a function of Linux's C library, or None where there is none of this name."""
    if not sys.platform.startswith("linux"):
        return None
    try:
        function = getattr(ctypes.CDLL(None), name)
    except (AttributeError, OSError):
        return None
    return function
