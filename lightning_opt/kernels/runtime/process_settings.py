"""Functions that change one process setting each, and return the result with an undo function."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch

CUBLAS_ENV_VAR = "CUBLAS_WORKSPACE_CONFIG"
DETERMINISTIC_WORKSPACES = (":4096:8", ":16:8")
ALLOCATOR_ENV_VARS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
EXPANDABLE_SEGMENTS = "expandable_segments"


@dataclass
class Outcome:
    """The result of changing a setting.

    Attributes:
        setting: Name of the setting.
        requested: The requested value.
        before: The previous value.
        done: Whether the requested value is in use.
        note: A remark, or the reason why the setting was not changed.
        failed: Whether the change failed unexpectedly, so that a warning is due.
        undo: Restores the previous value.
    """

    setting: str
    requested: Any
    before: Any = None
    done: bool = True
    note: str = ""
    failed: bool = False
    undo: Callable[[], None] | None = None

    def row(self) -> dict[str, Any]:
        return {
            "setting": self.setting,
            "asked": str(self.requested),
            "before": "" if self.before is None else str(self.before),
            "set": self.done,
            "note": self.note,
        }


def _not_set(setting: str, requested: Any, note: str, *, failed: bool = False) -> Outcome:
    return Outcome(setting, requested, done=False, note=note, failed=failed)


def set_matmul_precision(precision: str, device: torch.device) -> Outcome:
    name = "matmul_precision"
    try:
        before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision(precision)
    except RuntimeError as error:  # torch's newer API was used, which excludes this one
        return _not_set(name, precision, str(error).splitlines()[0], failed=True)
    note = ""
    if device.type == "cpu" and precision != "highest":
        note = "on a CPU it permits oneDNN to use lower precision, which few CPUs support"
    undo = functools.partial(torch.set_float32_matmul_precision, before)
    return Outcome(name, precision, before, note=note, undo=undo)


def set_cudnn_benchmark(on: bool, device: torch.device) -> Outcome:
    """Set whether cuDNN times its kernels for each new shape."""
    name = "cudnn_benchmark"
    if device.type != "cuda" or not torch.backends.cudnn.is_available():
        return _not_set(name, on, f"{device.type} has no cuDNN")
    if on and torch.are_deterministic_algorithms_enabled():
        return _not_set(name, on, "deterministic algorithms are requested")
    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = on
    return Outcome(
        name, on, before, undo=lambda: setattr(torch.backends.cudnn, "benchmark", before)
    )


def set_deterministic() -> Outcome:
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

    return Outcome("deterministic", True, before, note=note, undo=undo)


def set_expandable_segments(device: torch.device) -> Outcome:
    """Let CUDA's allocator grow its segments instead of adding new ones."""
    name = "allocator"
    if device.type != "cuda":
        return _not_set(name, EXPANDABLE_SEGMENTS, f"{device.type} has no such allocator")
    if not sys.platform.startswith("linux"):
        return _not_set(name, EXPANDABLE_SEGMENTS, "only on Linux", failed=True)
    present = _allocator_settings()
    if EXPANDABLE_SEGMENTS in present:
        return _not_set(name, EXPANDABLE_SEGMENTS, f"it is set to {present} already")
    requested = f"{EXPANDABLE_SEGMENTS}:True"
    try:
        # The allocator resets options that are missing, so the present ones are repeated.
        _configure_allocator(f"{present},{requested}" if present else requested)
    except (RuntimeError, ValueError, AttributeError) as error:
        note = f"{error}; set {ALLOCATOR_ENV_VARS[1]}={requested} before you start"
        return _not_set(name, EXPANDABLE_SEGMENTS, note, failed=True)
    reserved = torch.cuda.memory_reserved(device)
    note = ""
    if reserved:
        note = f"too late for {reserved >> 20} MiB that are reserved already"
    undo = functools.partial(_configure_allocator, present or f"{EXPANDABLE_SEGMENTS}:False")
    return Outcome(name, EXPANDABLE_SEGMENTS, present, note=note, undo=undo)


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


def set_threads(number: int) -> Outcome:
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    return Outcome("threads", number, before, undo=functools.partial(torch.set_num_threads, before))


def share_of(cpus: list[int], rank: int, ranks: int) -> list[int]:
    """Return the part of ``cpus`` for one process; empty if there are fewer CPUs than processes."""
    size = len(cpus) // ranks
    return cpus[rank * size : (rank + 1) * size]


def set_affinity(cpus: Iterable[int]) -> Outcome:
    """Bind the threads of this process and threads that they start to CPUs."""
    name, requested = "cpu_affinity", sorted(cpus)
    if not requested:
        return _not_set(name, "split", "fewer CPUs than processes", failed=True)
    if not hasattr(os, "sched_setaffinity"):
        return _not_set(name, requested, f"not possible on {sys.platform}", failed=True)
    return _set_for_all_threads(
        name, requested, lambda thread: sorted(os.sched_getaffinity(thread)), os.sched_setaffinity
    )


def set_priority(niceness: int) -> Outcome:
    """Set the niceness of the threads of this process and of threads that they start."""
    name = "priority"
    if not sys.platform.startswith("linux"):
        return _not_set(name, niceness, f"not possible on {sys.platform}", failed=True)
    return _set_for_all_threads(
        name,
        niceness,
        lambda thread: os.getpriority(os.PRIO_PROCESS, thread),
        lambda thread, value: os.setpriority(os.PRIO_PROCESS, thread, value),
    )


def _set_for_all_threads(
    name: str, requested: Any, read: Callable[[int], Any], write: Callable[[int, Any], None]
) -> Outcome:
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
            return Outcome(name, requested, process_value, undo=undo)
        reason = f"the system set it to {actual}"
    with suppress(OSError):
        undo()
    return _not_set(name, requested, reason, failed=True)


def _threads() -> list[int]:
    import psutil

    return [thread.id for thread in psutil.Process().threads()]
