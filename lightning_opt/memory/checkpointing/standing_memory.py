"""Memory of a run besides activations: parameters, buffers, gradients and optimizer states."""

from __future__ import annotations

import copy
from collections import Counter, defaultdict
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from lightning_opt.core.modules.sharding import local_part
from lightning_opt.memory.meters import state_tensors, storage_bytes


def optimizer_state_bytes(optimizer: Optimizer) -> int:
    """Return the bytes of the optimizer's state, predicted before its first step.

    The prediction steps a copy of the optimizer on meta tensors of the parameters' shapes.
    """
    present = state_tensors([optimizer])
    if present:
        return storage_bytes(present)
    shapes = Counter(
        (index, local_part(parameter).shape, parameter.dtype)
        for index, group in enumerate(optimizer.param_groups)
        for parameter in group["params"]
    )
    return sum(
        count * _state_bytes(optimizer, optimizer.param_groups[index], shape, dtype)
        for (index, shape, dtype), count in shapes.items()
    )


def _state_bytes(
    optimizer: Optimizer, group: dict[str, Any], shape: torch.Size, dtype: torch.dtype
) -> int:
    sample = nn.Parameter(torch.empty(shape, dtype=dtype, device="meta"))
    sample.grad = torch.empty_like(sample)
    trial = copy.copy(optimizer)
    trial.param_groups = [{**group, "params": [sample]}]
    trial.state = defaultdict(dict)
    # Many optimizers read a value after creating their state, which fails on the meta device.
    with suppress(RuntimeError, TypeError, ValueError, AttributeError, KeyError):
        type(trial).step(trial)  # not `trial.step`, which schedulers replace
    # Step counters do not grow with the parameter.
    return sum(value.nbytes for value in state_tensors([trial]) if value.numel() > 1)


def standing_bytes(module: nn.Module, optimizers: Iterable[Optimizer]) -> int:
    """Return the bytes of parameters, buffers, gradients and optimizer states, all allocated."""
    parameters = list(module.parameters())
    gradients = storage_bytes(p for p in parameters if p.requires_grad)
    states = sum(optimizer_state_bytes(optimizer) for optimizer in optimizers)
    return storage_bytes([*parameters, *module.buffers()]) + gradients + states


def present_bytes(module: nn.Module, optimizers: Iterable[Optimizer]) -> int:
    """Return the part of :func:`standing_bytes` that is allocated now."""
    gradients = [p.grad for p in module.parameters() if p.grad is not None]
    tensors = [*module.parameters(), *module.buffers(), *gradients]
    return storage_bytes([*tensors, *state_tensors(optimizers)])


def bucket_bytes(model: Any) -> int:
    """Return the bytes of DDP's buckets, unless gradients are views of them."""
    if not isinstance(model, DistributedDataParallel) or model.gradient_as_bucket_view:
        return 0
    return storage_bytes(p for p in model.parameters() if p.requires_grad)
