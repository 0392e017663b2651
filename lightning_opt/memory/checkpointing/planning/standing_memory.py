"""What a training holds besides activations, and what the device has left for those."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import nn
from torch.optim import Optimizer

from lightning_opt.memory.meters import state_tensors, storage_bytes


def optimizer_state_bytes(optimizer: Optimizer) -> int:
    """Return the bytes of the optimizer's state: of the one it has, or of the one it will have.

    The state of optimizers comes with their first step. What that makes is found out on a matrix of
    64 elements; parameters are not touched.
    """
    present = state_tensors([optimizer])
    if present:
        return storage_bytes(present)
    return sum(
        round(_state_per_byte(optimizer, index) * storage_bytes(p for p in group["params"]))
        for index, group in enumerate(optimizer.param_groups)
    )


def _state_per_byte(optimizer: Optimizer, index: int) -> float:
    group = optimizer.param_groups[index]
    if not group["params"]:
        return 0.0
    like = group["params"][0]
    sample = nn.Parameter(torch.zeros(8, 8, dtype=like.dtype, device=like.device))
    sample.grad = torch.zeros_like(sample)
    trial = copy.copy(optimizer)
    trial.param_groups = [{**group, "params": [sample]}]
    trial.state = defaultdict(dict)
    try:
        type(trial).step(trial)  # an instance's own `step`, as schedulers make it, is another's
    except (RuntimeError, TypeError, ValueError, AttributeError, KeyError):
        return 0.0  # one that cannot be tried so; its state is then not foreseen
    # Counters are there once a parameter and do not grow with it.
    grown = [value for value in state_tensors([trial]) if value.numel() > 1]
    return storage_bytes(grown) / sample.untyped_storage().nbytes()


def standing_bytes(module: nn.Module, optimizers: Iterable[Optimizer]) -> int:
    """Return the bytes of parameters, buffers, gradients and optimizer states in a full step."""
    parameters = list(module.parameters())
    return (
        storage_bytes([*parameters, *module.buffers()])
        + storage_bytes(parameter for parameter in parameters if parameter.requires_grad)
        + sum(optimizer_state_bytes(optimizer) for optimizer in optimizers)
    )


def present_bytes(module: nn.Module, optimizers: Iterable[Optimizer]) -> int:
    """Return that part of :func:`standing_bytes` that is there now."""
    gradients = [p.grad for p in module.parameters() if p.grad is not None]
    there = [*module.parameters(), *module.buffers(), *gradients]
    return storage_bytes([*there, *state_tensors(optimizers)])


def free_bytes(device: torch.device) -> int:
    """Return what can still be allocated: by torch's own cache or from the device."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return free + cached
    import psutil  # only where there is neither a device nor a budget to ask

    return int(psutil.virtual_memory().available)
