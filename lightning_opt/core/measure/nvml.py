"""The driver's own account of a GPU, through NVML, found by UUID.

Indices of NVML and of CUDA differ under ``CUDA_VISIBLE_DEVICES``, in containers and with MIG. A
UUID means the same device everywhere.
"""

from __future__ import annotations

import functools
import logging
from types import ModuleType
from typing import Any

log = logging.getLogger(__name__)


@functools.cache
def open_nvml() -> ModuleType | None:
    """Return the library, ready to be asked, or None without it; a notice is logged once."""
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


def used_memory(library: ModuleType, handle: Any) -> int | None:
    """Return the bytes that all processes have taken; None if the driver does not say.

    What the driver keeps to itself is not in it, but for drivers before 510, which have no second
    version of the question.
    """
    for version in ({"version": library.nvmlMemory_v2}, {}):
        try:
            return int(library.nvmlDeviceGetMemoryInfo(handle, **version).used)
        except library.NVMLError as error:
            log.debug("NVML does not say how much memory is taken: %s", error)
    return None


def find_handle(library: ModuleType, uuid: str) -> Any:
    """Return NVML's handle of the device or MIG slice with this UUID; None if it knows none."""
    names = [uuid] if uuid.startswith(("GPU-", "MIG-")) else [f"GPU-{uuid}", f"MIG-{uuid}"]
    for name in names:
        try:
            return library.nvmlDeviceGetHandleByUUID(name)
        except library.NVMLError as error:
            log.debug("NVML does not know %s: %s", name, error)
    return None
