"""Out-of-memory: how to tell it from other errors, and what can be let go of afterwards."""

from __future__ import annotations

import errno
import functools
import gc

import torch

from lightning_opt.core.measure.malloc import libc_function, malloc_trim

MESSAGES = (
    "out of memory",  # of CUDA, and of other backends of torch
    "defaultcpuallocator: can't allocate memory",
    "defaultcpuallocator: not enough memory",
    "could not create a primitive",  # oneDNN
    "could not create a memory object",
    "std::bad_alloc",
    "alloc_failed",  # of cuBLAS, cuDNN, cuFFT, cuSOLVER and cuSPARSE
    "allocation_failed",  # of cuDNN from version 9 on
    "unable to find an engine to execute",  # since no workspace was to be had
    "failed to cuda calloc",  # of NCCL
)
"""Parts, in lower case, of the messages of a ``RuntimeError`` that means it."""

UNCLEAR = ("cudnn_status_not_supported", "cublas_status_not_initialized")
"""Those that mean it where the device is full, and something else otherwise."""

FULL = 0.05
"""Share of a device that is free at most where a workspace could not be allocated."""

CAUGHT = (RuntimeError, MemoryError, OSError)
"""The types under which out-of-memory appears; most errors of these types are something else."""


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an allocation has failed, on a device or on the host."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    if not isinstance(error, RuntimeError):
        return False
    message = str(error).lower()
    if any(part in message for part in UNCLEAR) and torch.cuda.is_initialized():
        free, total = torch.cuda.mem_get_info()
        return free < FULL * total
    return any(part in message for part in MESSAGES)


def free_unused(device: torch.device) -> None:
    """Free what nobody uses."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    elif device.type == "cpu":
        malloc_trim()


def recover_memory(device: torch.device) -> None:
    """Free what nobody uses, after memory has run out.

    Call it outside ``except``: a traceback holds what its frames hold.
    """
    free_unused(device)
    if device.type == "cpu":
        _keep_large_blocks_apart()


@functools.cache
def _keep_large_blocks_apart() -> None:
    """Have glibc take blocks of 256 KB and more from the system and give them back when freed.

    It does so at first, but raises the bound, up to 32 MB, whenever a larger one is freed. Tensors
    of one step then lie within the heap, between small blocks that stay, and their address space
    is lost to tensors of another size. It costs page faults, so it is done at the first
    out-of-memory and not before; it lasts as long as the process.
    """
    mallopt = libc_function("mallopt")  # musl has none
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, 256 * 1024)


_M_MMAP_THRESHOLD = -3
