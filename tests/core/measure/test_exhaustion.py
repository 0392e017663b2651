"""Out-of-memory errors are recognized by type and message."""

import errno

import pytest
import torch

from lightning_opt.core.measure.exhaustion import is_out_of_memory

MEANT = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
    MemoryError(),
    OSError(errno.ENOMEM, "Cannot allocate memory"),
    RuntimeError("CUDA error: out of memory"),
    RuntimeError("[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory"),
    RuntimeError("could not create a primitive"),
    RuntimeError("std::bad_alloc"),
    RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"),
    RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
    RuntimeError("GET was unable to find an engine to execute this computation"),
    RuntimeError("NCCL error: unhandled cuda error\nLast error:\nFailed to CUDA calloc 4096 bytes"),
]
OTHERS = [
    RuntimeError("mat1 and mat2 shapes cannot be multiplied"),
    RuntimeError("NCCL error: remote process exited or there was a network error"),
    OSError(errno.ENOENT, "No such file"),
    ValueError("out of memory"),
]
UNCLEAR = [
    RuntimeError("cuDNN error: CUDNN_STATUS_NOT_SUPPORTED. This error may appear if you ..."),
    RuntimeError("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`"),
]


@pytest.mark.parametrize("error", [*MEANT, *OTHERS], ids=lambda error: str(error)[:60])
def test_out_of_memory_errors_are_recognized(error):
    assert is_out_of_memory(error) == (error in MEANT)


@pytest.mark.parametrize("error", UNCLEAR, ids=lambda error: str(error)[:60])
def test_unclear_errors_count_only_on_a_full_device(monkeypatch, error):
    assert not is_out_of_memory(error)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    for free, full in ((90, False), (2, True)):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda free=free: (free, 100))
        assert is_out_of_memory(error) == full
