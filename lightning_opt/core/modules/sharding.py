"""The process groups of sharded tensors, and reductions over them.

Sharded tensors are DTensors (FSDP2, tensor parallelism) and FSDP1's flat parameters. A rank's part
of them may be empty.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn

Groups: TypeAlias = tuple[Any, ...]
"""The process groups to reduce over, one per mesh dimension. Empty if nothing is sharded."""

UNSHARDED: Groups = ()
"""The groups of a tensor that is not sharded."""


def is_dtensor(tensor: Tensor) -> bool:
    return type(tensor) is not Tensor and hasattr(tensor, "device_mesh")


def local_part(tensor: Tensor) -> Tensor:
    """Return this rank's part of ``tensor`` as a dense tensor that shares its memory.

    The part is a shard, the whole tensor, or a summand where the sum over ranks is pending (see
    :func:`pending_groups`).
    """
    local: Tensor = tensor.to_local() if is_dtensor(tensor) else tensor  # type: ignore[attr-defined]
    return local


def shard_groups(tensor: Tensor, flat_groups: Mapping[Tensor, Groups] | None = None) -> Groups:
    """Return the groups over which ``tensor`` is sharded.

    ``flat_groups`` is the result of :func:`flat_parameter_groups` under FSDP1.
    """
    if is_dtensor(tensor):
        # `is_shard` is False for the strided shards of FSDP2 with tensor parallelism.
        return mesh_groups(tensor, lambda p: not (p.is_replicate() or p.is_partial()))
    return flat_groups.get(tensor, UNSHARDED) if flat_groups else UNSHARDED


def pending_groups(gradient: Tensor) -> Groups:
    """Return the groups over which the sum of a gradient is pending (``Partial`` placements).

    ``SequenceParallel`` leaves such gradients in ``Parameter.grad``; the optimizer completes them.

    Raises:
        RuntimeError: If a pending reduction is not a sum.
    """
    if not is_dtensor(gradient):
        return UNSHARDED
    for placement in gradient.placements:  # type: ignore[attr-defined]
        if placement.is_partial() and placement.reduce_op != "sum":
            raise RuntimeError(
                f"A gradient of shape {tuple(gradient.shape)} has the placement {placement}, and "
                "only Partial('sum') can be measured. Redistribute it to Shard or Replicate before "
                "the optimizer step."
            )
    return mesh_groups(gradient, lambda placement: placement.is_partial())


def mesh_groups(tensor: Any, selects: Callable[[Any], bool]) -> Groups:
    """Return the groups of a DTensor's mesh dimensions whose placement is selected."""
    mesh = tensor.device_mesh
    return tuple(
        mesh.get_group(dim)
        for dim, placement in enumerate(tensor.placements)
        if selects(placement) and mesh.size(dim) > 1
    )


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


def gather_objects(value: Any, groups: Groups) -> list[Any]:
    """Return the value of every rank, in order. A collective if there are several ranks."""
    if not groups:
        return [value]
    values: list[Any] = [None] * dist.get_world_size(groups[0])
    dist.all_gather_object(values, value, group=groups[0])
    return values


class CustomExchange:
    """Base of strategies that exchange something other than each step's gradients.

    ``step_group`` holds the ranks that step together; None means all of them.
    """

    step_group: dist.ProcessGroup | None = None

    def reset_residuals(self) -> None:
        """Discard unsent gradients after the weights have been rolled back."""
        raise NotImplementedError


def data_ranks(trainer: Any) -> int:
    """Return the number of ranks with their own data; tensor-parallel ranks share theirs."""
    kwargs = trainer.distributed_sampler_kwargs
    return int(kwargs["num_replicas"]) if kwargs else 1


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


def reduce_each(
    tensors: Sequence[Tensor], groups: Sequence[Groups], op: Any = None
) -> list[Tensor]:
    """Reduce copies of the tensors, each over its own groups, and return them.

    Tensors of the same groups, dtype and device share one all-reduce. Tensors without groups are
    returned as they are.
    """
    reduced = list(tensors)
    by_kind: dict[Any, list[int]] = {}
    for index, (tensor, own) in enumerate(zip(tensors, groups, strict=True)):
        if own:
            by_kind.setdefault((own, tensor.dtype, tensor.device), []).append(index)
    for (shared, *_), indices in by_kind.items():
        flat = reduce_over(torch.cat([tensors[index].flatten() for index in indices]), shared, op)
        parts = flat.split([tensors[index].numel() for index in indices])
        for index, part in zip(indices, parts, strict=True):
            reduced[index] = part.view(tensors[index].shape)
    return reduced


def summed_part(gradient: Tensor) -> Tensor:
    """Return this rank's part of ``gradient``, or a copy in which its pending sum is complete."""
    return reduce_each([local_part(gradient)], [pending_groups(gradient)])[0]


def combine_shards(values: Tensor, groups: Sequence[Groups], op: Any = None) -> Tensor:
    """Reduce per-shard values to per-tensor values; ``values`` is not changed.

    The last dimension of ``values`` has one entry per tensor.
    """
    if len(set(groups)) == 1:
        return reduce_over(values.clone(), groups[0], op)
    return torch.stack(reduce_each(values.unbind(-1), groups, op), -1)


def reads_are_free(device: torch.device) -> bool:
    """Return whether reading a scalar from this device needs no synchronization."""
    return device.type == "cpu"
