"""What a training holds besides activations, and what the device has left for those."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

MIB = 2**20


def bytes_of(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of ``tensors``' memory on this rank; shared memory counts once."""
    local = (getattr(tensor, "_local_tensor", tensor) for tensor in tensors)
    storages = {s.data_ptr(): s.nbytes() for s in (tensor.untyped_storage() for tensor in local)}
    return sum(storages.values())


def optimizer_state_bytes(optimizer: Optimizer) -> int:
    """Return the bytes of the optimizer's state: of the one it has, or of the one it will have.

    The state of optimizers comes with their first step. What that makes is found out on a matrix of
    64 elements; parameters are not touched.
    """
    present = [value for state in optimizer.state.values() for value in state.values()]
    if present:
        return bytes_of(value for value in present if isinstance(value, Tensor))
    return sum(
        round(_state_per_byte(optimizer, index) * bytes_of(p for p in group["params"]))
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
        type(trial).step(
            trial
        )  # an instance's own `step`, as schedulers make it, is the original's
    except (RuntimeError, TypeError, ValueError, AttributeError, KeyError):
        return 0.0  # one that cannot be tried so; its state is then not foreseen
    made = [value for state in trial.state.values() for value in state.values()]
    # Counters are there once a parameter and do not grow with it.
    grown = [value for value in made if isinstance(value, Tensor) and value.numel() > 1]
    return bytes_of(grown) / sample.untyped_storage().nbytes()


def standing_bytes(module: nn.Module, optimizers: Iterable[Optimizer]) -> int:
    """Return the bytes of parameters, buffers, gradients and optimizer states in a full step."""
    parameters = list(module.parameters())
    return (
        bytes_of([*parameters, *module.buffers()])
        + bytes_of(parameter for parameter in parameters if parameter.requires_grad)
        + sum(optimizer_state_bytes(optimizer) for optimizer in optimizers)
    )


def present_bytes(module: nn.Module, optimizers: Iterable[Optimizer]) -> int:
    """Return that part of :func:`standing_bytes` that is there now."""
    states = [value for o in optimizers for state in o.state.values() for value in state.values()]
    gradients = [p.grad for p in module.parameters() if p.grad is not None]
    there = [*module.parameters(), *module.buffers(), *gradients]
    return bytes_of([*there, *(value for value in states if isinstance(value, Tensor))])


def free_bytes(device: torch.device) -> int:
    """Return what can still be allocated: by torch's own cache or from the device."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return free + cached
    import psutil  # only where there is neither a device nor a budget to ask

    return int(psutil.virtual_memory().available)
