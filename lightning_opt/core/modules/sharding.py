"""Process groups: over which ranks a tensor is sharded, and reductions over them.

Under FSDP2 (DTensor) and FSDP1 (flat parameters) each rank holds a shard, which may be empty.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn

Groups: TypeAlias = tuple[Any, ...]
"""The process groups to reduce over, one per mesh dimension. Empty if nothing is sharded."""

UNSHARDED: Groups = ()
"""The groups of a tensor that each rank holds completely."""


def is_dtensor(tensor: Tensor) -> bool:
    return type(tensor) is not Tensor and hasattr(tensor, "device_mesh")


def local_part(tensor: Tensor) -> Tensor:
    """Return this rank's part of ``tensor`` as a dense tensor that shares its memory.

    Raises:
        RuntimeError: For a DTensor whose sum over ranks is pending (a ``Partial`` placement). FSDP2
            and tensor parallelism never leave one in ``Parameter.grad``.
    """
    if not is_dtensor(tensor):
        return tensor
    if any(placement.is_partial() for placement in tensor.placements):  # type: ignore[attr-defined]
        raise RuntimeError(
            f"A gradient of shape {tuple(tensor.shape)} has placements "
            f"{tensor.placements}: its sum over ranks is pending, so its norm cannot be computed. "  # type: ignore[attr-defined]
            "Redistribute it to Shard or Replicate before the optimizer step."
        )
    local: Tensor = tensor.to_local()  # type: ignore[attr-defined]
    return local


def shard_groups(parameter: Tensor, flat_groups: Mapping[Tensor, Groups] | None = None) -> Groups:
    """Return the groups over which ``parameter`` is sharded.

    ``flat_groups`` is the result of :func:`flat_parameter_groups` under FSDP1.
    """
    if is_dtensor(parameter):
        mesh, placements = parameter.device_mesh, parameter.placements  # type: ignore[attr-defined]
        return tuple(
            mesh.get_group(dim)
            for dim, placement in enumerate(placements)
            if not placement.is_replicate() and mesh.size(dim) > 1
        )
    return flat_groups.get(parameter, UNSHARDED) if flat_groups else UNSHARDED


def flat_parameter_groups(module: nn.Module) -> dict[Tensor, Groups]:
    """Return the groups of every parameter in ``module`` that FSDP1 shards.

    Covers both settings of ``use_orig_params``. Units under ``NO_SHARD`` hold whole gradients and
    are excluded; under ``HYBRID_SHARD`` the group is the sharding group.
    """
    if not dist.is_available() or not dist.is_initialized():
        return {}
    from torch.distributed.fsdp import FullyShardedDataParallel

    groups: dict[Tensor, Groups] = {}
    for unit in FullyShardedDataParallel.fsdp_modules(module):
        handle = unit._handle
        if handle is None or not handle.uses_sharded_strategy:
            continue
        flat = handle.flat_param
        for parameter in (flat, *(flat._params or ())):
            groups[parameter] = (unit.process_group,)
    return groups


def reduce_over(values: Tensor, groups: Groups, op: Any = None) -> Tensor:
    """Reduce ``values`` in place over each group, by sum or by ``op``, and return them."""
    for group in groups:
        backends = dist.get_backend_config(group)
        # NCCL does not accept host tensors, but FSDP(cpu_offload=True) keeps gradients on the host.
        on_backend = values if values.device.type in backends else values.to(backends.split(":")[0])
        dist.all_reduce(on_backend, op=dist.ReduceOp.SUM if op is None else op, group=group)
        values.copy_(on_backend)  # no effect if they are the same tensor
    return values


def largest_over_ranks(
    values: Iterable[float], device: torch.device, group: Any = None
) -> list[float]:
    """Return the maximum of each value over all ranks of ``group``, in float64.

    Every rank of the group must call it with the same number of values. It waits for ``device``,
    which the group's backend must support.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return list(values)
    largest = torch.tensor(list(values), dtype=torch.float64, device=device)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
    return largest.tolist()


class CustomExchange:
    """Base of strategies that exchange something other than each step's gradients.

    ``step_group`` holds the ranks that step together; None means all of them.
    """

    step_group: dist.ProcessGroup | None = None

    def reset_residuals(self) -> None:
        """Discard unsent gradients, because the weights have been restored to earlier ones."""
        raise NotImplementedError


def step_groups(trainer: Any) -> Groups:
    """Return the group of the ranks that step together, as a tuple.

    Collectives inside a step must use this group: replicas of ``DiLoCoStrategy`` step
    independently. The tuple is empty if this process steps alone.
    """
    if trainer.world_size == 1 or not dist.is_initialized():
        return UNSHARDED
    strategy = trainer.strategy
    own_group = strategy.step_group if isinstance(strategy, CustomExchange) else None
    group = own_group or dist.group.WORLD
    return (group,) if dist.get_world_size(group) > 1 else UNSHARDED


def combine_shards(values: Tensor, groups: Sequence[Groups], op: Any = None) -> Tensor:
    """Reduce per-shard values to per-tensor values, with one all-reduce per set of groups.

    The last dimension of ``values`` has one entry per tensor. ``values`` is not changed.
    """
    distinct = dict.fromkeys(groups)
    if len(distinct) == 1:
        return reduce_over(values.clone(), groups[0], op)
    columns = list(values.unbind(-1))  # a list as an index would be copied to the device
    for shared in distinct:
        indices = [index for index, one in enumerate(groups) if one == shared]
        reduced = reduce_over(torch.stack([columns[index] for index in indices]), shared, op)
        for index, column in zip(indices, reduced, strict=True):
            columns[index] = column
    return torch.stack(columns, -1)


def reads_are_free(device: torch.device) -> bool:
    """Return whether reading a scalar from this device needs no synchronization."""
    return device.type == "cpu"
