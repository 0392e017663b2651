"""Buffers as they were before a step that is left out: a NaN in a forward pass gets there first."""

from __future__ import annotations

from operator import attrgetter

import torch
from torch import Tensor, nn

from lightning_opt.core.modules.sharding import local_part
from lightning_opt.core.numerics.norms import by_kind
from lightning_opt.core.numerics.scalars import Condition

LARGEST = 2**16
"""Elements of a buffer that is copied at every step: any BatchNorm's statistics, not a table."""

_form = attrgetter("shape", "dtype", "device")


class BufferKeeper:
    """Keeps the small buffers of a model as they were after the last good step.

    A forward pass writes running statistics (BatchNorm, spectral norm) before anybody can tell that
    its batch is bad, and one NaN in them makes every evaluation NaN from then on. Buffers of more
    than :data:`LARGEST` elements (attention masks, queues) and boolean ones are left alone.

    Args:
        module: The model; its buffers are copied now.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self.keep()

    @torch.no_grad()
    def keep(self) -> None:
        """Copy the buffers as they are, and find out anew which there are."""
        # A buffer may be assigned anew at every step, so its place is what is remembered.
        found: dict[Tensor, tuple[nn.Module, str]] = {}
        for module in self._module.modules():
            for name, buffer in module.named_buffers(recurse=False):
                if 0 < buffer.numel() <= LARGEST and buffer.dtype is not torch.bool:
                    found.setdefault(buffer, (module, name))
        self._places = list(found.values())
        live = self._live()
        self._forms = list(map(_form, live))
        # The copies of one kind lie in one piece of memory, so that they are chosen in one kernel.
        self._kinds = [(places, _join(live, places)) for places in by_kind(live).values()]
        self._kept = list(live)
        for places, whole in self._kinds:
            parts = whole.split([live[place].numel() for place in places])
            for place, part in zip(places, parts, strict=True):
                self._kept[place] = part.view_as(live[place])

    @torch.no_grad()
    def settle(self, skip: Condition) -> None:
        """Put the buffers back if ``skip`` holds, else keep them as they are now."""
        if not self._places:
            return
        live = self._live()
        if list(map(_form, live)) != self._forms:
            # The model has other buffers than before; there is nothing to put back into them.
            self.keep()
        elif isinstance(skip, Tensor):
            skip = skip.bool()
            for places, whole in self._kinds:
                torch.where(skip, whole, _join(live, places), out=whole)
            torch._foreach_copy_(live, self._kept)
        elif skip:
            torch._foreach_copy_(live, self._kept)
        else:
            torch._foreach_copy_(self._kept, live)

    def _live(self) -> list[Tensor]:
        found = [getattr(module, name, None) for module, name in self._places]
        return [local_part(buffer.detach()) for buffer in found if buffer is not None]


def _join(tensors: list[Tensor], places: list[int]) -> Tensor:
    return torch.cat([tensors[place].reshape(-1) for place in places])
