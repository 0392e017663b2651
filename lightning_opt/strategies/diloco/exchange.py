"""Averages the pseudo-gradients of replicas in compressed messages, and their other state.

A pseudo-gradient is averaged over the replicas whose values are finite. Each replica sends each
other replica one shard, averages its own shard, and gathers the compressed means. It sends less
than twice the message at any number of replicas. All decode the same bytes, so all get the same
bits.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional
from torch.optim import Optimizer

from lightning_opt.core.modules.sharding import gather_objects, largest_over_ranks
from lightning_opt.core.numerics.norms import as_real, parameters_of
from lightning_opt.strategies.compressors import Quantize
from lightning_opt.strategies.own_exchange import all_to_all
from lightning_opt.strategies.packing import any_flag, is_finite, write_flag

Key: TypeAlias = tuple[Any, ...]
"""The name and the shape of a tensor that processes may share."""

CODECS = {"int8": Quantize(bits=8), "int4": Quantize(bits=4, block=128), "float32": None}


@dataclass
class Replicas:
    """The process groups of the exchange, which nothing else may use.

    Attributes:
        count: Number of replicas.
        index: Index of this replica.
        leaders: Group of the first process of each replica.
        is_leader: Whether this process is in that group.
        local_group: Group of this replica's processes; None if there is only one.
    """

    count: int
    index: int
    leaders: dist.ProcessGroup
    is_leader: bool
    local_group: dist.ProcessGroup | None


def make_groups(processes: int, timeout: Any) -> tuple[Replicas, dist.ProcessGroup]:
    """Create the groups of the exchange, and another group of this replica for its DDP.

    Every rank must call this.

    Args:
        processes: Processes per replica; they have consecutive ranks.
        timeout: Maximum time that processes wait for each other.
    """
    firsts = list(range(0, dist.get_world_size(), processes))
    leaders = dist.new_group(firsts, timeout=timeout)
    ddp_group, _ = dist.new_subgroups(processes, timeout=timeout)
    local_group, _ = dist.new_subgroups(processes, timeout=timeout)
    index, local_rank = divmod(dist.get_rank(), processes)
    own_group = local_group if processes > 1 else None
    return Replicas(len(firsts), index, leaders, local_rank == 0, own_group), ddp_group


Outcome: TypeAlias = tuple[Tensor | None, bool, int]
"""The mean over the finite replicas, or None if no replica is finite; whether this replica is
finite; the bytes that this process sent."""


def exchange(
    pseudo_gradient: Tensor, residual: Tensor, replicas: Replicas, compression: str
) -> Outcome:
    """Average the replicas' pseudo-gradients. All processes of all replicas must call it.

    It waits for the device and the network, so it runs in a thread.

    Args:
        pseudo_gradient: Flat; a replica whose pseudo-gradient is not finite is skipped by all.
        residual: The unsent rest of this replica's earlier messages. It is added, and replaced by
            the new rest.
        replicas: The process groups.
        compression: A key of :data:`CODECS`.
    """
    all_finite = is_finite(pseudo_gradient).int()
    if replicas.local_group is not None:
        dist.all_reduce(all_finite, dist.ReduceOp.MIN, replicas.local_group)
    finite, compressor = bool(all_finite), CODECS[compression]
    if compressor is None:
        if finite:
            residual.add_(pseudo_gradient)
        mean, sent_bytes = _average(residual, finite, replicas)
    else:
        own = pseudo_gradient if finite else None
        mean, sent_bytes = _average_compressed(own, residual, replicas, compressor)
    return mean, finite, sent_bytes


def raise_if_apart(place: float, replicas: Replicas, tensor: Tensor) -> None:
    """Raise on all processes if replicas have reached different places. All must call this.

    Args:
        place: The step of an exchange, or a negative number for another meeting.
        replicas: The process groups.
        tensor: A tensor on this process's device.
    """
    ends, device = [place, -place], message_device(tensor)
    for group in (replicas.leaders if replicas.is_leader else None, replicas.local_group):
        if group is not None:
            ends = largest_over_ranks(ends, device, group)
    if ends[0] != -ends[1]:
        raise RuntimeError(
            "DiLoCo stops: the data of one replica ended while another still trains. Give every "
            "process as many batches, such as Trainer(limit_train_batches=...) with a number that "
            "every IterableDataset reaches."
        )


def _average(residual: Tensor, finite: bool, replicas: Replicas) -> tuple[Tensor | None, int]:
    """Return the mean of the finite replicas' residuals and the bytes sent. Sets them to 0."""
    own = residual if finite else torch.zeros_like(residual)
    total = functional.pad(own, (0, 1), value=float(finite)).to(message_device(residual))
    residual.mul_(not finite)
    if replicas.is_leader:
        dist.all_reduce(total, group=replicas.leaders)
    _send_to_replica(total, replicas)
    total = total.to(residual.device)
    sent = 2 * (replicas.count - 1) * total.nbytes // replicas.count if replicas.is_leader else 0
    return (total[:-1] / total[-1] if total[-1] else None), sent


def _average_compressed(
    pseudo_gradient: Tensor | None, residual: Tensor, replicas: Replicas, compressor: Quantize
) -> tuple[Tensor | None, int]:
    """Return the mean of the finite replicas' residuals and the bytes sent.

    The pseudo-gradient, None if it is not finite, is added to ``residual``, where the unsent rest
    stays.
    """
    finite = pseudo_gradient is not None
    count, numel, sent_bytes = replicas.count, residual.numel(), 0
    size = -(-numel // (count * compressor.block)) * compressor.block
    codec = compressor.codec(size, residual.device)
    row = codec.nbytes
    gathered = torch.empty(count, row, dtype=torch.uint8, device=message_device(residual))
    if replicas.is_leader:
        shards = _shards(residual, size, count)
        own_shard = shards[replicas.index]
        sent = torch.zeros(count, row, dtype=torch.uint8, device=residual.device)
        write_flag(sent, True)
        if pseudo_gradient is not None:
            for shard, new, codec.message in zip(
                shards, _shards(pseudo_gradient, size, count), sent, strict=True
            ):
                if shard is own_shard:
                    own_shard.add_(new)
                else:
                    codec.compress(shard, new, shard, residual.new_ones(()))
                    write_flag(codec.message, False)
        all_to_all(sent.to(gathered.device), gathered, replicas.leaders)
        received = gathered.to(residual.device)
        messages = [message for message in received if not any_flag(message)]
        num_finite = len(messages) + finite
        share = 1.0 / max(num_finite, 1)
        total = torch.zeros_like(own_shard)
        for message in messages:
            codec.decompress_add(message, total, share)
        own = codec.message = torch.zeros_like(sent[0])
        if num_finite:
            # This replica's own values are added uncompressed, so they leave no rest.
            codec.compress(total, own_shard, total, residual.new_tensor(share * finite))
            own_shard.mul_(not finite)
            # Keep the unsent rest of the mean as a residual of this replica.
            own_shard.add_(total, alpha=count)
        write_flag(own, not num_finite)
        all_to_all(own.to(gathered.device).expand(count, -1), gathered, replicas.leaders)
        sent_bytes = 2 * (count - 1) * row
    _send_to_replica(gathered, replicas)
    gathered = gathered.to(residual.device)
    if any_flag(gathered):
        return None, sent_bytes
    mean = torch.zeros_like(residual)
    for message, shard in zip(gathered, _shards(mean, size, count), strict=True):
        codec.decompress_add(message, shard)
    return mean, sent_bytes


def _send_to_replica(tensor: Tensor, replicas: Replicas) -> None:
    """Send the leader's tensor to the other processes of its replica."""
    group = replicas.local_group
    if group is not None:  # torch 2.5 takes no `group_src`
        dist.broadcast(tensor, dist.get_global_rank(group, 0), group)


def _shards(flat: Tensor, size: int, count: int) -> list[Tensor]:
    """Return views of ``size`` elements; the last ones may be shorter, or empty."""
    return [flat[number * size : (number + 1) * size] for number in range(count)]


def message_device(tensor: Tensor) -> torch.device:
    """Return the device of messages: gloo sends from host memory."""
    return torch.device("cpu") if dist.get_backend() == "gloo" else tensor.device


# --- states ---------------------------------------------------------------------------------------


def broadcast_all(tensors: Iterable[Tensor]) -> None:
    """Overwrite the tensors of every process with the tensors of the first one."""
    for tensor in tensors:
        flat = tensor.detach().contiguous().view(-1)
        dist.broadcast(flat.view(torch.uint8), 0)
        tensor.detach().copy_(flat.view(tensor.shape))


def checksums(tensors: Mapping[Key, Tensor]) -> dict[Key, float]:
    """Return a weighted sum of each floating tensor, to detect changes. Waits for devices.

    Each position has its own weight, so that a permutation changes the sum too. NaN and infinity
    are replaced by fixed numbers.
    """

    @cache
    def weights(count: int, dim: int, device: torch.device) -> Tensor:
        return torch.arange(dim, count + dim, dtype=torch.float64, device=device).cos()

    sums = []
    for tensor in tensors.values():
        total = tensor.detach().to(torch.float64, copy=True).nan_to_num_(math.pi, math.e, -math.e)
        while total.ndim:
            total = total @ weights(total.shape[-1], total.ndim, total.device)
        sums.append(total)
    return dict(zip(tensors, torch.stack(sums).tolist() if sums else [], strict=True))


def average_changed(tensors: Mapping[Key, Tensor], before: Mapping[Key, float]) -> None:
    """Average the tensors that have changed on any process since their ``checksums``.

    Each element is averaged over the processes where it is finite. It stays unchanged if there are
    none. The mean is computed in float64, where the mean of equal numbers is exact. A tensor that
    does not exist on every process in the same shape stays unchanged.
    """
    keys = _on_every_process(tensors)
    if not keys:
        return
    now = checksums(tensors)
    changed = [float(now[key] != before.get(key)) for key in keys]
    flags = largest_over_ranks(changed, tensors[keys[0]].device)
    for tensor in [tensors[key].detach() for key, flag in zip(keys, flags, strict=True) if flag]:
        wide = tensor.double()
        finite = wide.isfinite()
        both = torch.stack([wide.where(finite, 0.0), finite.double()])
        dist.all_reduce(both)
        mean = (both[0] / both[1]).to(tensor.dtype)
        tensor.copy_(mean.where(both[1] > 0, tensor))


def _on_every_process(tensors: Mapping[Key, Tensor]) -> list[Key]:
    """Return the keys that all processes have, in the same order on each. A collective."""
    first, *others = gather_objects(list(tensors), (dist.group.WORLD,))
    shared = set(first).intersection(*others)
    return [key for key in first if key in shared]


def average_states(optimizer: Optimizer) -> None:
    """Average the floating tensors of an optimizer's state that exist on every process.

    A quantized state stays as it is: a mean of its scales does not fit the codes of any process.
    """
    reset_non_finite(optimizer)
    parameters = parameters_of(optimizer)
    states: dict[Key, Tensor] = {}
    for number, parameter in enumerate(parameters):
        state = optimizer.state.get(parameter, {})
        tensors = {key: as_real(value) for key, value in state.items() if isinstance(value, Tensor)}
        if all(t.is_floating_point() or t.numel() == 1 for t in tensors.values()):
            for key, value in tensors.items():
                if value.is_floating_point():
                    states[number, key, tuple(value.shape)] = value
    world = dist.get_world_size()
    for key in _on_every_process(states):
        # A step counter may be on the host, but NCCL sends from the parameter's device.
        mean = states[key].to(parameters[key[0]].device).contiguous() / world
        dist.all_reduce(mean)
        states[key].copy_(mean)


def reset_non_finite(optimizer: Optimizer) -> None:
    """Zero the state of each parameter whose state is not finite."""
    for state in optimizer.state.values():
        tensors = [v for v in state.values() if isinstance(v, Tensor)]
        tensors = [v for v in tensors if v.is_floating_point() or v.is_complex()]
        if not all(bool(tensor.isfinite().all()) for tensor in tensors):
            for tensor in tensors:
                tensor.zero_()
