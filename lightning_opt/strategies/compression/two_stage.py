"""Averages one bucket in two stages: exchange compressed shards, then gather the compressed means.

An all-gather of whole messages grows with the number of ranks. Here each rank sums one shard of
the bucket for all ranks, so that a rank sends less than twice the message at any number of ranks.

References:
    Li, Gong, Wang and Hoefler (2022), *Near-Optimal Sparse Allreduce for Distributed Deep
    Learning*, for sparse messages.
"""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from lightning_opt.core.modules.sharding import reads_are_free
from lightning_opt.core.numerics.scalars import Scalar
from lightning_opt.strategies.compression.exchange import (
    Exchange,
    Residual,
    add_messages,
    all_gather,
    clear,
    encode,
    piece_size,
)
from lightning_opt.strategies.compressors import Compressor, Quantize, TopK
from lightning_opt.strategies.packing import any_flag, is_finite, split

MIN_SPARSE_RANKS = 32
"""Number of ranks from which Top-K uses two stages. It then selects elements twice, but sends the
same number of bytes at any number of ranks."""

MIN_SPARSE_SHARD = 1024
"""Minimum elements per shard for which Top-K uses two stages."""


def uses_two_stages(scheme: object, numel: float = math.inf) -> bool:
    """Return whether buckets of ``numel`` elements are exchanged in two stages."""
    world = dist.get_world_size()
    if isinstance(scheme, Quantize):
        return world > 2
    return (
        isinstance(scheme, TopK) and world >= MIN_SPARSE_RANKS and numel >= MIN_SPARSE_SHARD * world
    )


class Piece:
    """A piece of every shard of a bucket; pieces are exchanged one after the other.

    Args:
        compressor: Compresses the messages of both stages.
        slices: The piece's slice of each rank's shard, as slices of the bucket.
        group: See :class:`TwoStageExchange`.
        like: A tensor with the residual's dtype and device.

    Attributes:
        own_slice: The slice of this rank's shard.
        codecs: The codecs of the messages to the ranks.
        mean_residual: The residual of the mean of this rank's slice.
    """

    def __init__(
        self, compressor: Compressor, slices: list[slice], group: dist.ProcessGroup, like: Tensor
    ) -> None:
        self.own_slice = slices[dist.get_rank(group)]
        self._slices = slices
        self._group = group
        self.codecs = [compressor.codec(part.stop - part.start, like.device) for part in slices]
        row = self.codecs[0].nbytes  # the last shards may need less
        self._sent = self.codecs[0].message.new_zeros(len(slices), row)
        for codec, message in zip(self.codecs, self._sent, strict=True):
            codec.message = message
        self._received = torch.empty_like(self._sent)
        self._mean_codec = compressor.codec(self.own_slice.stop - self.own_slice.start, like.device)
        self._mean_codec.message = self._sent.new_zeros(row)
        self.mean_residual = Residual(like.new_zeros(self.own_slice.stop - self.own_slice.start))
        self._gathered = torch.empty_like(self._sent)
        self.sent_bytes = 2 * (len(slices) - 1) * row

    def scatter(self, pending: Tensor, bad: Tensor) -> Any:
        """Encode this rank's messages, and launch the first stage."""
        for codec, part in zip(self.codecs, self._slices, strict=True):
            encode(codec, pending[part], bad)
        self._scattering = dist.all_to_all_single(
            self._received, self._sent, group=self._group, async_op=True
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
        add_messages(self._mean_codec, self._received, mean, 1.0 / len(self._slices))
        self._mean_codec.compress(mean)
        self._gathering = all_gather(
            self._gathered.view(-1), self._mean_codec.message, group=self._group, async_op=True
        )

    def decode(self, gradient: Tensor, scale: Scalar, non_finite: Tensor) -> None:
        """Wait for the second stage, and overwrite the gradient with ``scale`` times the means."""
        self._gathering.wait()
        for codec, part, row in zip(self.codecs, self._slices, self._gathered, strict=True):
            codec.decompress_add(row, clear(gradient[part], non_finite), scale)


class TwoStageExchange(Exchange):
    """Sends compressed shards to the ranks that add them up, and gathers the compressed means.

    Both stages have error feedback: each rank keeps the residual of its gradient, and of the mean
    of its shard. For sparse messages, each stage selects the largest elements shard by shard.

    On a CPU, quantized shards travel in pieces, and while one is in flight others are encoded. The
    result has the same bits as whole shards.

    Args:
        compressor: Compresses the messages of both stages.
        residual: See :class:`~lightning_opt.strategies.compression.exchange.Exchange`.
        group: A process group that nothing else uses: the stages of all buckets must be launched in
            the same order on all ranks.
        worker: One thread, the same for all buckets, which runs the exchanges in order.
    """

    def __init__(
        self,
        compressor: Compressor,
        residual: Residual,
        group: dist.ProcessGroup,
        worker: ThreadPoolExecutor,
    ) -> None:
        super().__init__(residual)
        self._worker = worker
        numel = residual.committed.numel()
        # Shards end at the end of a block; the last shards of a small bucket may be empty.
        block = compressor.block if isinstance(compressor, Quantize) else 1
        size = -(-numel // (self._world * block)) * block
        step = piece_size(compressor, size, residual.committed.device, self._world)
        self._pieces = []
        for part in split(size, step):
            slices = [
                slice(min(start + part.start, numel), min(start + part.stop, numel))
                for start in range(0, self._world * max(size, 1), max(size, 1))
            ]
            self._pieces.append(Piece(compressor, slices, group, residual.committed))
            self._codecs += self._pieces[-1].codecs
        self.sent_bytes = sum(piece.sent_bytes for piece in self._pieces)

    def start(self, gradient: Tensor, scale: Scalar = 1.0) -> Future[Tensor]:
        # Computed first: pieces may arrive and overwrite the gradient before the last is encoded.
        bad = is_finite(self.residual.pending).logical_not()
        self.non_finite.zero_()
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
