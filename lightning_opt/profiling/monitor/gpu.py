"""What the driver says of the GPU that a process trains on: use, memory, power, temperature.

CUDA numbers the devices that it may see, fastest first or as ``CUDA_VISIBLE_DEVICES`` lists them;
NVML numbers all devices of the machine by their place on the bus. So a device is found by its name:
the UUID that CUDA gives it, or the MIG slice that ``CUDA_VISIBLE_DEVICES`` names.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

import torch

from lightning_opt.core.nvml import find_handle, open_nvml, read_memory


class GpuReading(NamedTuple):
    """One look at a device; what the driver does not tell is None.

    Attributes:
        percent: Share of the last moments in which a kernel ran, in percent.
        memory: Bytes taken by all processes.
        watts: Power drawn; of the whole GPU for a MIG slice.
        celsius: Temperature of the chip; of the whole GPU for a MIG slice.
    """

    percent: float | None
    memory: int | None
    watts: float | None
    celsius: float | None


class GpuReader:
    """Asks NVML for one device.

    Args:
        library: The module ``pynvml``, initialised.
        handle: Of the device or MIG slice.
        name: Its UUID as NVML writes it.
    """

    def __init__(self, library: ModuleType, handle: Any, name: str) -> None:
        self.name = name
        self._library, self._handle = library, handle
        # Power and temperature are those of the board; a slice has none of its own.
        self._board = handle
        if _answer(library, library.nvmlDeviceIsMigDeviceHandle, handle):
            self._board = library.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(handle)

    @property
    def is_slice(self) -> bool:
        """Whether it is a MIG slice, whose use the driver does not tell."""
        return self._board is not self._handle

    def read(self) -> GpuReading:
        """Ask. This takes up to some milliseconds, in which Python's lock is free."""
        library, board = self._library, self._board
        # The use of the board would be that of the neighbours too.
        use = None
        if not self.is_slice:
            use = _answer(library, library.nvmlDeviceGetUtilizationRates, board)
        memory = read_memory(library, self._handle)
        watts = _answer(library, library.nvmlDeviceGetPowerUsage, board)
        sensor = library.NVML_TEMPERATURE_GPU
        celsius = _answer(library, library.nvmlDeviceGetTemperature, board, sensor)
        return GpuReading(
            percent=None if use is None else float(use.gpu),
            memory=None if memory is None else int(memory.used),
            watts=None if watts is None else watts / 1000,
            celsius=None if celsius is None else float(celsius),
        )


def find_gpu(device: torch.device) -> GpuReader | None:
    """Return the reader of a CUDA device; None without NVML, or if it does not know the device."""
    if device.type != "cuda":
        return None
    library = open_nvml()
    if library is None:
        return None
    index = torch.cuda.current_device() if device.index is None else device.index
    uuid = getattr(torch.cuda.get_device_properties(index), "uuid", None)
    handle = find_visible(library, index, None if uuid is None else str(uuid))
    if handle is None:
        return None
    name = _answer(library, library.nvmlDeviceGetUUID, handle)
    return GpuReader(library, handle, str(name))


def find_visible(library: ModuleType, index: int, uuid: str | None) -> Any:
    """Return NVML's handle of the device that CUDA calls ``index``; None if it knows none.

    Args:
        library: The module ``pynvml``, initialised.
        index: As in ``cuda:<index>``.
        uuid: What CUDA says is the UUID, without prefix; None where torch does not tell.
    """
    entries = [entry.strip() for entry in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")]
    entry = entries[index] if index < len(entries) else ""
    if entry.startswith("MIG-"):
        # Some versions of CUDA give a slice the UUID of its board, so its own name goes first.
        handle = find_handle(library, entry)
        if handle is not None:
            return handle
    if uuid is None:
        return _find_abbreviated(library, entry) if entry.startswith("GPU-") else None
    handle = find_handle(library, uuid)
    if handle is None or _answer(library, library.nvmlDeviceIsMigDeviceHandle, handle):
        return handle
    mode = _answer(library, library.nvmlDeviceGetMigMode, handle)
    if mode is None or mode[0] != library.NVML_DEVICE_MIG_ENABLE:
        return handle
    # A board in MIG mode that is chosen by its index: CUDA takes its first slice.
    count = _answer(library, library.nvmlDeviceGetMaxMigDeviceCount, handle) or 0
    slices = (
        _answer(library, library.nvmlDeviceGetMigDeviceHandleByIndex, handle, place)
        for place in range(count)
    )
    return next((found for found in slices if found is not None), handle)


def _find_abbreviated(library: ModuleType, start: str) -> Any:
    """Return the one device whose UUID begins so, as CUDA reads ``CUDA_VISIBLE_DEVICES``."""
    count = _answer(library, library.nvmlDeviceGetCount) or 0
    handles = [_answer(library, library.nvmlDeviceGetHandleByIndex, i) for i in range(count)]
    fitting = [
        handle
        for handle in handles
        if handle is not None
        and str(_answer(library, library.nvmlDeviceGetUUID, handle)).startswith(start)
    ]
    return fitting[0] if len(fitting) == 1 else None


def _answer(library: ModuleType, question: Callable[..., Any], *arguments: Any) -> Any:
    """Return the answer, or None where the driver or the device has none."""
    try:
        return question(*arguments)
    except library.NVMLError:
        return None
