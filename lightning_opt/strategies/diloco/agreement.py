"""What else must become alike on all processes: buffers, optimizers' states, the first weights."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer


def broadcast_all(tensors: Iterable[Tensor]) -> None:
    """Give every process the tensors of the first one."""
    for tensor in tensors:
        flat = tensor.detach().contiguous().view(-1)
        dist.broadcast(flat.view(torch.uint8), 0)
        tensor.detach().copy_(flat.view(tensor.shape))


def require_equal_batches(batches: float, device: torch.device) -> None:
    """Refuse loaders of unequal lengths: replicas meet after so many steps of each.

    Raises:
        ValueError: On all processes.
    """
    both = torch.tensor([batches, -batches], device=device)
    dist.all_reduce(both, op=dist.ReduceOp.MAX)
    most, fewest = both[0].item(), -both[1].item()
    if most != fewest:
        raise ValueError(
            f"DiLoCo needs as many batches on every process, got from {fewest:g} to {most:g}. Use "
            "a DistributedSampler, or Trainer(limit_train_batches=...) with a number that all have."
        )


def checksums(tensors: Iterable[Tensor]) -> list[float]:
    """Return a number for each floating tensor, which changes when it does. Waits for devices."""
    sums = [tensor.detach().double().sum() for tensor in tensors]
    return torch.stack(sums).tolist() if sums else []


def average_changed(tensors: Sequence[Tensor], before: Sequence[float]) -> None:
    """Average those tensors that have changed on some process since their ``checksums``.

    Element by element over the processes where it is finite; what is so nowhere stays. In float64,
    in which the mean of equal numbers is that number.
    """
    if not tensors:
        return
    pairs = zip(checksums(tensors), before, strict=True)
    changed = [now != then and not (math.isnan(now) and math.isnan(then)) for now, then in pairs]
    flags = torch.tensor(changed, dtype=torch.uint8, device=tensors[0].device)
    dist.all_reduce(flags, op=dist.ReduceOp.MAX)
    for tensor in [t.detach() for t, flag in zip(tensors, flags.tolist(), strict=True) if flag]:
        wide = tensor.double()
        finite = wide.isfinite()
        both = torch.stack([wide.where(finite, 0.0), finite.double()])
        dist.all_reduce(both)
        mean = (both[0] / both[1]).to(tensor.dtype)
        tensor.copy_(mean.where(both[1] > 0, tensor))


def average_states(optimizer: Optimizer) -> None:
    """Average the floating tensors of an optimizer's state that every process has."""
    forget_non_finite(optimizer)
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    states = {
        (number, key, tuple(value.shape)): value
        for number, parameter in enumerate(parameters)
        for key, value in optimizer.state.get(parameter, {}).items()
        if isinstance(value, Tensor) and value.is_floating_point()
    }
    world = dist.get_world_size()
    kinds: list[Any] = [None] * world
    dist.all_gather_object(kinds, list(states))
    for kind, tensor in states.items():
        if all(kind in own for own in kinds):
            # A step counter may be on the host; the parameter is where messages begin.
            mean = tensor.to(parameters[kind[0]].device).contiguous() / world
            dist.all_reduce(mean)
            tensor.copy_(mean)


def forget_non_finite(optimizer: Optimizer) -> None:
    """Begin anew the state of each parameter in which something is not finite."""
    for state in optimizer.state.values():
        tensors = [v for v in state.values() if isinstance(v, Tensor) and v.is_floating_point()]
        if not all(bool(tensor.isfinite().all()) for tensor in tensors):
            for tensor in tensors:
                tensor.zero_()
