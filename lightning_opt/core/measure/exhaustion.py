"""Recognizing out-of-memory errors, and freeing memory after them."""

from __future__ import annotations

import errno
import functools
import gc

import torch

from lightning_opt.core.measure.memory import libc_function, malloc_trim

MESSAGES = (
    "out of memory",  # CUDA and other backends of torch
    "defaultcpuallocator: can't allocate memory",
    "defaultcpuallocator: not enough memory",
    "could not create a primitive",  # oneDNN
    "could not create a memory object",
    "std::bad_alloc",
    "alloc_failed",  # cuBLAS, cuDNN, cuFFT, cuSOLVER, cuSPARSE
    "allocation_failed",  # cuDNN 9 and newer
    "unable to find an engine to execute",  # cuDNN without memory for a workspace
    "failed to cuda calloc",  # NCCL
)
"""Lower-case parts of the messages of out-of-memory ``RuntimeError``s."""

AMBIGUOUS_MESSAGES = ("cudnn_status_not_supported", "cublas_status_not_initialized")
"""Parts of messages that mean out-of-memory only if the device is almost full."""

MIN_FREE_SHARE = 0.05
"""A device with a smaller share of free memory is almost full."""

CAUGHT = (RuntimeError, MemoryError, OSError)
"""The types of out-of-memory errors, to be checked with :func:`is_out_of_memory`."""


def is_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    if not isinstance(error, RuntimeError):
        return False
    message = str(error).lower()
    if any(part in message for part in AMBIGUOUS_MESSAGES) and torch.cuda.is_initialized():
        free, total = torch.cuda.mem_get_info()
        return free < MIN_FREE_SHARE * total
    return any(part in message for part in MESSAGES)


def free_unused(device: torch.device) -> None:
    gc.collect()
    empty_cache(device)


def empty_cache(device: torch.device) -> None:
    """Return the memory to the system that an allocator keeps for reuse."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
    elif device.type == "cpu":
        malloc_trim()


def recover_memory(device: torch.device) -> None:
    """Free unused memory after an out-of-memory error.

    Call it outside ``except``: inside, the traceback keeps the memory of its frames alive.
    """
    free_unused(device)
    if device.type == "cpu":
        _keep_large_blocks_apart()


@functools.cache
def _keep_large_blocks_apart() -> None:
    """Make glibc map blocks of at least 256 KB separately and unmap them when they are freed.

    By default glibc raises this threshold, up to 32 MB, whenever a larger block is freed, and
    tensors then fragment the heap. Separate blocks cost page faults.
    """
    mallopt = libc_function("mallopt")  # musl has none
    if mallopt is not None:
        mallopt(-3, 256 * 1024)  # M_MMAP_THRESHOLD
