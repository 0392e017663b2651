"""GPU facts from the NVIDIA driver (NVML). Devices are found by UUID.

NVML and CUDA number devices differently under ``CUDA_VISIBLE_DEVICES``, in containers and with MIG.
"""

from __future__ import annotations

import functools
import logging
from types import ModuleType
from typing import Any

log = logging.getLogger(__name__)


@functools.cache
def open_nvml() -> ModuleType | None:
    """Return the initialized NVML library, or None if there is none, which is logged once."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception as error:  # noqa: BLE001 - NVMLError, ImportError, OSError: no NVML
        log.info(
            "NVML is not available (%s): what other processes use on a GPU is unknown; "
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
    try:
        handles = map(library.nvmlDeviceGetHandleByIndex, range(library.nvmlDeviceGetCount()))
        found = [tuple(library.nvmlDeviceGetCudaComputeCapability(handle)) for handle in handles]
    except library.NVMLError:
        return None
    return min(found, default=None)


def used_memory(library: ModuleType, handle: Any) -> int | None:
    """Return the bytes used by all processes, or None. Drivers before 510 add their reserve."""
    for version in ({"version": library.nvmlMemory_v2}, {}):
        try:
            return int(library.nvmlDeviceGetMemoryInfo(handle, **version).used)
        except library.NVMLError as error:
            log.debug("NVML does not report the used memory: %s", error)
    return None


def find_handle(library: ModuleType, uuid: str) -> Any:
    names = [uuid] if uuid.startswith(("GPU-", "MIG-")) else [f"GPU-{uuid}", f"MIG-{uuid}"]
    for name in names:
        try:
            return library.nvmlDeviceGetHandleByUUID(name)
        except library.NVMLError as error:
            log.debug("NVML has no device %s: %s", name, error)
    return None
