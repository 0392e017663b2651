"""CPUs and GPUs of this machine, the features they support, and the limits of control groups."""

from __future__ import annotations

import logging
import os
import platform
import shutil
import subprocess
from collections.abc import Callable
from contextlib import suppress
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any, TypeAlias

import torch

log = logging.getLogger(__name__)

FAST_BF16 = ("avx512_bf16", "amx_bf16")
"""Flags of x86 CPUs that multiply in bfloat16. Other CPUs convert each number, which makes products
13 times as slow as in float32."""


def allowed_cpus() -> list[int]:
    """Return the CPUs that this thread may run on, or all CPUs where the system has no affinity."""
    if hasattr(os, "sched_getaffinity"):  # not on macOS and Windows
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def available_cpus(root: Path = Path("/")) -> int:
    """Return how many CPUs affinity and control groups allow, at least 1."""
    cpus = len(allowed_cpus())
    quota = find_cpu_quota(root)
    return max(1, cpus if quota is None else min(cpus, int(quota)))


@cache
def cpu_flags(path: Path = Path("/proc/cpuinfo")) -> frozenset[str]:
    for line in _lines(path):  # only Linux has the file
        name, _, value = line.partition(":")
        if name.strip() in ("flags", "Features"):  # x86, ARM
            return frozenset(value.split())
    return frozenset()


def cuda_capability(forks: bool = False) -> tuple[int, int] | None:
    """Return the lowest compute capability of the GPUs, or None without a GPU.

    If ``forks``, it asks the driver instead of CUDA: forked processes cannot use CUDA after this
    process has initialized it.
    """
    if forks and not torch.cuda.is_initialized():
        return lowest_capability()
    if not torch.cuda.is_available():
        return None
    return min(torch.cuda.get_device_capability(i) for i in range(torch.cuda.device_count()))


def why_no_bf16(device: str, forks: bool = False) -> str | None:
    """Return why bfloat16 is not fast on this type of device; None if it is."""
    if device == "cuda":
        reason = "no bf16 units: GPUs have them from compute capability 8.0 on"
        return _why_too_old((8, 0), reason, forks)
    if device != "cpu":
        return f"bf16 on {device!r} has not been measured"
    if not cpu_flags().isdisjoint(FAST_BF16):
        return None
    return (
        f"this CPU has neither {' nor '.join(FAST_BF16)}, and without them bf16 is many times "
        "slower than float32"
    )


def why_no_compiler(device: str, forks: bool = False) -> str | None:
    """Return why torch.compile cannot compile for this type of device; None if it can."""
    if device != "cuda":
        return None if device == "cpu" else f"torch.compile for {device!r} has not been tried"
    # Triton takes CC as the name of a program, without options.
    compilers = [os.environ["CC"]] if os.environ.get("CC") else ["gcc", "clang", "cc", "cl"]
    if not any(map(shutil.which, compilers)):
        return f"there is no C compiler of the name {' or '.join(map(repr, compilers))}"
    if find_spec("triton") is None:
        return "triton is not installed"
    return _why_too_old((7, 0), "triton needs a GPU of compute capability 7.0 or newer", forks)


def _why_too_old(needed: tuple[int, int], reason: str, forks: bool) -> str | None:
    capability = cuda_capability(forks)
    if capability is None:
        return "the GPU's compute capability is unknown: NVML or the GPU is not available"
    return reason if capability < needed else None


def describe_machine(device: str) -> str:
    cpus = available_cpus()
    parts = [f"{cpus} CPU{'s' * (cpus > 1)} ({platform.machine()})", f"torch {torch.__version__}"]
    if device == "cuda" and torch.cuda.is_initialized():
        parts.insert(0, f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}")
    return ", ".join(parts)


def commit_of_folder() -> str:
    """Return the git commit of the working directory, or "" outside a repository."""
    command = ["git", "rev-parse", "--short", "HEAD"]
    with suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(command, capture_output=True, text=True, timeout=5, check=True)
        return done.stdout.strip()
    return ""


# --- the NVIDIA driver (NVML) ---------------------------------------------------------------------
# Devices are found by UUID, because NVML and CUDA number them differently under
# `CUDA_VISIBLE_DEVICES`, in containers and with MIG.


@cache
def open_nvml() -> ModuleType | None:
    """Return the initialized NVML library, or None, logged once, if it is unavailable."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception as error:  # noqa: BLE001 - NVMLError, ImportError, OSError: no NVML
        log.info(
            "NVML is not available (%s): the GPU memory of other processes is unknown; "
            "everything else works.",
            error,
        )
        return None
    library: ModuleType = pynvml
    return library


def lowest_capability() -> tuple[int, int] | None:
    """Return the lowest compute capability of all GPUs, without using CUDA; None without NVML."""
    library = open_nvml()
    if library is None:
        return None
    with suppress(library.NVMLError):
        handles = map(library.nvmlDeviceGetHandleByIndex, range(library.nvmlDeviceGetCount()))
        capabilities = map(library.nvmlDeviceGetCudaComputeCapability, handles)
        return min(map(tuple, capabilities), default=None)
    return None


def used_memory(library: ModuleType, handle: Any) -> int | None:
    """Return the bytes used by all processes, without the driver's reserve; None if unknown."""
    with suppress(library.NVMLError):
        return int(library.nvmlDeviceGetMemoryInfo(handle, version=library.nvmlMemory_v2).used)
    return None


def find_handle(library: ModuleType, uuid: str) -> Any:
    names = [uuid] if uuid.startswith(("GPU-", "MIG-")) else [f"GPU-{uuid}", f"MIG-{uuid}"]
    for name in names:
        with suppress(library.NVMLError):
            return library.nvmlDeviceGetHandleByUUID(name)
    return None


# --- control groups, version 1 and 2 --------------------------------------------------------------

MemoryGroup: TypeAlias = Callable[[], tuple[int, int] | None]
"""Reads bytes used and the limit of a control group, or None if it has no limit."""

MEMORY_FILES = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)
"""Limit, use, and the statistic of inactive file caches in version 2 and in version 1."""

NO_LIMIT = 1 << 60
"""Larger limits mean no limit: version 1 reports about 9.2e18."""


def find_memory_groups(root: Path = Path("/")) -> list[MemoryGroup]:
    """Return the groups that limit this process: its own group and the group's parents."""
    groups = [partial(_read_memory, folder) for folder in _folders(root, "memory")]
    return [group for group in groups if group() is not None]


def _read_memory(folder: Path) -> tuple[int, int] | None:
    for limit_file, used_file, inactive in MEMORY_FILES:
        limit, used = ("".join(_lines(folder / name)) for name in (limit_file, used_file))
        if limit.isdigit() and used.isdigit() and int(limit) < NO_LIMIT:  # "max" is none
            statistics = dict(line.split() for line in _lines(folder / "memory.stat"))
            # The kernel drops inactive file caches before it kills a process: count them as free.
            return max(0, int(used) - int(statistics.get(inactive, 0))), int(limit)
    return None


def find_cpu_quota(root: Path = Path("/")) -> float | None:
    """Return the smallest CPU quota of this process's groups, in CPUs, or None without a quota."""
    quotas = []
    for folder in _folders(root, "cpu"):
        files = ("cpu.max", "cpu.cfs_quota_us", "cpu.cfs_period_us")  # version 2, version 1
        limit = " ".join(line for name in files for line in _lines(folder / name)).split()
        if limit and limit[0].isdigit():  # otherwise "max" or -1
            period = int([*limit, "100000"][1])  # the kernel's default, if there is no file
            quotas.append(int(limit[0]) / period)
    return min(quotas, default=None)


def _folders(root: Path, controller: str) -> list[Path]:
    """Return the folders of this process's groups, each followed by its parents."""
    found: list[Path] = []
    for line in _lines(root / "proc/self/cgroup"):
        number, controllers, path = line.split(":", 2)
        is_version_2 = number == "0"
        if not is_version_2 and controller not in controllers.split(","):
            continue
        mount = root / "sys/fs/cgroup" / ("" if is_version_2 else controller)
        names = path.strip("/").split("/")
        # A container may see only a part of the host's path, or none of it.
        inside = (mount.joinpath(*names[start:]) for start in range(len(names)))
        folder = next((each for each in inside if each.is_dir() and ".." not in names), mount)
        found += [folder, *(each for each in folder.parents if each.is_relative_to(mount))]
    return found


def _lines(file: Path) -> list[str]:
    with suppress(OSError):
        return file.read_text(errors="replace").splitlines()
    return []
