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

from lightning_opt.core.modules.preserve import random_states

BufferKey: TypeAlias = tuple[nn.Module, str]
"""A buffer by the module that has it and its name there."""


class Surroundings:
    """Random numbers of all kinds and autocast as they are now.

    Args:
        devices: Where something will run, beside the CPU.
        generators: Those of the modules that will run, and of what they are given.
    """

    def __init__(self, devices: Iterable[torch.device], generators: Iterable[Any]) -> None:
        self._devices, self._generators = set(devices), list(generators)
        self._random = list(random_states(self._devices, self._generators))
        self._autocast: dict[str, dict[str, Any]] = {
            kind: {
                "enabled": torch.is_autocast_enabled(kind),
                "dtype": torch.get_autocast_dtype(kind),
                "cache_enabled": torch.is_autocast_cache_enabled(),
            }
            for kind in {"cpu", *(device.type for device in self._devices)}
            if torch.amp.is_autocast_available(kind)
        }

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Put them back; afterwards they are as before."""
        with ExitStack() as stack:
            for undo in random_states(self._devices, self._generators):
                stack.callback(undo)
            for undo in self._random:
                undo()
            for kind, settings in self._autocast.items():
                stack.enter_context(torch.autocast(kind, **settings))
            yield


class WrittenBuffers:
    """The buffers of a module, of which a forward pass may write any at any step.

    Attributes:
        read_only: Whether the first run has written none; ``None`` before it. What keeps running
            statistics is known by its class: it does not write them in evaluation.
    """

    def __init__(self, module: nn.Module) -> None:
        self._owners = list(module.modules())
        self.read_only: bool | None = None
        if any(isinstance(m, _NormBase) and m.track_running_stats for m in self._owners):
            self.read_only = False
        elif not any(True for _ in module.buffers()):
            self.read_only = True

    def _all(self) -> Iterator[tuple[BufferKey, Tensor]]:
        for owner in self._owners:
            for name, buffer in owner.named_buffers(recurse=False):
                yield (owner, name), buffer

    def before(self) -> list[tuple[BufferKey, Tensor, int, Tensor]]:
        """Return what may be written: where it is, the buffer, its version, and a copy."""
        return [(key, buffer, buffer._version, buffer.clone()) for key, buffer in self._all()]

    def after(self, before: list[tuple[BufferKey, Tensor, int, Tensor]]) -> dict[BufferKey, Tensor]:
        """Return the earlier values of those of ``before`` that were written or replaced since."""
        values = {
            (owner, name): copy
            for (owner, name), buffer, version, copy in before
            if getattr(owner, name, None) is not buffer or buffer._version != version
        }
        if self.read_only is None:  # kernels of norms write without a new version
            same = all(torch.equal(buffer, copy) for _, buffer, _, copy in before)
            self.read_only = same and not values
        return values

    @contextmanager
    def scratch(self, values: dict[BufferKey, Tensor]) -> Iterator[None]:
        """Let the forward pass write to copies: of ``values``, else of what is there."""
        originals = dict(self._all())
        try:
            for (owner, name), original in originals.items():
                setattr(owner, name, values.get((owner, name), original).clone())
            yield
        finally:
            for (owner, name), original in originals.items():
                setattr(owner, name, original)
