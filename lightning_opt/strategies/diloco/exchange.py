"""The mean over replicas, in messages of few bytes, of those whose numbers are sound.

Each replica sends every other one its shard, and gathers the compressed means: twice the message,
however many replicas there are. All decode the same bytes, so that all get the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from lightning_opt.strategies.chunks import is_finite
from lightning_opt.strategies.compressors import Quantize
from lightning_opt.strategies.packing import any_flag, write_flag

PIECE = 2**18
"""Bytes that travel by themselves: a large message gloo sends first one way and then the other."""

CODECS = {"int8": Quantize(bits=8), "int4": Quantize(bits=4), "float32": None}


@dataclass
class Replicas:
    """The process groups, which nothing else may use.

    Attributes:
        count: How many replicas there are.
        index: Which is this one.
        leaders: The first process of each replica.
        leads: Whether this process talks to the other replicas.
        inside: This replica's processes; None if there is but one.
    """

    count: int
    index: int
    leaders: dist.ProcessGroup
    leads: bool
    inside: dist.ProcessGroup | None


def make_groups(processes: int, timeout: Any) -> tuple[Replicas, dist.ProcessGroup]:
    """Return who exchanges, and a group for what happens within this replica. A collective.

    Args:
        processes: Of each replica; they have consecutive ranks.
        timeout: How long they wait for each other.
    """
    firsts = list(range(0, dist.get_world_size(), processes))
    leaders = dist.new_group(firsts, timeout=timeout)
    inside, _ = dist.new_subgroups(processes, timeout=timeout)
    exchanging, _ = dist.new_subgroups(processes, timeout=timeout)
    index, place = divmod(dist.get_rank(), processes)
    among = exchanging if processes > 1 else None
    return Replicas(len(firsts), index, leaders, place == 0, among), inside


Outcome: TypeAlias = tuple[Tensor | None, bool, int]
"""The mean over the replicas that were sound, or None if there was none; whether this one was; and
the bytes that this process sent."""


def exchange(moved: Tensor, owed: Tensor, replicas: Replicas, compression: str) -> Outcome:
    """Average what the replicas moved. All processes of all replicas must call it.

    Waits for the device and the network: it is made for a thread of its own.

    Args:
        moved: Flat; one that is not finite is left out on every replica.
        owed: What this replica's earlier messages failed to carry, which is added; changed to what
            they fail to carry now.
        replicas: Who takes part.
        compression: A key of :data:`CODECS`.
    """
    finite = is_finite(moved).int()
    if replicas.inside is not None:
        dist.all_reduce(finite, dist.ReduceOp.MIN, replicas.inside)
    sound, compressor = bool(finite), CODECS[compression]
    if sound:
        owed.add_(moved)
    if compressor is None:
        mean, sent_bytes = _average(owed, sound, replicas)
    else:
        mean, sent_bytes = _average_compressed(owed, sound, replicas, compressor)
    return mean, sound, sent_bytes


def _average(owed: Tensor, sound: bool, replicas: Replicas) -> tuple[Tensor | None, int]:
    """Return the mean of what sound replicas owe, which is 0 then, and the bytes sent."""
    mine = owed if sound else torch.zeros_like(owed)
    total = functional.pad(mine, (0, 1), value=float(sound)).to(_wire(owed))
    owed.mul_(not sound)
    if replicas.leads:
        dist.all_reduce(total, group=replicas.leaders)
    if replicas.inside is not None:
        dist.broadcast(total, group=replicas.inside, group_src=0)
    total = total.to(owed.device)
    sent = 2 * (replicas.count - 1) * total.nbytes // replicas.count if replicas.leads else 0
    return (total[:-1] / total[-1] if total[-1] else None), sent


def _average_compressed(
    owed: Tensor, sound: bool, replicas: Replicas, compressor: Quantize
) -> tuple[Tensor | None, int]:
    """Return the mean of what sound replicas owe, and the bytes sent; the rest stays owed."""
    count, numel, sent_bytes = replicas.count, owed.numel(), 0
    size = -(-numel // (count * compressor.block)) * compressor.block
    codec = compressor.codec(size, owed.device)
    row = codec.nbytes
    gathered = torch.empty(count, row, dtype=torch.uint8, device=_wire(owed))
    if replicas.leads:
        shards = functional.pad(owed, (0, count * size - numel)).view(count, size)
        sent = torch.zeros(count, row, dtype=torch.uint8, device=owed.device)
        for shard, codec.message in zip(shards, sent, strict=True):
            write_flag(codec.message, not sound)
            if sound:
                codec.compress(shard)
        received = _swap(sent.to(gathered.device), replicas.leaders).to(owed.device)
        messages = [message for message in received if not any_flag(message)]
        total = torch.zeros_like(shards[0])
        for message in messages:
            codec.decompress_add(message, total, 1.0 / len(messages))
        own = codec.message = torch.zeros_like(sent[0])
        write_flag(own, not messages)
        if messages:
            codec.compress(total)
            # What the mean's message fails to carry.
            shards[replicas.index].add_(total, alpha=count)
        owed.copy_(shards.view(-1)[:numel])
        gathered.copy_(_swap(own.to(gathered.device).expand(count, -1), replicas.leaders))
        sent_bytes = 2 * (count - 1) * row
    if replicas.inside is not None:
        dist.broadcast(gathered, group=replicas.inside, group_src=0)
    gathered = gathered.to(owed.device)
    if any_flag(gathered):
        return None, sent_bytes
    mean = owed.new_zeros(count, size)
    for message, out in zip(gathered, mean, strict=True):
        codec.decompress_add(message, out)
    return mean.view(-1)[:numel], sent_bytes


def _swap(rows: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return what the others have sent to this process: a row for each, as it sends one to each."""
    count, row = rows.shape
    pieces = max(1, row // PIECE) if rows.device.type == "cpu" else 1
    size = -(-row // (8 * pieces)) * 8  # aligned, as scales within a message must be
    padded = functional.pad(rows, (0, pieces * size - row))
    sent = padded.view(count, pieces, size).transpose(0, 1).contiguous()
    received = torch.empty_like(sent)
    for work in [
        dist.all_to_all_single(into, piece, group=group, async_op=True)
        for into, piece in zip(received, sent, strict=True)
    ]:
        work.wait()
    return received.transpose(0, 1).reshape(count, -1)[:, :row]


def _wire(tensor: Tensor) -> torch.device:
    """Return where what is sent must lie: gloo sends from host memory."""
    return torch.device("cpu") if dist.get_backend() == "gloo" else tensor.device
