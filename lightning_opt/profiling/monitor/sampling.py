"""A thread that samples the run's processes and its GPU."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch

from lightning_opt.core.measure.machine import find_handle, open_nvml, used_memory
from lightning_opt.core.measure.memory import MB

if TYPE_CHECKING:
    import psutil

log = logging.getLogger(__name__)

MAX_SAMPLES = 4096
"""Maximum number of samples kept until the next report. The oldest samples are dropped."""

JOIN_SECONDS = 5.0
"""Maximum wait for the thread at the end of a run. If the driver hangs, the thread never ends."""

THREAD_NAME = "lightning_opt.PerformanceMonitor"


def read_gpu(library: ModuleType, handle: Any) -> dict[str, float]:
    """Read a GPU through NVML. This takes a few milliseconds, and other Python threads can run.

    Args:
        library: The module ``pynvml``, initialised.
        handle: The handle of the device or MIG slice.

    Returns:
        Values by logged name: the percentage of recent time in which a kernel ran, the memory used
        by all processes, power, and temperature. Values that the driver does not provide (such as
        the use of a MIG slice) are missing.
    """
    found: dict[str, float] = {}
    with contextlib.suppress(library.NVMLError):
        found["gpu_percent"] = float(library.nvmlDeviceGetUtilizationRates(handle).gpu)
    memory = used_memory(library, handle)
    if memory is not None:
        found["gpu_memory_mb"] = memory / MB
    with contextlib.suppress(library.NVMLError):
        found["gpu_watts"] = library.nvmlDeviceGetPowerUsage(handle) / 1000
    with contextlib.suppress(library.NVMLError):
        sensor = library.NVML_TEMPERATURE_GPU
        found["gpu_celsius"] = float(library.nvmlDeviceGetTemperature(handle, sensor))
    return found


def find_gpu(device: torch.device) -> Callable[[], dict[str, float]] | None:
    """Return a function that reads a GPU; None if the device is not a GPU that NVML lists.

    CUDA and NVML number devices differently, so the device is identified by its UUID. A MIG slice
    is identified by its name in ``CUDA_VISIBLE_DEVICES``, because CUDA may report the UUID of the
    whole board.
    """
    library = open_nvml() if device.type == "cuda" else None
    if library is None:
        return None
    index = torch.cuda.current_device() if device.index is None else device.index
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    name = visible[index].strip() if index < len(visible) else ""
    if not name.startswith("MIG-"):
        name = str(torch.cuda.get_device_properties(index).uuid)
    handle = find_handle(library, name)
    return None if handle is None else partial(read_gpu, library, handle)


def descendants(pid: int) -> list[int]:
    """Return the process IDs of all descendants of ``pid``."""
    import psutil

    with contextlib.suppress(OSError, psutil.Error):  # the process has just ended
        if sys.platform != "linux":
            return [child.pid for child in psutil.Process(pid).children(recursive=True)]
        # psutil would read every process of the machine.
        lists = Path(f"/proc/{pid}/task").glob("*/children")
        direct = [int(child) for file in lists for child in file.read_text().split()]
        return direct + [below for child in direct for below in descendants(child)]
    return []


class Sampler:
    """A thread that takes samples until it is stopped.

    A sample is a dict of values by logged name. It contains CPU percent of the process and its
    descendants (100 is one core), their resident memory (shared pages count in each), the number of
    descendants, and the values of the GPU.

    Args:
        seconds: Seconds between two samples.
        gpu: A function that reads the GPU; None without a GPU or without NVML.
    """

    def __init__(self, seconds: float, gpu: Callable[[], dict[str, float]] | None) -> None:
        self._seconds, self._gpu = seconds, gpu
        self._processes: dict[int, psutil.Process] = {}
        self._samples: deque[dict[str, float]] = deque(maxlen=MAX_SAMPLES)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name=THREAD_NAME, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._sample()  # the first call of `cpu_percent` only starts its measurement
            while not self._ended.wait(self._seconds):
                self._samples.append(self._sample())
        except Exception as error:  # noqa: BLE001 - a failed sample must not end the run
            log.warning("PerformanceMonitor stopped sampling: %r. Training continues.", error)

    def _sample(self) -> dict[str, float]:
        import psutil

        known, self._processes = self._processes, {}
        percent, resident = 0.0, 0
        for pid in (os.getpid(), *descendants(os.getpid())):
            with contextlib.suppress(psutil.Error):  # the process has just ended
                process = known.get(pid) or psutil.Process(pid)
                percent += process.cpu_percent()
                resident += process.memory_info().rss
                self._processes[pid] = process
        return {
            "cpu_percent": percent,
            "rss_mb": resident / MB,
            "child_processes": float(len(self._processes) - 1),
            **(self._gpu() if self._gpu is not None else {}),
        }

    def take(self) -> list[dict[str, float]]:
        """Return the samples since the last call, oldest first."""
        return [self._samples.popleft() for _ in range(len(self._samples))]

    def stop(self) -> None:
        """Stop the thread, and wait until it has ended."""
        self._ended.set()
        self._thread.join(timeout=JOIN_SECONDS)
