"""Functions that change one setting of the process, and return how to undo it."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch

CUBLAS = "CUBLAS_WORKSPACE_CONFIG"
CUBLAS_DETERMINISTIC = (":4096:8", ":16:8")
ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
EXPANDABLE = "expandable_segments"


@dataclass
class Outcome:
    """The result of changing a setting.

    Attributes:
        setting: Its name.
        asked: The requested value.
        before: The previous value.
        done: Whether the requested value is in use.
        note: A remark; if the setting was not changed, the reason.
        failed: Whether that is unexpected and deserves a warning.
        undo: Restores the previous value.
    """

    setting: str
    asked: Any
    before: Any = None
    done: bool = True
    note: str = ""
    failed: bool = False
    undo: Callable[[], None] | None = None

    def row(self) -> dict[str, Any]:
        return {
            "setting": self.setting,
            "asked": str(self.asked),
            "before": "" if self.before is None else str(self.before),
            "set": self.done,
            "note": self.note,
        }


def _not_set(setting: str, asked: Any, note: str, *, failed: bool = False) -> Outcome:
    return Outcome(setting, asked, done=False, note=note, failed=failed)


def set_matmul_precision(precision: str, device: torch.device) -> Outcome:
    name = "matmul_precision"
    try:
        before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision(precision)
    except RuntimeError as error:  # torch's newer API is in use, and the two do not mix
        return _not_set(name, precision, str(error).splitlines()[0], failed=True)
    note = ""
    if device.type == "cpu" and precision != "highest":
        note = "on a CPU it permits oneDNN to round, which few CPUs support"
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
    workspace = os.environ.get(CUBLAS)
    torch.use_deterministic_algorithms(True)
    cudnn.deterministic, cudnn.benchmark = True, False
    note = ""
    if workspace not in CUBLAS_DETERMINISTIC:
        os.environ[CUBLAS] = CUBLAS_DETERMINISTIC[0]
        if workspace is not None:
            note = f"{CUBLAS} was {workspace}"
        elif torch.cuda.is_available() and torch.cuda.memory_allocated():
            note = f"if cuBLAS ran before, set {CUBLAS}={CUBLAS_DETERMINISTIC[0]} before you start"

    def undo() -> None:
        torch.use_deterministic_algorithms(before, warn_only=warn_only)
        cudnn.deterministic, cudnn.benchmark = flags
        if workspace is None:
            os.environ.pop(CUBLAS, None)
        else:
            os.environ[CUBLAS] = workspace

    return Outcome("deterministic", True, before, note=note, undo=undo)


def set_expandable_segments(device: torch.device) -> Outcome:
    """Let CUDA's allocator grow its segments instead of adding new ones."""
    name = "allocator"
    if device.type != "cuda":
        return _not_set(name, EXPANDABLE, f"{device.type} has no such allocator")
    if not sys.platform.startswith("linux"):
        return _not_set(name, EXPANDABLE, "only on Linux", failed=True)
    present = _allocator_settings()
    if EXPANDABLE in present:
        return _not_set(name, EXPANDABLE, f"it is set to {present} already")
    wanted = f"{EXPANDABLE}:True"
    try:
        # The whole setting is parsed again: options that are not repeated would be reset.
        _configure_allocator(f"{present},{wanted}" if present else wanted)
    except (RuntimeError, ValueError, AttributeError) as error:
        note = f"{error}; set {ALLOCATOR[1]}={wanted} before you start"
        return _not_set(name, EXPANDABLE, note, failed=True)
    reserved = torch.cuda.memory_reserved(device)
    note = ""
    if reserved:
        note = f"too late for {reserved >> 20} MiB that are reserved already"
    undo = functools.partial(_configure_allocator, present or f"{EXPANDABLE}:False")
    return Outcome(name, EXPANDABLE, present, note=note, undo=undo)


def _allocator_settings() -> str:
    """Return the allocator's settings, from the environment or set since."""
    read = getattr(torch._C, "_accelerator_getAllocatorSettings", None)
    if read is not None:
        return str(read())
    return next((os.environ[name] for name in ALLOCATOR if os.environ.get(name)), "")


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
    """Return the share of ``cpus`` of one process; empty if there are too few CPUs."""
    size = len(cpus) // ranks
    return cpus[rank * size : (rank + 1) * size]


def set_affinity(cpus: Iterable[int]) -> Outcome:
    """Bind the threads of this process, and threads that they start, to CPUs."""
    name, wanted = "cpu_affinity", sorted(cpus)
    if not wanted:
        return _not_set(name, "split", "fewer CPUs than processes", failed=True)
    if not hasattr(os, "sched_setaffinity"):
        return _not_set(name, wanted, f"not possible on {sys.platform}", failed=True)
    return _set_for_all_threads(
        name, wanted, lambda thread: sorted(os.sched_getaffinity(thread)), os.sched_setaffinity
    )


def set_priority(niceness: int) -> Outcome:
    """Set the niceness of the threads of this process, and of threads that they start."""
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
    name: str, wanted: Any, read: Callable[[int], Any], write: Callable[[int, Any], None]
) -> Outcome:
    """Set a value that Linux stores per thread, and that new threads inherit."""
    usual = read(0)
    before = {}
    for thread in _threads():
        with suppress(ProcessLookupError):  # it has ended
            before[thread] = read(thread)

    def write_all(value_of: Callable[[int], Any]) -> None:
        for thread in _threads():
            with suppress(ProcessLookupError):
                write(thread, value_of(thread))

    undo = functools.partial(write_all, lambda thread: before.get(thread, usual))
    try:
        write_all(lambda thread: wanted)
        found = read(0)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
    else:
        if found == wanted:
            return Outcome(name, wanted, usual, undo=undo)
        reason = f"the system set it to {found}"
    with suppress(OSError):
        undo()
    return _not_set(name, wanted, reason, failed=True)


def _threads() -> list[int]:
    import psutil

    return [thread.id for thread in psutil.Process().threads()]
