"""What the driver says of the GPU that a process trains on: use, memory, power, temperature."""

from __future__ import annotations

import os
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

from lightning_opt.core.measure.memory import MB
from lightning_opt.core.measure.nvml import find_handle, open_nvml, used_memory


class GpuReader:
    """Asks NVML for one device.

    Args:
        library: The module ``pynvml``, initialised.
        handle: Of the device or MIG slice.
    """

    def __init__(self, library: ModuleType, handle: Any) -> None:
        self._library, self._handle = library, handle

    @property
    def name(self) -> str:
        """Its UUID, as NVML writes it."""
        return str(self._answer(self._library.nvmlDeviceGetUUID))

    def read(self) -> dict[str, float]:
        """Ask. This takes up to some milliseconds, in which Python's lock is free.

        Returns:
            By the names under which they are logged: the percent of the last moments in which a
            kernel ran, the memory that all processes have taken, power, and temperature of the
            chip. What the driver does not tell, as of a MIG slice's use, is left out.
        """
        library = self._library
        use = self._answer(library.nvmlDeviceGetUtilizationRates)
        memory = used_memory(library, self._handle)
        watts = self._answer(library.nvmlDeviceGetPowerUsage)
        celsius = self._answer(library.nvmlDeviceGetTemperature, library.NVML_TEMPERATURE_GPU)
        found = {
            "gpu_percent": None if use is None else float(use.gpu),
            "gpu_memory_mb": None if memory is None else memory / MB,
            "gpu_watts": None if watts is None else watts / 1000,
            "gpu_celsius": None if celsius is None else float(celsius),
        }
        return {name: value for name, value in found.items() if value is not None}

    def _answer(self, question: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return question(self._handle, *arguments)
        except self._library.NVMLError:
            return None


def find_gpu(device: torch.device) -> GpuReader | None:
    """Return the reader of a CUDA device; None without NVML, or if it does not know the device.

    CUDA and NVML number devices differently, so it is found by its UUID, and a MIG slice by the
    name that ``CUDA_VISIBLE_DEVICES`` gives it, for which CUDA may say the UUID of the whole board.
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
