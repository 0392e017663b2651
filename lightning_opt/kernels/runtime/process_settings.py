"""Settings of the process, each of which says how it went and how it is undone."""

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
    """How setting something went.

    Attributes:
        setting: Its name.
        asked: What it was to be.
        before: What it was.
        done: Whether it is so now.
        note: What there is to know; where it is not done, why.
        failed: Whether it should have been possible.
        undo: Puts back what was there before.
    """

    setting: str
    asked: Any
    before: Any = None
    done: bool = True
    note: str = ""
    failed: bool = False
    undo: Callable[[], None] | None = None

    @classmethod
    def refused(cls, setting: str, asked: Any, note: str, *, failed: bool = False) -> Outcome:
        """Return that it is not done."""
        return cls(setting, asked, done=False, note=note, failed=failed)

    def row(self) -> dict[str, Any]:
        """Return it as a row of a report."""
        return {
            "setting": self.setting,
            "asked": str(self.asked),
            "before": "" if self.before is None else str(self.before),
            "set": self.done,
            "note": self.note,
        }


def set_matmul_precision(precision: str, device: torch.device) -> Outcome:
    """Set how exactly matrices in float32 are multiplied."""
    name = "matmul_precision"
    try:
        before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision(precision)
    except RuntimeError as error:  # torch's newer settings are in use, and do not mix with this
        return Outcome.refused(name, precision, str(error).splitlines()[0], failed=True)
    note = ""
    if device.type == "cpu" and precision != "highest":
        note = "on a CPU a permission for oneDNN, which few CPUs can use"
    undo = functools.partial(torch.set_float32_matmul_precision, before)
    return Outcome(name, precision, before, note=note, undo=undo)


def set_cudnn_benchmark(on: bool, device: torch.device) -> Outcome:
    """Have cuDNN try its kernels for each new shape, or not."""
    name = "cudnn_benchmark"
    if device.type != "cuda" or not torch.backends.cudnn.is_available():
        return Outcome.refused(name, on, f"{device.type} has no cuDNN")
    if on and torch.are_deterministic_algorithms_enabled():
        return Outcome.refused(name, on, "deterministic algorithms are asked for")
    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = on
    return Outcome(
        name, on, before, undo=lambda: setattr(torch.backends.cudnn, "benchmark", before)
    )


def set_deterministic() -> Outcome:
    """Allow only algorithms that give the same bits each time, or an error."""
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
    """Have CUDA's allocator grow its segments instead of adding new ones."""
    name = "allocator"
    if device.type != "cuda":
        return Outcome.refused(name, EXPANDABLE, f"{device.type} has no such allocator")
    if not sys.platform.startswith("linux"):
        return Outcome.refused(name, EXPANDABLE, "only on Linux", failed=True)
    present = _allocator_settings()
    if EXPANDABLE in present:
        return Outcome.refused(name, EXPANDABLE, f"it is told {present} already")
    wanted = f"{EXPANDABLE}:True"
    try:
        # All of it is parsed anew: what is not named again would be forgotten.
        _configure_allocator(f"{present},{wanted}" if present else wanted)
    except (RuntimeError, ValueError, AttributeError) as error:
        note = f"{error}; set {ALLOCATOR[1]}={wanted} before you start"
        return Outcome.refused(name, EXPANDABLE, note, failed=True)
    reserved = torch.cuda.memory_reserved(device)
    note = ""
    if reserved:
        note = f"too late for {reserved >> 20} MiB that were reserved before, and stay as they are"
    undo = functools.partial(_configure_allocator, present or f"{EXPANDABLE}:False")
    return Outcome(name, EXPANDABLE, present, note=note, undo=undo)


def _allocator_settings() -> str:
    """Return what the allocator was told last, by the environment or since."""
    told = getattr(torch._C, "_accelerator_getAllocatorSettings", None)
    if told is not None:
        return str(told())
    return next((os.environ[name] for name in ALLOCATOR if os.environ.get(name)), "")


def _configure_allocator(settings: str) -> None:
    configure = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
    if configure is None:  # before torch 2.9
        configure = torch.cuda.memory._set_allocator_settings
    configure(settings)


def set_threads(number: int) -> Outcome:
    """Set the threads of one operation of torch on the CPU."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    return Outcome("threads", number, before, undo=functools.partial(torch.set_num_threads, before))


def share_of(cpus: list[int], rank: int, ranks: int) -> list[int]:
    """Return the part of ``cpus`` that is process ``rank``'s of ``ranks``; empty if too few."""
    size = len(cpus) // ranks
    return cpus[rank * size : (rank + 1) * size]


def set_affinity(cpus: Iterable[int]) -> Outcome:
    """Bind the threads of this process, and those that they start, to some CPUs."""
    name, wanted = "cpu_affinity", sorted(cpus)
    if not hasattr(os, "sched_setaffinity"):
        return Outcome.refused(name, wanted, f"not possible on {sys.platform}", failed=True)
    return _for_all_threads(
        name, wanted, lambda thread: sorted(os.sched_getaffinity(thread)), os.sched_setaffinity
    )


def set_priority(niceness: int) -> Outcome:
    """Set the niceness of the threads of this process, and those that they start."""
    name = "priority"
    if not sys.platform.startswith("linux"):
        return Outcome.refused(name, niceness, f"not possible on {sys.platform}", failed=True)
    return _for_all_threads(
        name,
        niceness,
        lambda thread: os.getpriority(os.PRIO_PROCESS, thread),
        lambda thread, value: os.setpriority(os.PRIO_PROCESS, thread, value),
    )


def _for_all_threads(
    name: str, wanted: Any, read: Callable[[int], Any], write: Callable[[int, Any], None]
) -> Outcome:
    """Set what Linux keeps for each thread, and a new thread takes over from its parent."""
    usual, before = read(0), {}
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
        reason = f"the system made it {found}"
    with suppress(OSError):
        undo()
    return Outcome.refused(name, wanted, reason, failed=True)


def _threads() -> list[int]:
    import psutil

    return [thread.id for thread in psutil.Process().threads()]
