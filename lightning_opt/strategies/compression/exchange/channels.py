"""How compressed buckets travel: each channel sends one bucket, step after step.

No collective is launched from a callback of another: on gloo, which matches collectives by the
order of their calls, that ends in a deadlock. Every rank adds the messages of all ranks in the
order of the ranks, so that all replicas get the same bits.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from lightning_opt.core.modules.sharding import reads_are_free
from lightning_opt.core.numerics.scalars import Scalar
from lightning_opt.strategies.chunks import cut, is_finite
from lightning_opt.strategies.compression.exchange.residuals import Owed
from lightning_opt.strategies.compressors import Codec, Compressor, Quantize
from lightning_opt.strategies.packing import any_flag, read_count, write_count, write_flag

# The name from torch 2.13 on, which warns about the older one.
all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)

PIECE = 2_097_152
"""Elements that travel together on a CPU: while one piece is on its way, the next is coded."""

LEAST_PIECE = 262_144
"""Elements of a shard's piece, at least: the more ranks there are, the smaller are messages."""


def all_reduce_mean(gradient: Tensor, dtype: torch.dtype | None = None) -> Future[Tensor]:
    """Average a bucket over all ranks in place, perhaps in a narrower ``dtype``."""
    gradient.div_(dist.get_world_size())
    payload = gradient if dtype is None else gradient.to(dtype)

    def finish(future: Future[list[Tensor]]) -> Tensor:
        mean = future.value()[0]
        return mean if dtype is None else gradient.copy_(mean)

    future: Future[Tensor] = dist.all_reduce(payload, async_op=True).get_future().then(finish)
    return future


def dense_bytes(numel: int, itemsize: int, world: int) -> int:
    """Return what one rank sends in a ring all-reduce."""
    return 2 * (world - 1) * numel * itemsize // world


class Channel(ABC):
    """Averages one bucket over all ranks with compression and error feedback.

    Args:
        owed: What earlier steps failed to send.

    Attributes:
        flagged: Whether some rank's gradient was not finite in the latest step: 0-dimensional, on
            the bucket's device.
        sent_bytes: What this rank sends in a step.
    """

    sent_bytes: int

    def __init__(self, owed: Owed) -> None:
        self.owed = owed
        self.flagged = torch.zeros((), dtype=torch.bool, device=owed.kept.device)
        self._world = dist.get_world_size()
        self._codecs: list[Codec] = []  # of this rank's messages; none where torch codes

    @abstractmethod
    def start(self, gradient: Tensor, scale: Scalar = 1.0) -> Future[Tensor]:
        """Launch the exchange of one step. Where the bucket lies on a device, nothing is read.

        Args:
            gradient: The bucket of this rank, flat, which ``owed.pending`` contains already. It
                becomes the mean over ranks of what was sent, or NaN everywhere if any rank's
                gradient was not finite. In ``owed.pending`` stays what was not sent.
            scale: What the gradient is multiplied with (a loss scale), unlike what is owed.

        Returns:
            A future of ``gradient``.
        """

    def commit(self, lost: Tensor) -> None:
        """The step has been applied, unless ``lost``; not to be called with less than flagged."""
        self.owed.commit(lost)

    def fold(self) -> None:
        """Move into ``owed.kept`` what the channel keeps elsewhere. Nothing, usually."""

    @property
    def selected(self) -> int:
        """How many elements this rank's latest messages carry; all, where no codec selects."""
        if not self._codecs:
            return self.owed.kept.numel()
        return sum(read_count(codec.message) for codec in self._codecs)


class GatherChannel(Channel):
    """Sends every rank's message to every rank.

    What is quantised travels in pieces on a CPU, each in an all-gather of its own, so that the next
    is coded while one is on its way. The bits are the same as of one message for all.

    Args:
        compressor: How the bucket is compressed.
        owed: See :class:`Channel`.
        bound: What an earlier codec has learned.
    """

    def __init__(self, compressor: Compressor, owed: Owed, bound: float | None = None) -> None:
        super().__init__(owed)
        numel, device = owed.kept.numel(), owed.kept.device
        size = piece_size(compressor, numel, device)
        self._pieces: list[tuple[slice, Codec, Tensor]] = []
        for where in cut(numel, size):
            codec = compressor.codec(where.stop - where.start, device)
            codec.bound = bound
            room = codec.message.new_empty(self._world * codec.nbytes)
            self._pieces.append((where, codec, room))
            self._codecs.append(codec)
        self.sent_bytes = (self._world - 1) * sum(codec.nbytes for codec in self._codecs)

    def start(self, gradient: Tensor, scale: Scalar = 1.0) -> Future[Tensor]:
        """Launch the exchange of one step; see :meth:`Channel.start`."""
        # Pieces may arrive, and take the place of their gradients, before the last one is coded: it
        # must be known beforehand whether all are finite.
        bad = is_finite(self.owed.pending).logical_not()
        self.flagged.zero_()
        futures: list[Future[Tensor]] = []
        for where, codec, room in self._pieces:
            code(codec, self.owed.pending[where], bad)
            work = all_gather(room, codec.message, async_op=True)
            finish = partial(self._finish, codec, room, gradient[where], scale)
            futures.append(work.get_future().then(finish))
        if len(futures) == 1:
            return futures[0]

        def finish_all(future: Future[list[Future[Tensor]]]) -> Tensor:
            for one in future.value():
                one.value()  # raises what went wrong, such as a lost rank
            return gradient

        return torch.futures.collect_all(futures).then(finish_all)

    def _finish(
        self, codec: Codec, room: Tensor, out: Tensor, scale: Scalar, future: Future[list[Tensor]]
    ) -> Tensor:
        future.value()  # raises what went wrong, such as a lost rank
        messages = room.view(self._world, -1)
        self.flagged.logical_or_(any_flag(messages))
        decompress_sum(codec, messages, clear(out, self.flagged), scale / self._world)
        return out

    @property
    def bound(self) -> Scalar | None:
        """What the codec has learned and a resumed run should know."""
        return self._pieces[0][1].bound


def code(codec: Codec, flat: Tensor, bad: Tensor) -> None:
    """Write the message of a tensor, flagged if the rank's gradient is ``bad``: not finite."""
    # A CPU knows for free that there is nothing to code. What a device then sends is not used.
    if reads_are_free(flat.device) and bad:
        write_count(codec.message, 0)
    else:
        codec.compress(flat)
    write_flag(codec.message, bad)


def clear(out: Tensor, flagged: Tensor) -> Tensor:
    """Make room for a sum of messages: zeros, or NaN, which stays so, if some rank was flagged."""
    return out.fill_(torch.where(flagged, math.nan, 0.0))


def decompress_sum(codec: Codec, messages: Iterable[Tensor], out: Tensor, alpha: Scalar) -> None:
    """Add ``alpha`` times what several messages carry to ``out``.

    They are added one after the other, so that all who hold them get the same bits.
    """
    for message in messages:
        codec.decompress_add(message, out, alpha)


def piece_size(compressor: Compressor, numel: int, device: torch.device, shards: int = 1) -> int:
    """Return how many elements of each shard of a bucket travel together.

    Only what is quantised can be cut without a change: at the ends of blocks. An accelerator codes
    so fast that there is nothing to hide.

    Args:
        compressor: How the bucket is compressed.
        numel: Elements of a shard.
        device: Where the bucket lies.
        shards: How many there are.
    """
    if not isinstance(compressor, Quantize) or not reads_are_free(device):
        return numel
    size = max(PIECE // shards, LEAST_PIECE)
    return max(size // compressor.block, 1) * compressor.block
