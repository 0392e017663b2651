"""The driver's own account of a GPU, through NVML, found by UUID.

Indices of NVML and of CUDA differ under ``CUDA_VISIBLE_DEVICES``, in containers and with MIG. A
UUID means the same device everywhere.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from types import ModuleType
from typing import Any

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class NvmlMemory:
    """A device as the driver sees it.

    Attributes:
        used: Bytes taken by all processes; what the driver keeps to itself is not in it.
        free: Bytes that are free.
        total: Bytes there are.
        reserved: Bytes that the driver keeps to itself; None where an old driver adds them to
            ``used``.
    """

    used: int
    free: int
    total: int
    reserved: int | None


class _Driver:
    """The library, opened at the first question; a failure is remembered and told once."""

    def __init__(self) -> None:
        self._library: ModuleType | None = None
        self._failed = False
        self._handles: dict[str, Any] = {}

    def open(self) -> ModuleType | None:
        if self._library is None and not self._failed:
            try:
                import pynvml

                pynvml.nvmlInit()
            except Exception as error:  # noqa: BLE001 - NVMLError, ImportError, OSError: no NVML
                self._failed = True
                log.info(
                    "NVML is not there (%s): what other processes hold on a GPU stays unknown; "
                    "everything else works.",
                    error,
                )
            else:
                self._library = pynvml
        return self._library

    def handle(self, library: ModuleType, uuid: str) -> Any:
        if uuid not in self._handles:
            self._handles[uuid] = find_handle(library, uuid)
        return self._handles[uuid]


_driver = _Driver()


def open_nvml() -> ModuleType | None:
    """Return the library, ready to be asked, or None without it; a notice is logged once."""
    return _driver.open()


def nvml_memory(uuid: str) -> NvmlMemory | None:
    """Return the memory of the device or MIG slice with this UUID, with or without its prefix.

    Without NVML, or if it does not know the device, this is None; the first time that there is no
    NVML a notice is logged.
    """
    library = _driver.open()
    if library is None:
        return None
    handle = _driver.handle(library, uuid)
    return None if handle is None else read_memory(library, handle)


def read_memory(library: ModuleType, handle: Any) -> NvmlMemory | None:
    """Return the memory of the device behind ``handle``; None if the driver does not say."""
    try:
        memory = library.nvmlDeviceGetMemoryInfo(handle, version=library.nvmlMemory_v2)
        reserved: int | None = memory.reserved
    except library.NVMLError:
        try:  # drivers before 510, where the driver's own share is part of `used`
            memory, reserved = library.nvmlDeviceGetMemoryInfo(handle), None
        except library.NVMLError as error:
            log.debug("NVML does not say how much memory the device has: %s", error)
            return None
    return NvmlMemory(memory.used, memory.free, memory.total, reserved)


def find_handle(library: ModuleType, uuid: str) -> Any:
    """Return NVML's handle of the device or MIG slice with this UUID; None if it knows none."""
    names = [uuid] if uuid.startswith(("GPU-", "MIG-")) else [f"GPU-{uuid}", f"MIG-{uuid}"]
    for name in names:
        try:
            return library.nvmlDeviceGetHandleByUUID(name)
        except library.NVMLError as error:
            log.debug("NVML does not know %s: %s", name, error)
    return None
