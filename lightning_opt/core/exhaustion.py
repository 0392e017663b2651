"""Out-of-memory: how to tell it from other errors, and what can be let go of afterwards."""

from __future__ import annotations

import ctypes
import errno
import functools
import gc
import sys

import torch

from lightning_opt.core.malloc import malloc_trim

MESSAGES = (
    "out of memory",  # of CUDA, and of other backends of torch
    "defaultcpuallocator: can't allocate memory",
    "defaultcpuallocator: not enough memory",
    "could not create a primitive",  # oneDNN
    "could not create a memory object",
    "std::bad_alloc",
    "cublas_status_alloc_failed",
    "cudnn_status_alloc_failed",
)
"""Parts, in lower case, of the messages of a ``RuntimeError`` that means it."""

CAUGHT = (RuntimeError, MemoryError, OSError)
"""The types under which out-of-memory appears; most errors of these types are something else."""


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an allocation has failed, on a device or on the host."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    message = str(error).lower()
    return isinstance(error, RuntimeError) and any(part in message for part in MESSAGES)


def let_go(device: torch.device) -> None:
    """Free what nobody uses. Call it outside ``except``: a traceback holds what its frames hold."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    elif device.type == "cpu":
        malloc_trim()
        _keep_large_blocks_apart()


@functools.cache
def _keep_large_blocks_apart() -> None:
    """Have glibc take blocks of 256 KB and more from the system and give them back when freed.

    It does so at first, but raises the bound, up to 32 MB, whenever a larger one is freed. Tensors
    of one step then lie within the heap, between small blocks that stay, and their address space
    is lost to tensors of another size. It costs page faults, so it is done at the first
    out-of-memory and not before; it lasts as long as the process.
    """
    if sys.platform.startswith("linux"):
        mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # musl has none
        if mallopt is not None:
            mallopt(_M_MMAP_THRESHOLD, 256 * 1024)


_M_MMAP_THRESHOLD = -3
