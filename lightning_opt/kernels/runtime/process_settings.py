"""Functions that change one process setting each, and return how to undo it."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any, NamedTuple

import torch

CUBLAS_ENV_VAR = "CUBLAS_WORKSPACE_CONFIG"
DETERMINISTIC_WORKSPACES = (":4096:8", ":16:8")
ALLOCATOR_ENV_VARS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
EXPANDABLE_SEGMENTS = "expandable_segments"


class Change(NamedTuple):
    """A setting that was changed: its previous value, how to restore it, and a remark."""

    before: Any
    undo: Callable[[], object]
    note: str = ""


class NotSetError(Exception):
    """A setting was not changed.

    Args:
        note: The reason.
        failed: Whether the change failed unexpectedly, so that a warning is due.
    """

    def __init__(self, note: str, failed: bool = False) -> None:
        super().__init__(note)
        self.failed = failed


def set_matmul_precision(precision: str, device: torch.device) -> Change:
    try:
        before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision(precision)
    except RuntimeError as error:  # torch's newer API was used, which excludes this one
        raise NotSetError(str(error).splitlines()[0], failed=True) from None
    note = ""
    if device.type == "cpu" and precision != "highest":
        note = "on a CPU it permits oneDNN to use lower precision, which few CPUs support"
    return Change(before, functools.partial(torch.set_float32_matmul_precision, before), note)


def set_cudnn_benchmark(on: bool, device: torch.device) -> Change:
    """Set whether cuDNN times its kernels for each new shape."""
    if device.type != "cuda" or not torch.backends.cudnn.is_available():
        raise NotSetError(f"{device.type} has no cuDNN")
    if on and torch.are_deterministic_algorithms_enabled():
        raise NotSetError("deterministic algorithms are requested")
    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = on
    return Change(before, lambda: setattr(torch.backends.cudnn, "benchmark", before))


def set_deterministic() -> Change:
    """Allow deterministic algorithms only; others raise an error."""
    before = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    cudnn = torch.backends.cudnn
    flags = (cudnn.deterministic, cudnn.benchmark)
    workspace = os.environ.get(CUBLAS_ENV_VAR)
    torch.use_deterministic_algorithms(True)
    cudnn.deterministic, cudnn.benchmark = True, False
    note = ""
    if workspace not in DETERMINISTIC_WORKSPACES:
        os.environ[CUBLAS_ENV_VAR] = DETERMINISTIC_WORKSPACES[0]
        if workspace is not None:
            note = f"{CUBLAS_ENV_VAR} was {workspace}"
        elif torch.cuda.is_available() and torch.cuda.memory_allocated():
            setting = f"{CUBLAS_ENV_VAR}={DETERMINISTIC_WORKSPACES[0]}"
            note = f"too late if cuBLAS was used already: set {setting} before you start"

    def undo() -> None:
        torch.use_deterministic_algorithms(before, warn_only=warn_only)
        cudnn.deterministic, cudnn.benchmark = flags
        if workspace is None:
            os.environ.pop(CUBLAS_ENV_VAR, None)
        else:
            os.environ[CUBLAS_ENV_VAR] = workspace

    return Change(before, undo, note)


def set_expandable_segments(device: torch.device) -> Change:
    """Let CUDA's allocator grow its segments instead of adding new ones."""
    if device.type != "cuda":
        raise NotSetError(f"{device.type} has no such allocator")
    if not sys.platform.startswith("linux"):
        raise NotSetError("only on Linux", failed=True)
    present = _allocator_settings()
    if EXPANDABLE_SEGMENTS in present:
        raise NotSetError(f"it is set to {present} already")
    requested = f"{EXPANDABLE_SEGMENTS}:True"
    try:
        # The allocator resets options that are missing, so the present ones are repeated.
        _configure_allocator(f"{present},{requested}" if present else requested)
    except (RuntimeError, ValueError, AttributeError) as error:
        note = f"{error}; set {ALLOCATOR_ENV_VARS[1]}={requested} before you start"
        raise NotSetError(note, failed=True) from None
    reserved = torch.cuda.memory_reserved(device)
    note = f"too late for {reserved >> 20} MiB that are reserved already" if reserved else ""
    undo = functools.partial(_configure_allocator, present or f"{EXPANDABLE_SEGMENTS}:False")
    return Change(present, undo, note)


def _allocator_settings() -> str:
    """Return the allocator's current settings; if torch cannot return them, the environment's."""
    read = getattr(torch._C, "_accelerator_getAllocatorSettings", None)
    if read is not None:
        return str(read())
    return next((os.environ[name] for name in ALLOCATOR_ENV_VARS if os.environ.get(name)), "")


def _configure_allocator(settings: str) -> None:
    configure = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
    if configure is None:  # before torch 2.9
        configure = torch.cuda.memory._set_allocator_settings
    configure(settings)


def set_threads(number: int) -> Change:
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    return Change(before, functools.partial(torch.set_num_threads, before))


def share_of(cpus: list[int], rank: int, ranks: int) -> list[int]:
    """Return the part of ``cpus`` for one process; empty if there are fewer CPUs than processes."""
    size = len(cpus) // ranks
    return cpus[rank * size : (rank + 1) * size]


def set_affinity(cpus: Iterable[int]) -> Change:
    """Bind the threads of this process and threads that they start to CPUs."""
    requested = sorted(cpus)
    if not requested:
        raise NotSetError("fewer CPUs than processes", failed=True)
    if not hasattr(os, "sched_setaffinity"):
        raise NotSetError(f"not possible on {sys.platform}", failed=True)
    return _set_for_all_threads(
        requested, lambda thread: sorted(os.sched_getaffinity(thread)), os.sched_setaffinity
    )


def set_priority(niceness: int) -> Change:
    """Set the niceness of the threads of this process and of threads that they start."""
    if not sys.platform.startswith("linux"):
        raise NotSetError(f"not possible on {sys.platform}", failed=True)
    return _set_for_all_threads(
        niceness,
        lambda thread: os.getpriority(os.PRIO_PROCESS, thread),
        lambda thread, value: os.setpriority(os.PRIO_PROCESS, thread, value),
    )


def _set_for_all_threads(
    requested: Any, read: Callable[[int], Any], write: Callable[[int, Any], None]
) -> Change:
    """Set a value that Linux stores per thread and that new threads inherit."""
    process_value = read(0)
    before = {}
    for thread in _threads():
        with suppress(ProcessLookupError):  # the thread has ended
            before[thread] = read(thread)

    def write_all(value_of: Callable[[int], Any]) -> None:
        for thread in _threads():
            with suppress(ProcessLookupError):
                write(thread, value_of(thread))

    undo = functools.partial(write_all, lambda thread: before.get(thread, process_value))
    try:
        write_all(lambda thread: requested)
        actual = read(0)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
    else:
        if actual == requested:
            return Change(process_value, undo)
        reason = f"the system set it to {actual}"
    with suppress(OSError):
        undo()
    raise NotSetError(reason, failed=True)


def _threads() -> list[int]:
    import psutil

    return [thread.id for thread in psutil.Process().threads()]
