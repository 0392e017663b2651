"""Broadcasts and averages tensors over processes: weights, buffers, optimizers' states."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from lightning_opt.core.modules.sharding import largest_over_ranks


def broadcast_all(tensors: Iterable[Tensor]) -> None:
    """Overwrite the tensors of every process with the tensors of the first one."""
    for tensor in tensors:
        flat = tensor.detach().contiguous().view(-1)
        dist.broadcast(flat.view(torch.uint8), 0)
        tensor.detach().copy_(flat.view(tensor.shape))


def checksums(tensors: Iterable[Tensor]) -> list[float]:
    """Return the sum of each floating tensor, to detect changes. Waits for devices."""
    sums = [tensor.detach().double().sum() for tensor in tensors]
    return torch.stack(sums).tolist() if sums else []


def average_changed(tensors: Sequence[Tensor], before: Sequence[float]) -> None:
    """Average the tensors that have changed on any process since their ``checksums``.

    Each element is averaged over the processes where it is finite; without any, it stays unchanged.
    The mean is computed in float64, where the mean of equal numbers is exact.
    """
    if not tensors:
        return
    pairs = zip(checksums(tensors), before, strict=True)
    changed = [new != old and not (math.isnan(new) and math.isnan(old)) for new, old in pairs]
    flags = largest_over_ranks(map(float, changed), tensors[0].device)
    for tensor in [t.detach() for t, flag in zip(tensors, flags, strict=True) if flag]:
        wide = tensor.double()
        finite = wide.isfinite()
        both = torch.stack([wide.where(finite, 0.0), finite.double()])
        dist.all_reduce(both)
        mean = (both[0] / both[1]).to(tensor.dtype)
        tensor.copy_(mean.where(both[1] > 0, tensor))


def average_states(optimizer: Optimizer) -> None:
    """Average the floating tensors of an optimizer's state that exist on every process."""
    reset_non_finite(optimizer)
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    states = {
        (number, key, tuple(value.shape)): value
        for number, parameter in enumerate(parameters)
        for key, value in optimizer.state.get(parameter, {}).items()
        if isinstance(value, Tensor) and value.is_floating_point()
    }
    world = dist.get_world_size()
    keys_by_rank: list[Any] = [None] * world
    dist.all_gather_object(keys_by_rank, list(states))
    for key, tensor in states.items():
        if all(key in keys for keys in keys_by_rank):
            # A step counter may be on the host, but NCCL sends from the parameter's device.
            mean = tensor.to(parameters[key[0]].device).contiguous() / world
            dist.all_reduce(mean)
            tensor.copy_(mean)


def reset_non_finite(optimizer: Optimizer) -> None:
    """Zero the state of each parameter whose state is not finite."""
    for state in optimizer.state.values():
        tensors = [v for v in state.values() if isinstance(v, Tensor) and v.is_floating_point()]
        if not all(bool(tensor.isfinite().all()) for tensor in tensors):
            for tensor in tensors:
                tensor.zero_()
