"""Running a piece of the forward pass a second time exactly as it ran the first time.

Random numbers, autocast and buffers are put back to what they were then, and buffers that the
forward pass writes (running statistics, power iterations) are copies during the repetition, so that
they are updated once a step.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils.checkpoint import get_device_states, set_device_states

BufferKey: TypeAlias = tuple[nn.Module, str]
"""A buffer by the module that has it and its name there."""


class GlobalState:
    """Random number generators and autocast as they are now.

    Args:
        tensors: Inputs of what will run; their devices' generators are remembered beside the CPU's.
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        tensors = list(tensors)
        self._device_type = next((t.device.type for t in tensors if t.device.type != "cpu"), "cpu")
        self._cpu = torch.get_rng_state()
        self._devices, self._states = get_device_states(*tensors)
        self._autocast: dict[str, dict[str, Any]] = {
            device_type: {
                "enabled": torch.is_autocast_enabled(device_type),
                "dtype": torch.get_autocast_dtype(device_type),
                "cache_enabled": torch.is_autocast_cache_enabled(),
            }
            for device_type in {self._device_type, "cpu"}
            if torch.amp.is_autocast_available(device_type)
        }

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Put them back; afterwards they are as before."""
        fork: dict[str, Any] = {"devices": self._devices}
        if self._devices:
            fork["device_type"] = self._device_type
        with torch.random.fork_rng(**fork), ExitStack() as stack:
            torch.set_rng_state(self._cpu)
            if self._devices:
                set_device_states(self._devices, self._states, device_type=self._device_type)
            for device_type, settings in self._autocast.items():
                stack.enter_context(torch.autocast(device_type, **settings))
            yield


class WrittenBuffers:
    """Which buffers of some module its forward pass writes, learnt from its first run.

    A norm's statistics are known by class, since torch's kernels write them without a trace. They
    are not read while training, so only the others need the value from before the forward pass.
    """

    def __init__(self, module: nn.Module) -> None:
        self._norms = [
            owner
            for owner in module.modules()
            if isinstance(owner, _NormBase) and owner.track_running_stats
        ]
        norms = set(self._norms)
        self._watched: list[BufferKey] = [
            (owner, name)
            for owner in module.modules()
            if owner not in norms
            for name in owner._buffers
        ]
        self._learnt = False

    @property
    def is_empty(self) -> bool:
        """Whether there are no buffers at all."""
        return not self._norms and not self._watched

    def before(self) -> list[tuple[BufferKey, Tensor, int, Tensor]]:
        """Return what may be written: where it is, the buffer, its version, and a copy."""
        return [
            ((owner, name), buffer, buffer._version, buffer.clone())
            for owner, name in self._watched
            if (buffer := owner._buffers.get(name)) is not None
        ]

    def after(self, before: list[tuple[BufferKey, Tensor, int, Tensor]]) -> dict[BufferKey, Tensor]:
        """Return the earlier values of those of ``before`` that were written or replaced since."""
        values = {
            (owner, name): copy
            for (owner, name), buffer, version, copy in before
            if owner._buffers.get(name) is not buffer or buffer._version != version
        }
        if not self._learnt:  # only the first run copies buffers that are only read
            self._watched, self._learnt = list(values), True
        return values

    @contextmanager
    def scratch(self, values: dict[BufferKey, Tensor]) -> Iterator[None]:
        """Let the forward pass write to copies: of ``values``, and of the norms' statistics."""
        copies = {key: value.clone() for key, value in values.items()}
        for norm in self._norms:
            if norm.training:
                for name, buffer in norm._buffers.items():
                    if buffer is not None:
                        copies[norm, name] = buffer.clone()
        originals = {(owner, name): owner._buffers[name] for owner, name in copies}
        try:
            for (owner, name), copy in copies.items():
                owner._buffers[name] = copy
            yield
        finally:
            for (owner, name), original in originals.items():
                owner._buffers[name] = original
