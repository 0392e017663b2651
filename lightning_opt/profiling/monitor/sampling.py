"""A thread that samples the run's processes and its GPU."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections import deque
from collections.abc import Callable
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
"""Maximum wait for the thread at the end of a run. The thread never ends if the driver hangs."""

THREAD_NAME = "lightning_opt.PerformanceMonitor"


class GpuReader:
    """Reads one GPU through NVML.

    Args:
        library: The module ``pynvml``, initialised.
        handle: The handle of the device or MIG slice.
    """

    def __init__(self, library: ModuleType, handle: Any) -> None:
        self._library, self._handle = library, handle

    @property
    def name(self) -> str:
        """The GPU's UUID in NVML's notation."""
        return str(self._query(self._library.nvmlDeviceGetUUID))

    def read(self) -> dict[str, float]:
        """Read the GPU. This takes up to a few milliseconds, and other Python threads can run.

        Returns:
            Values by logged name: the percentage of recent time in which a kernel ran, the memory
            used by all processes, power, and temperature. Values that the driver does not provide
            (such as the use of a MIG slice) are missing.
        """
        library = self._library
        use = self._query(library.nvmlDeviceGetUtilizationRates)
        memory = used_memory(library, self._handle)
        watts = self._query(library.nvmlDeviceGetPowerUsage)
        celsius = self._query(library.nvmlDeviceGetTemperature, library.NVML_TEMPERATURE_GPU)
        found = {
            "gpu_percent": None if use is None else float(use.gpu),
            "gpu_memory_mb": None if memory is None else memory / MB,
            "gpu_watts": None if watts is None else watts / 1000,
            "gpu_celsius": None if celsius is None else float(celsius),
        }
        return {name: value for name, value in found.items() if value is not None}

    def _query(self, function: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return function(self._handle, *arguments)
        except self._library.NVMLError:
            return None


def find_gpu(device: torch.device) -> GpuReader | None:
    """Return a reader for a CUDA device; None without NVML, or if NVML cannot find the device.

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
    return None if handle is None else GpuReader(library, handle)


class Processes:
    """CPU time and memory of this process and all its descendants."""

    def __init__(self) -> None:
        self._known: dict[int, psutil.Process] = {}
        self.sample()

    def sample(self) -> tuple[float, int, int]:
        """Return CPU percent since the last call, resident bytes, and the number of descendants."""
        import psutil

        known, self._known = self._known, {}
        percent, resident = 0.0, 0
        for pid in (os.getpid(), *descendants(os.getpid())):
            with contextlib.suppress(psutil.Error):  # the process has just ended
                process = known.get(pid) or psutil.Process(pid)
                percent += process.cpu_percent()
                resident += process.memory_info().rss
                self._known[pid] = process
        return percent, resident, len(self._known) - 1


def descendants(pid: int) -> list[int]:
    """Return the process IDs of all descendants of ``pid``.

    Linux usually lists the children of each thread. Otherwise psutil has to check every process.
    """
    try:
        direct = [
            int(child)
            for task in os.listdir(f"/proc/{pid}/task")  # noqa: PTH208 - faster
            for child in _read(f"/proc/{pid}/task/{task}/children").split()
        ]
    except OSError:
        import psutil

        with contextlib.suppress(psutil.Error):  # the process has just ended
            return [child.pid for child in psutil.Process(pid).children(recursive=True)]
        return []
    return direct + [below for child in direct for below in descendants(child)]


def _read(path: str) -> str:
    with open(path) as file:  # noqa: PTH123 - pathlib takes twice as long
        return file.read()


class Sampler:
    """A thread that takes samples until it is stopped.

    A sample is a dict of values by logged name. It contains CPU percent of the process and its
    descendants (100 is one core), their resident memory (shared pages count in each), the number of
    descendants, and the values of the GPU.

    Args:
        seconds: Seconds between two samples.
        gpu: The reader of the GPU; None without a GPU or without NVML.

    Attributes:
        failure: The error that ended the thread; empty if there was none.
    """

    def __init__(self, seconds: float, gpu: GpuReader | None) -> None:
        self.failure = ""
        self._seconds, self._gpu = seconds, gpu
        self._samples: deque[dict[str, float]] = deque(maxlen=MAX_SAMPLES)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name=THREAD_NAME, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            processes = Processes()
            while not self._ended.wait(self._seconds):
                percent, resident, children = processes.sample()
                sample = {
                    "cpu_percent": percent,
                    "rss_mb": resident / MB,
                    "child_processes": float(children),
                }
                self._samples.append(sample | (self._gpu.read() if self._gpu is not None else {}))
        except Exception as error:  # noqa: BLE001 - a failed sample must not end the run
            self.failure = f"{type(error).__name__}: {error}"
            log.warning("PerformanceMonitor stopped sampling: %s", self.failure)

    def take(self) -> list[dict[str, float]]:
        """Return the samples since the last call, oldest first."""
        return [self._samples.popleft() for _ in range(len(self._samples))]

    def stop(self) -> None:
        """Stop the thread, and wait until it has ended."""
        self._ended.set()
        self._thread.join(timeout=JOIN_SECONDS)
