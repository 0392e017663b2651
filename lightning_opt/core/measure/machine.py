"""What this machine can do fast: one answer for presets, tuner and doctor."""

from __future__ import annotations

import os
import platform
import shutil
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path

import torch

from lightning_opt.core.measure.cpus import available_cpus

FAST_BF16 = ("avx512_bf16", "amx_bf16")
"""Flags of x86 CPUs that multiply in bfloat16; others convert each number, which took 13 times as
long as float32 where it was measured."""


@lru_cache
def cpu_flags(path: Path = Path("/proc/cpuinfo")) -> frozenset[str]:
    """Return the instruction sets of this CPU; none where the system does not list them."""
    try:
        lines = path.read_text(errors="replace").splitlines()
    except OSError:  # not Linux
        return frozenset()
    for line in lines:
        name, _, value = line.partition(":")
        if name.strip() in ("flags", "Features"):  # x86, ARM
            return frozenset(value.split())
    return frozenset()


def cuda_capability(forks: bool = False) -> tuple[int, int] | None:
    """Return the lowest compute capability of the GPUs, None without any.

    Args:
        forks: Whether processes are to be forked later, which cannot use CUDA if it is used here.
            The driver is asked then, about all the GPUs there are.
    """
    if forks and not torch.cuda.is_initialized():
        return _capability_by_driver()
    if not torch.cuda.is_available():
        return None
    return min(torch.cuda.get_device_capability(i) for i in range(torch.cuda.device_count()))


def _capability_by_driver() -> tuple[int, int] | None:
    try:
        import pynvml

        pynvml.nvmlInit()
        handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
        found = [tuple(pynvml.nvmlDeviceGetCudaComputeCapability(handle)) for handle in handles]
    except Exception:  # noqa: BLE001 - NVMLError, ImportError, OSError: no NVML
        return None
    return min(found, default=None)


def why_no_bf16(device: str, forks: bool = False) -> str | None:
    """Return why bfloat16 would not be fast on a type of device; None if it is."""
    if device == "cuda":
        capability = cuda_capability(forks)
        if capability is None or capability < (8, 0):
            return "no bf16 units: GPUs have them from compute capability 8.0 on"
        return None
    if device == "cpu":
        flags = cpu_flags()
        if flags.isdisjoint(FAST_BF16):
            return (
                f"this CPU has neither {' nor '.join(FAST_BF16)}, and without them bf16 is many "
                "times slower than float32"
            )
        return None
    return f"bf16 on {device!r} has not been measured"


def why_no_compiler(device: str, forks: bool = False) -> str | None:
    """Return why torch.compile could not compile for a type of device; None if it could."""
    if device != "cuda":
        return f"torch.compile for {device!r} has not been tried" if device != "cpu" else None
    usual = [os.environ["CC"]] if os.environ.get("CC") else ["gcc", "clang", "cc", "cl"]
    if not any(map(shutil.which, usual)):
        return f"there is no C compiler ({', '.join(usual)})"
    if find_spec("triton") is None:
        return "triton is not installed"
    capability = cuda_capability(forks)
    if capability is None or capability < (7, 0):
        return "triton needs a GPU of compute capability 7.0 or newer"
    return None


def describe_machine(device: str) -> str:
    """Return the machine in a few words."""
    cpus = available_cpus()
    words = [f"{cpus} CPU{'s' * (cpus > 1)} ({platform.machine()})", f"torch {torch.__version__}"]
    if device == "cuda" and torch.cuda.is_initialized():
        words.insert(0, f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}")
    return ", ".join(words)
