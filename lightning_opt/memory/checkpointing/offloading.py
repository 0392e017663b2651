"""``offload=True``: moves tensors saved by autograd to host memory until the backward pass."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks

from lightning_opt.core.modules.batches import tensors_of
from lightning_opt.core.modules.trial import storages_of


class Offload:
    """Runs a step under torch's ``save_on_cpu``, except for parameters, buffers and the batch.

    Moving these tensors would free no memory.

    Attributes:
        nbytes: Bytes that the latest step moved.
    """

    def __init__(self) -> None:
        self.nbytes = 0

    def around(self, model: nn.Module, step: Callable[..., Any]) -> Callable[..., Any]:
        on_host = save_on_cpu(pin_memory=True)

        @wraps(step)
        def offloading(*args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled():
                return step(*args, **kwargs)
            kept = (*model.parameters(), *model.buffers(), *tensors_of((args, kwargs)))
            addresses = {storage.data_ptr() for tensor in kept for storage in storages_of(tensor)}
            self.nbytes = 0

            def pack(tensor: Tensor) -> Any:
                storages = list(storages_of(tensor))
                # A broadcast tensor has more elements than its storage.
                is_small = sum(storage.nbytes() for storage in storages) < tensor.nbytes
                if is_small or any(storage.data_ptr() in addresses for storage in storages):
                    return tensor
                self.nbytes += tensor.nbytes
                return on_host.pack_hook(tensor)

            def unpack(packed: Any) -> Tensor:
                return packed if isinstance(packed, Tensor) else on_host.unpack_hook(packed)

            with saved_tensors_hooks(pack, unpack):
                return step(*args, **kwargs)

        return offloading
