"""The mean over replicas, in messages of few bytes, of those whose numbers are sound.

Each replica sends every other one its shard, and gathers the compressed means: twice the message,
however many replicas there are. All decode the same bytes, so that all get the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from lightning_opt.core.scalars import Scalar
from lightning_opt.strategies.chunks import is_finite
from lightning_opt.strategies.compressors import Codec, Quantize
from lightning_opt.strategies.packing import HEADER, any_flag, write_count, write_flag

CODECS = {"int8": Quantize(bits=8), "int4": Quantize(bits=4), "float32": None}


@dataclass
class Replicas:
    """The process groups, which nothing else may use.

    Attributes:
        count: How many replicas there are.
        index: Which is this one.
        leaders: The first process of each replica.
        inside: This replica's processes; None if there is but one.
    """

    count: int
    index: int
    leaders: dist.ProcessGroup
    inside: dist.ProcessGroup | None

    @property
    def leads(self) -> bool:
        """Whether this process talks to the other replicas."""
        return self.inside is None or dist.get_rank(self.inside) == 0


def make_groups(processes: int, timeout: Any) -> tuple[Replicas, dist.ProcessGroup]:
    """Return who exchanges, and a group for what happens within this replica. A collective.

    Args:
        processes: Of each replica; they have consecutive ranks.
        timeout: How long they wait for each other.
    """
    world, own = dist.get_world_size(), dist.get_rank() // processes
    firsts = range(0, world, processes)
    leaders = dist.new_group(list(firsts), timeout=timeout)
    # All processes must call for all groups, in one order.
    members = [list(range(first, first + processes)) for first in firsts]
    inside = [dist.new_group(ranks, timeout=timeout) for ranks in members][own]
    exchanging = [dist.new_group(ranks, timeout=timeout) for ranks in members][own]
    return Replicas(len(firsts), own, leaders, exchanging if processes > 1 else None), inside


class WholeCodec(Codec):
    """Sends every element as it is.

    Args:
        numel: Elements of the tensor.
        like: Of the tensor's dtype and device.
    """

    def __init__(self, numel: int, like: Tensor) -> None:
        super().__init__(HEADER + numel * like.element_size(), like.device)
        self._numel, self._dtype = numel, like.dtype

    def compress(self, flat: Tensor) -> None:
        """Write the message of a tensor, and leave 0 in it."""
        write_count(self.message, self._numel)
        self.message[HEADER:].view(self._dtype).copy_(flat)
        flat.zero_()

    def decompress_add(self, message: Tensor, out: Tensor, alpha: Scalar = 1.0) -> None:
        """Add ``alpha`` times what a message carries to ``out``, in place."""
        out.add_(message[HEADER:].view(self._dtype) * alpha)


@dataclass
class Outcome:
    """What an exchange brought.

    Attributes:
        mean: Over the replicas that were sound; None if there was none.
        sound: Whether this one was.
        apart: Distance of this replica from the mean, on the device; None if there is none.
        sent_bytes: What this process sent.
    """

    mean: Tensor | None
    sound: bool
    apart: Tensor | None
    sent_bytes: int


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
    count, numel = replicas.count, moved.numel()
    compressor = CODECS[compression]
    block = 8 if compressor is None else compressor.block
    size = -(-numel // (count * block)) * block
    codec = WholeCodec(size, moved) if compressor is None else compressor.codec(size, moved.device)
    row = -(-codec.nbytes // 8) * 8
    # gloo sends from host memory.
    wire = torch.device("cpu") if dist.get_backend() == "gloo" else moved.device
    gathered = torch.empty(count, row, dtype=torch.uint8, device=wire)
    sound, sent_bytes = bool(is_finite(moved)), 0
    if replicas.leads:
        if sound:
            owed.add_(moved)
        shards = functional.pad(owed, (0, count * size - numel)).view(count, size)
        sent = torch.zeros(count, row, dtype=torch.uint8, device=moved.device)
        for shard, message in zip(shards, sent, strict=True):
            codec.message = message[: codec.nbytes]
            if sound:
                codec.compress(shard)
            else:
                write_flag(codec.message, True)
        received = torch.empty_like(gathered)
        dist.all_to_all_single(received, sent.to(wire), group=replicas.leaders)
        messages = [message for message in received.to(moved.device) if _is_sound(message)]
        total = torch.zeros_like(shards[0])
        for message in messages:
            codec.decompress_add(message[: codec.nbytes], total, 1.0 / len(messages))
        own = torch.zeros(row, dtype=torch.uint8, device=moved.device)
        codec.message = own[: codec.nbytes]
        if messages:
            codec.compress(total)
            shards[replicas.index].add_(
                total, alpha=count
            )  # what the mean's message fails to carry
        else:
            write_flag(own, True)
        owed.copy_(shards.view(-1)[:numel])
        dist.all_gather(list(gathered.unbind()), own.to(wire), group=replicas.leaders)
        sent_bytes = 2 * (count - 1) * row
    if replicas.inside is not None:
        dist.broadcast(gathered, group=replicas.inside, group_src=0)
    gathered = gathered.to(moved.device)
    mean = apart = None
    if all(map(_is_sound, gathered)):
        mean = moved.new_zeros(count * size)
        for message, out in zip(gathered, mean.view(count, size), strict=True):
            codec.decompress_add(message[: codec.nbytes], out)
        mean = mean[:numel]
    if mean is not None and sound:
        apart = torch.linalg.vector_norm(moved - mean)
    return Outcome(mean, sound, apart, sent_bytes)


def _is_sound(message: Tensor) -> bool:
    return not any_flag(message.unsqueeze(0))
