"""The buffers that a block writes, such as running statistics.

A recomputation reads the values that the first run read, and its writes are discarded, so running
statistics are updated once per step.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from lightning_opt.core.modules.preserve import ALWAYS_COPIED_BYTES

# The dictionary of one module, a name in it, and a value.
Entry: TypeAlias = tuple[dict[str, Any], str, Tensor]


class WrittenBuffers:
    """Records which buffers of a module a forward pass writes, and replaces them.

    Attributes:
        read_only: Whether the first run wrote no buffer; ``None`` before that run. Always False for
            modules with running statistics, which are written in training mode only.
    """

    def __init__(self, module: nn.Module) -> None:
        self._name = type(module).__name__
        self._places = [owner._buffers for owner in module.modules()]
        self.read_only: bool | None = None
        if any(isinstance(m, _NormBase) and m.track_running_stats for m in module.modules()):
            self.read_only = False
        elif not any(self._places):
            self.read_only = True

    def _entries(self) -> list[Entry]:
        return [
            (place, name, buffer)
            for place in self._places
            for name, buffer in place.items()
            if buffer is not None
        ]

    def save(self) -> list[tuple[Entry, int, Tensor | None]]:
        """Return the buffers before a run, each with its version and a copy.

        Large buffers that the first run has not written are not copied.
        """
        limit = ALWAYS_COPIED_BYTES if self.read_only else torch.inf
        return [
            (entry, entry[2]._version, entry[2].clone() if entry[2].nbytes <= limit else None)
            for entry in self._entries()
        ]

    def written_since(self, saved: list[tuple[Entry, int, Tensor | None]]) -> list[Entry]:
        """Return the earlier values of the buffers that were written or replaced since.

        Raises:
            RuntimeError: If a run writes to a large buffer that the first run has not written.
        """
        written = []
        for (place, name, buffer), version, copy in saved:
            if buffer._version != version:
                if copy is None:
                    raise RuntimeError(
                        f"{self._name} writes to its buffer {name!r}, which it did not write in "
                        "its first run, so it cannot be recomputed. Leave the block out of "
                        "ActivationCheckpointing(modules=[...])."
                    )
                written.append((place, name, copy))
            elif place.get(name) is not buffer:
                written.append((place, name, buffer))
        if self.read_only is None:
            # Kernels of norm layers write without changing the version, so compare values.
            same = all(copy is not None and torch.equal(e[2], copy) for e, _, copy in saved)
            self.read_only = same and not written
        return written

    def replace(self, values: list[Entry]) -> list[Entry]:
        """Replace the buffers by copies of ``values``, else of themselves; return the buffers."""
        if self.read_only and not values:
            return []
        earlier = {(id(place), name): value for place, name, value in values}
        entries = self._entries()
        for place, name, buffer in entries:
            place[name] = earlier.get((id(place), name), buffer).clone()
        return entries

    @staticmethod
    def restore(entries: list[Entry]) -> None:
        for place, name, buffer in entries:
            place[name] = buffer
