"""The state that a recomputation must share with the first forward pass.

Random state and autocast settings are restored for the recomputation. Buffers are replaced by
copies during the recomputation, so running statistics are updated once per step.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from lightning_opt.core.modules.preserve import random_states

# A buffer, given by its owning module and its name in that module.
BufferKey: TypeAlias = tuple[nn.Module, str]
BufferCopy: TypeAlias = tuple[BufferKey, Tensor, int, Tensor]


class ProcessState:
    """Random state and autocast settings at the time of construction.

    Args:
        devices: Devices on which the module runs. The CPU is always included.
        generators: Generators that the module owns or receives.
    """

    def __init__(self, devices: Iterable[torch.device], generators: Iterable[Any]) -> None:
        self._devices = set(devices)
        self._generators = list(generators)
        self._random = list(random_states(self._devices, self._generators))
        self._autocast: dict[str, dict[str, Any]] = {
            device_type: {
                "enabled": torch.is_autocast_enabled(device_type),
                "dtype": torch.get_autocast_dtype(device_type),
                "cache_enabled": torch.is_autocast_cache_enabled(),
            }
            for device_type in {"cpu", *(device.type for device in self._devices)}
            if torch.amp.is_autocast_available(device_type)
        }

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Restore the recorded state inside the context; on exit, restore the current one."""
        with ExitStack() as stack:
            for undo in random_states(self._devices, self._generators):
                stack.callback(undo)
            for restore in self._random:
                restore()
            for device_type, settings in self._autocast.items():
                stack.enter_context(torch.autocast(device_type, **settings))
            yield


class WrittenBuffers:
    """Records the buffers of a module that a forward pass writes, and restores them.

    Attributes:
        read_only: Whether the first run wrote no buffer; ``None`` before that run. Always False for
            modules with running statistics, which are written in training mode only.
    """

    def __init__(self, module: nn.Module) -> None:
        self._owners = list(module.modules())
        self.read_only: bool | None = None
        if any(isinstance(m, _NormBase) and m.track_running_stats for m in self._owners):
            self.read_only = False
        elif not any(True for _ in module.buffers()):
            self.read_only = True

    def _buffers(self) -> Iterator[tuple[BufferKey, Tensor]]:
        for owner in self._owners:
            for name, buffer in owner.named_buffers(recurse=False):
                yield (owner, name), buffer

    def copies(self) -> list[BufferCopy]:
        """Return each buffer's key, the buffer, its version and a copy."""
        return [(key, buffer, buffer._version, buffer.clone()) for key, buffer in self._buffers()]

    def written_since(self, copies: list[BufferCopy]) -> dict[BufferKey, Tensor]:
        """Return the earlier values of the buffers that were written or replaced since."""
        values = {
            (owner, name): copy
            for (owner, name), buffer, version, copy in copies
            if getattr(owner, name, None) is not buffer or buffer._version != version
        }
        if (
            self.read_only is None
        ):  # compare values: kernels of norm layers write without changing the version
            same = all(torch.equal(buffer, copy) for _, buffer, _, copy in copies)
            self.read_only = same and not values
        return values

    @contextmanager
    def replaced_by_copies(self, values: dict[BufferKey, Tensor]) -> Iterator[None]:
        """Inside the context, replace the buffers by copies of ``values``, else of themselves."""
        originals = dict(self._buffers())
        try:
            for (owner, name), original in originals.items():
                setattr(owner, name, values.get((owner, name), original).clone())
            yield
        finally:
            for (owner, name), original in originals.items():
                setattr(owner, name, original)
