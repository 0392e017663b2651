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

from lightning_opt.strategies.compression.codecs.chunks import LEAST_PIECE, PIECE, cut, is_finite
from lightning_opt.strategies.compression.codecs.compressors import Codec, Compressor, Quantize
from lightning_opt.strategies.compression.codecs.packing import (
    NON_FINITE,
    read_header,
    write_header,
)

# The name from torch 2.13 on, which warns about the older one.
all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)


def all_reduce_mean(gradient: Tensor, group: dist.ProcessGroup | None = None) -> Future[Tensor]:
    """Average a bucket over all ranks, uncompressed and in place."""
    gradient.div_(dist.get_world_size(group))
    work = dist.all_reduce(gradient, group=group, async_op=True)
    future: Future[Tensor] = work.get_future().then(_first)
    return future


def _first(future: Future[list[Tensor]]) -> Tensor:
    return future.value()[0]


def dense_bytes(numel: int, itemsize: int, world: int) -> int:
    """Return what one rank sends in a ring all-reduce."""
    return 2 * (world - 1) * numel * itemsize // world


class Channel(ABC):
    """Averages one bucket over all ranks with compression and error feedback.

    Args:
        residual: What earlier steps failed to send, flat; updated in place.
        group: The ranks; None for all.

    Attributes:
        flagged: Whether some rank's gradient was not finite in the latest step.
        owes: Whether the residual may hold anything.
        sent_bytes: What this rank sends in a step.
    """

    owes = True
    sent_bytes: int

    def __init__(self, residual: Tensor, group: dist.ProcessGroup | None = None) -> None:
        self.residual = residual
        self.flagged = False
        self._group = group
        self._world = dist.get_world_size(group)

    @abstractmethod
    def start(self, gradient: Tensor, scale: float = 1.0) -> Future[Tensor]:
        """Launch the exchange of one step.

        Args:
            gradient: The bucket of this rank, flat. It becomes the mean over ranks of what was
                sent, or NaN everywhere if any rank's gradient was not finite; nothing of such a
                step stays in the residual.
            scale: What the gradient is multiplied with (a loss scale). The residual is kept
                without it.

        Returns:
            A future of ``gradient``.
        """

    @abstractmethod
    def take_back(self) -> None:
        """Put back into the residual what the latest step sent, since it will not be applied."""

    def forget(self) -> None:
        """Let go of what only :meth:`take_back` needs. Nothing, usually."""

    def fold(self) -> None:
        """Move into the residual what the channel keeps elsewhere. Nothing, usually."""

    def clear_sent(self, flat: Tensor) -> None:
        """Set to zero the elements that the latest step selected. None, where all are sent."""

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
        residual: See :class:`Channel`.
        group: See :class:`Channel`.
    """

    def __init__(
        self, compressor: Compressor, residual: Tensor, group: dist.ProcessGroup | None = None
    ) -> None:
        super().__init__(residual, group)
        self._finite = True
        numel, device = residual.numel(), residual.device
        size = piece_size(compressor, numel, device)
        self._pieces = []
        for where in cut(numel, size):
            codec = compressor.codec(where.stop - where.start, device)
            room = codec.message.new_empty(self._world * codec.nbytes)
            self._pieces.append(Piece(where, codec, room))
        self.sent_bytes = (self._world - 1) * sum(piece.codec.nbytes for piece in self._pieces)

    def start(self, gradient: Tensor, scale: float = 1.0) -> Future[Tensor]:
        """Launch the exchange of one step; see :meth:`Channel.start`."""
        self.flagged = False
        # Pieces may arrive, and take the place of their gradients, before the last one is coded: it
        # must be known beforehand whether all are finite. A single one is looked at while coding.
        self._finite = len(self._pieces) == 1 or is_finite(gradient)
        futures: list[Future[Tensor]] = []
        for piece in self._pieces:
            codec = piece.codec
            if self._finite:
                part = gradient[piece.cut]
                self._finite = codec.compress(self.residual[piece.cut], part, 1.0 / scale)
            else:
                write_header(codec.message, 0, NON_FINITE)
            work = all_gather(piece.gathered, codec.message, group=self._group, async_op=True)
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
            if self._finite:
                self._recover(piece)
                self.residual[piece.cut].sub_(gradient, alpha=1.0 / scale)
            return gradient.fill_(math.nan)
        piece.codec.decompress_sum(messages, gradient, scale / self._world)
        return gradient

    def take_back(self) -> None:
        """Put back into the residual what the latest step sent."""
        for piece in self._pieces:
            self._recover(piece)

    def _recover(self, piece: Piece) -> None:
        piece.codec.decompress_add(piece.codec.message, self.residual[piece.cut])

    def clear_sent(self, flat: Tensor) -> None:
        """Set to zero the elements that this rank's latest messages carry."""
        for piece in self._pieces:
            piece.codec.clear_sent(flat[piece.cut])

    @property
    def selected(self) -> int:
        """How many elements this rank's latest messages carry."""
        return sum(read_header(piece.codec.message)[0] for piece in self._pieces)


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


class DenseChannel(Channel):
    """Sends every element, with all that the residual holds.

    Args:
        residual: See :class:`Channel`.
        owes: Whether the residual may hold anything.
        gradient: The bucket.
        dtype: Narrower floats to send; None for the gradient's own.
        group: See :class:`Channel`.

    Attributes:
        keeps: Whether the residual gets back a part of what it held, once the step has been sent.
    """

    def __init__(
        self,
        residual: Tensor,
        owes: bool,
        gradient: Tensor,
        dtype: torch.dtype | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__(residual, group)
        self.owes = owes
        self.keeps = False
        self._flushed: Tensor | None = None
        self._narrow = None if dtype is None else torch.empty_like(gradient, dtype=dtype)
        itemsize = gradient.element_size() if dtype is None else dtype.itemsize
        self.sent_bytes = dense_bytes(gradient.numel(), itemsize, self._world)

    def start(self, gradient: Tensor, scale: float = 1.0) -> Future[Tensor]:
        """Launch the exchange of one step; see :meth:`Channel.start`."""
        self._flushed = self.residual.clone() if self.owes else None
        if self.owes:
            gradient.add_(self.residual, alpha=scale)
        payload = gradient if self._narrow is None else self._narrow.copy_(gradient)

        def finish(future: Future[Tensor]) -> Tensor:
            mean = future.value()
            if mean is not gradient:
                gradient.copy_(mean)
            self.flagged = not is_finite(gradient)  # the same bits on all ranks
            if not self.flagged:
                if self.owes:
                    self.residual.zero_()
                self.owes = self.keeps
            return gradient

        return all_reduce_mean(payload, self._group).then(finish)

    def take_back(self) -> None:
        """Put back into the residual what it held before the latest step."""
        if self._flushed is not None:
            self.residual.copy_(self._flushed)
            self.owes = True

    def forget(self) -> None:
        """Let go of the copy of what the residual held."""
        self._flushed = None

    @property
    def selected(self) -> int:
        """Every element."""
        return self.residual.numel()
