"""How compressed buckets travel: each channel sends one bucket, step after step.

No collective is launched from a callback of another: on gloo, which matches collectives by the
order of their calls, that ends in a deadlock. Every rank adds the messages of all ranks in the
order of the ranks, so that all replicas get the same bits.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from lightning_opt.strategies.compression.codecs.chunks import cut, is_finite
from lightning_opt.strategies.compression.codecs.compressors import Codec, Compressor, Quantize
from lightning_opt.strategies.compression.codecs.packing import (
    NON_FINITE,
    read_header,
    write_header,
)
from lightning_opt.strategies.compression.exchange.residuals import Owed

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
        flagged: Whether some rank's gradient was not finite in the latest step.
        sent_bytes: What this rank sends in a step.
    """

    sent_bytes: int

    def __init__(self, owed: Owed) -> None:
        self.owed = owed
        self.flagged = False
        self._world = dist.get_world_size()

    @abstractmethod
    def start(self, gradient: Tensor, scale: float = 1.0) -> Future[Tensor]:
        """Launch the exchange of one step.

        Args:
            gradient: The bucket of this rank, flat, which ``owed.pending`` contains already. It
                becomes the mean over ranks of what was sent, or NaN everywhere if any rank's
                gradient was not finite. In ``owed.pending`` stays what was not sent.
            scale: What the gradient is multiplied with (a loss scale), unlike what is owed.

        Returns:
            A future of ``gradient``.
        """

    def commit(self) -> None:
        """The step has been applied. Not to be called for one that was flagged."""
        self.owed.commit()

    def fold(self) -> None:
        """Move into ``owed.kept`` what the channel keeps elsewhere. Nothing, usually."""

    @property
    def bound(self) -> float | None:
        """What the codec has learnt and a resumed run should know."""
        return None

    @property
    @abstractmethod
    def selected(self) -> int:
        """How many elements this rank's latest message carries."""


@dataclass
class Piece:
    """A part of a bucket that travels by itself.

    Attributes:
        cut: Where it lies.
        codec: Compresses it.
        gathered: Room for the messages of all ranks.
    """

    cut: slice
    codec: Codec
    gathered: Tensor


class GatherChannel(Channel):
    """Sends every rank's message to every rank.

    What is quantised travels in pieces on a CPU, each in an all-gather of its own, so that the next
    is coded while one is on its way. The bits are the same as of one message for all.

    Args:
        compressor: How the bucket is compressed.
        owed: See :class:`Channel`.
        bound: What an earlier codec has learnt.
    """

    def __init__(self, compressor: Compressor, owed: Owed, bound: float | None = None) -> None:
        super().__init__(owed)
        numel, device = owed.kept.numel(), owed.kept.device
        size = piece_size(compressor, numel, device)
        self._pieces = []
        for where in cut(numel, size):
            codec = compressor.codec(where.stop - where.start, device)
            codec.bound = bound
            room = codec.message.new_empty(self._world * codec.nbytes)
            self._pieces.append(Piece(where, codec, room))
        self.sent_bytes = (self._world - 1) * sum(piece.codec.nbytes for piece in self._pieces)

    def start(self, gradient: Tensor, scale: float = 1.0) -> Future[Tensor]:
        """Launch the exchange of one step; see :meth:`Channel.start`."""
        # Pieces may arrive, and take the place of their gradients, before the last one is coded: it
        # must be known beforehand whether all are finite.
        finite, self.flagged = is_finite(self.owed.pending), False
        futures: list[Future[Tensor]] = []
        for piece in self._pieces:
            codec = piece.codec
            if finite:
                codec.compress(self.owed.pending[piece.cut])
            else:
                write_header(codec.message, 0, NON_FINITE)
            work = all_gather(piece.gathered, codec.message, async_op=True)
            finish = partial(self._finish, piece, gradient[piece.cut], scale)
            futures.append(work.get_future().then(finish))
        if len(futures) == 1:
            return futures[0]

        def finish_all(future: Future[list[Future[Tensor]]]) -> Tensor:
            for one in future.value():
                one.value()  # raises what went wrong, such as a lost rank
            return gradient

        return torch.futures.collect_all(futures).then(finish_all)

    def _finish(
        self, piece: Piece, gradient: Tensor, scale: float, future: Future[list[Tensor]]
    ) -> Tensor:
        future.value()  # raises what went wrong, such as a lost rank
        messages = piece.gathered.view(self._world, -1)
        if not is_sound(messages):
            self.flagged = True
            return gradient.fill_(math.nan)
        decompress_sum(piece.codec, messages, gradient.zero_(), scale / self._world)
        return gradient

    @property
    def bound(self) -> float | None:
        """What the codec has learnt and a resumed run should know."""
        return self._pieces[0].codec.bound

    @property
    def selected(self) -> int:
        """How many elements this rank's latest message carries."""
        return sum(read_header(piece.codec.message)[0] for piece in self._pieces)


def decompress_sum(codec: Codec, messages: Iterable[Tensor], out: Tensor, alpha: float) -> None:
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
    if not isinstance(compressor, Quantize) or device.type != "cpu":
        return numel
    size = max(PIECE // shards, LEAST_PIECE)
    return max(size // compressor.block, 1) * compressor.block


def is_sound(messages: Iterable[Tensor]) -> bool:
    """Return whether no message is flagged. Waits for the device: they say so themselves."""
    return all(read_header(message)[1] != NON_FINITE for message in messages)
