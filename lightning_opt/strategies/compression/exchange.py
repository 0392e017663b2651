"""Averages one bucket over all ranks: uncompressed, by an all-gather, or in two stages.

No collective is launched from a callback of another: gloo matches collectives by the order of their
calls, and that would deadlock. Every rank adds the messages in rank order, so that all replicas get
the same bits.

An all-gather of whole messages grows with the number of ranks. In two stages, each rank sums one
shard of the bucket for all ranks and sends the compressed mean to all, so that a rank sends less
than twice the message at any number of ranks.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from lightning_opt.core.modules.sharding import reads_are_free
from lightning_opt.core.numerics.scalars import Scalar
from lightning_opt.strategies.compressors import Codec, Compressor, Quantize
from lightning_opt.strategies.packing import (
    any_flag,
    is_finite,
    read_count,
    split,
    write_count,
    write_flag,
)

# The name from torch 2.13 on, which warns about the older one.
all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)

PIECE_SIZE = 2_097_152
"""Elements per message on a CPU: while one piece is in flight, the next is encoded."""

MIN_PIECE_SIZE = 262_144
"""Minimum elements of a shard's piece, because more ranks mean smaller messages."""


def all_reduce_mean(gradient: Tensor, dtype: torch.dtype | None = None) -> Future[Tensor]:
    """Average a bucket over all ranks in place, optionally sent in a narrower ``dtype``."""
    gradient.div_(dist.get_world_size())
    payload = gradient if dtype is None else gradient.to(dtype)

    def finish(future: Future[list[Tensor]]) -> Tensor:
        mean = future.value()[0]
        return mean if dtype is None else gradient.copy_(mean)

    future: Future[Tensor] = dist.all_reduce(payload, async_op=True).get_future().then(finish)
    return future


def dense_bytes(numel: int, itemsize: int, world: int) -> int:
    """Return the bytes that one rank sends in a ring all-reduce."""
    return 2 * (world - 1) * numel * itemsize // world


class Residual:
    """The unsent values of a flat tensor, before and after the current step.

    The residual of a step is committed only when the step is applied: a step that a guard or a loss
    scaler skips must leave no trace.

    Args:
        committed: The residual before the current step, flat.

    Attributes:
        committed: See above.
        pending: The residual after the current step.
    """

    def __init__(self, committed: Tensor) -> None:
        self.committed = committed
        self.pending = torch.empty_like(committed)

    def commit(self, skipped: Tensor) -> None:
        """Commit the pending residual unless the step was ``skipped``, 0-dimensional."""
        if not reads_are_free(skipped.device):
            torch.where(skipped, self.committed, self.pending, out=self.committed)
        elif not skipped:  # on a CPU
            self.committed, self.pending = self.pending, self.committed


class Exchange(ABC):
    """Averages one bucket over all ranks with compression and error feedback, step after step.

    Args:
        residual: The bucket's residual.

    Attributes:
        non_finite: Whether any rank's gradient was not finite in the latest step: 0-dimensional, on
            the bucket's device.
        sent_bytes: Bytes that this rank sends per step.
    """

    sent_bytes: int

    def __init__(self, residual: Residual) -> None:
        self.residual = residual
        self.non_finite = torch.zeros((), dtype=torch.bool, device=residual.committed.device)
        self._world = dist.get_world_size()
        self._messages: list[Tensor] = []  # of this rank

    def start(self, gradient: Tensor, scale: Scalar = 1.0) -> Future[Tensor]:
        """Launch the exchange of one step. On a device, nothing is read to the host.

        Args:
            gradient: This rank's bucket, flat; ``residual.pending`` already includes it. It is
                overwritten with the mean over ranks of the sent values, or with NaN if any rank's
                gradient was not finite. ``residual.pending`` keeps the unsent rest.
            scale: The loss scale of the gradient; the residual has none.

        Returns:
            A future of ``gradient``.
        """
        # Computed first: pieces may arrive and overwrite the gradient before the last is encoded.
        bad = is_finite(self.residual.pending).logical_not()
        self.non_finite.zero_()
        return self._launch(gradient, scale, bad)

    @abstractmethod
    def _launch(self, gradient: Tensor, scale: Scalar, bad: Tensor) -> Future[Tensor]:
        """Encode and send; ``bad`` is whether this rank's gradient is not finite."""

    def commit(self, skipped: Tensor) -> None:
        """Commit the residual unless the step was ``skipped``, which includes ``non_finite``."""
        self.residual.commit(skipped)

    def fold(self) -> None:
        """Add all residuals that the exchange keeps elsewhere to ``residual.committed``."""

    @property
    def selected(self) -> int:
        return sum(map(read_count, self._messages))


class GatherExchange(Exchange):
    """Sends every rank's message to every rank.

    On a CPU, quantized buckets travel in pieces, each with its own all-gather, so that the next
    piece is encoded while one is in flight. The result has the same bits as one message.

    Args:
        compressor: Compresses the bucket.
        residual: See :class:`Exchange`.
        bound: The threshold that an earlier codec has learned.
    """

    def __init__(
        self, compressor: Compressor, residual: Residual, bound: float | None = None
    ) -> None:
        super().__init__(residual)
        numel, device = residual.committed.numel(), residual.committed.device
        self._pieces: list[tuple[slice, Codec, Tensor]] = []
        for part in split(numel, piece_size(compressor, numel, device)):
            codec = compressor.codec(part.stop - part.start, device)
            codec.bound = bound
            gathered = codec.message.new_empty(self._world * codec.nbytes)
            self._pieces.append((part, codec, gathered))
            self._messages.append(codec.message)
        self.sent_bytes = (self._world - 1) * sum(map(len, self._messages))

    def _launch(self, gradient: Tensor, scale: Scalar, bad: Tensor) -> Future[Tensor]:
        futures: list[Future[Tensor]] = []
        for part, codec, gathered in self._pieces:
            encode(codec, self.residual.pending[part], bad)
            work = all_gather(gathered, codec.message, async_op=True)
            finish = partial(self._finish, codec, gathered, gradient[part], scale)
            futures.append(work.get_future().then(finish))
        if len(futures) == 1:
            return futures[0]

        def finish_all(future: Future[list[Future[Tensor]]]) -> Tensor:
            for one in future.value():
                one.value()  # raises its error, such as a lost rank
            return gradient

        return torch.futures.collect_all(futures).then(finish_all)

    def _finish(
        self,
        codec: Codec,
        gathered: Tensor,
        out: Tensor,
        scale: Scalar,
        future: Future[list[Tensor]],
    ) -> Tensor:
        future.value()  # raises its error, such as a lost rank
        messages = gathered.view(self._world, -1)
        self.non_finite.logical_or_(any_flag(messages))
        add_messages(codec, messages, clear(out, self.non_finite), scale / self._world)
        return out

    @property
    def bound(self) -> Scalar | None:
        return self._pieces[0][1].bound


class Piece:
    """A piece of every shard of a bucket; pieces are exchanged one after the other.

    Args:
        compressor: Compresses the messages of both stages.
        slices: The piece's slice of each rank's shard, as slices of the bucket.
        group: See :class:`TwoStageExchange`.
        like: A tensor with the residual's dtype and device.

    Attributes:
        own_slice: The slice of this rank's shard.
        sent: The messages to the ranks, as rows.
        mean_residual: The residual of the mean of this rank's slice.
    """

    def __init__(
        self, compressor: Quantize, slices: list[slice], group: dist.ProcessGroup, like: Tensor
    ) -> None:
        self.own_slice = slices[dist.get_rank(group)]
        self._slices = slices
        self._group = group
        self._codec = compressor.codec(slices[0].stop - slices[0].start, like.device)
        self.sent = self._codec.message.repeat(len(slices), 1)
        self._received = torch.empty_like(self.sent)
        self._mean_message = torch.zeros_like(self.sent[0])
        self.mean_residual = Residual(torch.zeros_like(like[self.own_slice]))
        self._gathered = torch.empty_like(self.sent)

    def scatter(self, pending: Tensor, bad: Tensor) -> Any:
        """Encode this rank's messages, and launch the first stage."""
        codec = self._codec
        for codec.message, part in zip(self.sent, self._slices, strict=True):
            encode(codec, pending[part], bad)
        self._scattering = dist.all_to_all_single(
            self._received, self.sent, group=self._group, async_op=True
        )
        return self._scattering

    def gather(self, non_finite: Tensor) -> None:
        """Wait for the first stage, encode the mean of this rank's shard, launch the second stage.

        Args:
            non_finite: Set to true if any rank's gradient was not finite. All ranks receive that
                here, because a rank flags all its messages.
        """
        self._scattering.wait()
        non_finite.logical_or_(any_flag(self._received))
        mean = self.mean_residual.pending.copy_(self.mean_residual.committed)
        add_messages(self._codec, self._received, mean, 1.0 / len(self._slices))
        self._codec.message = self._mean_message
        self._codec.compress(mean)
        self._gathering = all_gather(
            self._gathered.view(-1), self._mean_message, group=self._group, async_op=True
        )

    def decode(self, gradient: Tensor, scale: Scalar, non_finite: Tensor) -> None:
        """Wait for the second stage, and overwrite the gradient with ``scale`` times the means."""
        self._gathering.wait()
        for part, message in zip(self._slices, self._gathered, strict=True):
            self._codec.decompress_add(message, clear(gradient[part], non_finite), scale)


class TwoStageExchange(Exchange):
    """Sends quantized shards to the ranks that add them up, and gathers the quantized means.

    Both stages have error feedback: each rank keeps the residual of its gradient, and of the mean
    of its shard.

    On a CPU, shards travel in pieces, and while one is in flight others are encoded. The result has
    the same bits as whole shards.

    Args:
        compressor: Compresses the messages of both stages.
        residual: See :class:`Exchange`.
        group: A process group that nothing else uses: the stages of all buckets must be launched in
            the same order on all ranks.
        worker: One thread, the same for all buckets, which runs the exchanges in order.
    """

    def __init__(
        self,
        compressor: Quantize,
        residual: Residual,
        group: dist.ProcessGroup,
        worker: ThreadPoolExecutor,
    ) -> None:
        super().__init__(residual)
        self._worker = worker
        numel = residual.committed.numel()
        # Shards end at the end of a block; the last shards of a small bucket may be empty.
        size = -(-numel // (self._world * compressor.block)) * compressor.block
        step = piece_size(compressor, size, residual.committed.device, self._world)
        self._pieces = []
        for part in split(size, step):
            slices = [
                slice(min(start + part.start, numel), min(start + part.stop, numel))
                for start in range(0, self._world * max(size, 1), max(size, 1))
            ]
            self._pieces.append(Piece(compressor, slices, group, residual.committed))
            self._messages += self._pieces[-1].sent
        message_bytes = sum(len(piece.sent[0]) for piece in self._pieces)
        self.sent_bytes = 2 * (self._world - 1) * message_bytes

    def _launch(self, gradient: Tensor, scale: Scalar, bad: Tensor) -> Future[Tensor]:
        if not reads_are_free(gradient.device):
            return self._enqueue(gradient, scale, bad)
        future: Future[Tensor] = Future()

        def run() -> None:
            try:
                self._run(gradient, scale, bad)
                future.set_result(gradient)
            except Exception as error:  # noqa: BLE001 - DDP raises it in the backward pass
                future.set_exception(error)  # type: ignore[arg-type]

        self._worker.submit(run)
        return future

    def _enqueue(self, gradient: Tensor, scale: Scalar, bad: Tensor) -> Future[Tensor]:
        """Launch everything at once: torch runs ``finish`` on a separate stream.

        That stream waits for the first stage; the backward pass and the host do not.
        """
        (piece,) = self._pieces

        def finish(future: Future[list[Tensor]]) -> Tensor:
            future.value()  # raises its error
            piece.gather(self.non_finite)
            piece.decode(gradient, scale, self.non_finite)
            return gradient

        future: Future[Tensor] = piece.scatter(self.residual.pending, bad).get_future().then(finish)
        return future

    def _run(self, gradient: Tensor, scale: Scalar, bad: Tensor) -> None:
        pieces = self._pieces
        # A pipeline: one piece is encoded while the two before it are in flight. All ranks launch
        # collectives in this order.
        for turn in range(len(pieces) + 2):
            if turn < len(pieces):
                pieces[turn].scatter(self.residual.pending, bad)
            if 1 <= turn <= len(pieces):
                pieces[turn - 1].gather(self.non_finite)
            if turn >= 2:
                pieces[turn - 2].decode(gradient, scale, self.non_finite)

    def commit(self, skipped: Tensor) -> None:
        super().commit(skipped)
        for piece in self._pieces:
            piece.mean_residual.commit(skipped)

    def fold(self) -> None:
        """Add the residuals of the means to this rank's residual."""
        for piece in self._pieces:
            mean = piece.mean_residual.committed
            self.residual.committed[piece.own_slice].add_(mean, alpha=self._world)
            mean.zero_()


def encode(codec: Codec, flat: Tensor, bad: Tensor) -> None:
    """Write the message of ``flat``, with a flag if the rank's gradient is ``bad``: not finite."""
    # A CPU can check `bad` for free. The message that a device then sends is not used.
    if reads_are_free(flat.device) and bad:
        write_count(codec.message, 0)
    else:
        codec.compress(flat)
    write_flag(codec.message, bad)


def clear(out: Tensor, non_finite: Tensor) -> Tensor:
    """Fill ``out`` with zeros, or with NaN if any rank's gradient was not finite."""
    return out.fill_(torch.where(non_finite, math.nan, 0.0))


def add_messages(codec: Codec, messages: Iterable[Tensor], out: Tensor, alpha: Scalar) -> None:
    """Add ``alpha`` times the values of messages to ``out``, in order: all ranks get equal bits."""
    for message in messages:
        codec.decompress_add(message, out, alpha)


def piece_size(compressor: Compressor, numel: int, device: torch.device, shards: int = 1) -> int:
    """Return the number of elements of each shard that travel together."""
    if not isinstance(compressor, Quantize) or not reads_are_free(device):
        return numel
    size = max(PIECE_SIZE // shards, MIN_PIECE_SIZE)
    return max(size // compressor.block, 1) * compressor.block
