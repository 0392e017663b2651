"""Compressed gradients among many ranks: scatter, add up, compress again, gather.

An all-gather of whole messages grows with the number of ranks; here each rank adds up one shard of
the bucket for all, so that a rank sends less than twice the message, however many there are.

References:
    Li, Gong, Wang and Hoefler (2022), *Near-Optimal Sparse Allreduce for Distributed Deep
    Learning*, for sparse messages.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from lightning_opt.core.modules.sharding import reads_are_free
from lightning_opt.core.numerics.scalars import Scalar
from lightning_opt.strategies.chunks import cut, is_finite
from lightning_opt.strategies.compression.exchange.channels import (
    Channel,
    all_gather,
    clear,
    code,
    decompress_sum,
    piece_size,
)
from lightning_opt.strategies.compression.exchange.residuals import Owed
from lightning_opt.strategies.compressors import Compressor, Quantize, TopK
from lightning_opt.strategies.packing import any_flag

SPARSE_FROM = 32
"""Number of ranks from which on Top-K travels in two stages: its elements are selected twice then,
but it sends as many bytes for any number of ranks."""


def is_staged(scheme: object) -> bool:
    """Return whether the messages of a scheme travel in two stages."""
    world = dist.get_world_size()
    return (isinstance(scheme, Quantize) and world > 2) or (
        isinstance(scheme, TopK) and world >= SPARSE_FROM
    )


def shard_compressor(compressor: Compressor, numel: int) -> tuple[Compressor, int]:
    """Return what compresses a shard of a bucket, and what the shard's length is a multiple of.

    A shard of a bucket gets its share of the bucket's elements.
    """
    if isinstance(compressor, Quantize):
        return compressor, compressor.block
    if isinstance(compressor, TopK) and compressor.k is not None:
        return TopK(compressor.capacity(numel) / numel), 1
    return compressor, 1


class Part:
    """A part of every shard of a bucket, which travels by itself.

    Args:
        compressor: How both stages are compressed.
        cuts: Where the parts of the shards lie in the bucket, one a rank.
        group: See :class:`TwoStageChannel`.
        like: Flat, of the residual's dtype and device.

    Attributes:
        own: Where this rank's part lies.
        codecs: Of the messages to the ranks.
        owed_mean: What this rank failed to send of the mean of its part.
    """

    def __init__(
        self, compressor: Compressor, cuts: list[slice], group: dist.ProcessGroup, like: Tensor
    ) -> None:
        self.own = cuts[dist.get_rank(group)]
        self._cuts = cuts
        self._group = group
        self.codecs = [compressor.codec(where.stop - where.start, like.device) for where in cuts]
        row = self.codecs[0].nbytes  # the last shards may need less
        self._sent = self.codecs[0].message.new_zeros(len(cuts), row)
        for codec, message in zip(self.codecs, self._sent, strict=True):
            codec.message = message
        self._received = torch.empty_like(self._sent)
        self._mean_codec = compressor.codec(self.own.stop - self.own.start, like.device)
        self._mean_codec.message = self._sent.new_zeros(row)
        self.owed_mean = Owed(like.new_zeros(self.own.stop - self.own.start))
        self._gathered = torch.empty_like(self._sent)
        self.sent_bytes = 2 * (len(cuts) - 1) * row

    def scatter(self, pending: Tensor, bad: Tensor) -> Any:
        """Code a bucket with what it is owed, and launch the first stage."""
        for codec, where in zip(self.codecs, self._cuts, strict=True):
            code(codec, pending[where], bad)
        self._scattering = dist.all_to_all_single(
            self._received, self._sent, group=self._group, async_op=True
        )
        return self._scattering

    def gather(self, flagged: Tensor) -> None:
        """Wait for the first stage, code the mean of this rank's shard, and launch the second.

        Args:
            flagged: Becomes true if some rank's gradient was not finite: all ranks learn so here,
                since a rank flags all its messages.
        """
        self._scattering.wait()
        flagged.logical_or_(any_flag(self._received))
        mean = self.owed_mean.pending.copy_(self.owed_mean.kept)
        decompress_sum(self._mean_codec, self._received, mean, 1.0 / len(self._cuts))
        self._mean_codec.compress(mean)
        self._gathering = all_gather(
            self._gathered.view(-1), self._mean_codec.message, group=self._group, async_op=True
        )

    def spread(self, gradient: Tensor, scale: Scalar, flagged: Tensor) -> None:
        """Wait for the second stage, and put ``scale`` times the means in the gradient's place."""
        self._gathering.wait()
        for codec, where, row in zip(self.codecs, self._cuts, self._gathered, strict=True):
            codec.decompress_add(row, clear(gradient[where], flagged), scale)


class TwoStageChannel(Channel):
    """Sends compressed shards to the ranks that add them up, and gathers the compressed means.

    Both stages have error feedback: what compressing a rank's gradient loses stays on that rank,
    what compressing a shard's mean loses stays on the rank that has added it up. Of sparse messages
    each stage selects the largest elements shard by shard.

    What is quantised travels in parts on a CPU: while one is on its way, others are coded. The
    bits are the same as of whole shards.

    Args:
        compressor: How both stages are compressed.
        owed: See :class:`~lightning_opt.strategies.compression.exchange.channels.Channel`.
        group: A process group that nothing else uses, since the two stages of one bucket and the
            next must come in the same order on all ranks.
        worker: One thread, the same for all buckets, which runs them in order.
    """

    def __init__(
        self,
        compressor: Compressor,
        owed: Owed,
        group: dist.ProcessGroup,
        worker: ThreadPoolExecutor,
    ) -> None:
        super().__init__(owed)
        self._worker = worker
        numel = owed.kept.numel()
        compressor, block = shard_compressor(compressor, numel)
        # Shards end where a block does; of a small bucket the last ones may be empty.
        size = -(-numel // (self._world * block)) * block
        step = piece_size(compressor, size, owed.kept.device, self._world)
        self._parts = []
        for within in cut(size, step):
            cuts = [
                slice(min(start + within.start, numel), min(start + within.stop, numel))
                for start in range(0, self._world * max(size, 1), max(size, 1))
            ]
            self._parts.append(Part(compressor, cuts, group, owed.kept))
            self._codecs += self._parts[-1].codecs
        self.sent_bytes = sum(part.sent_bytes for part in self._parts)

    def start(self, gradient: Tensor, scale: Scalar = 1.0) -> Future[Tensor]:
        """Launch the exchange of one step; see :meth:`Channel.start`."""
        # Parts arrive, and take the place of their gradients, before the last one is coded: it must
        # be known beforehand whether all are finite.
        bad = is_finite(self.owed.pending).logical_not()
        self.flagged.zero_()
        if not reads_are_free(gradient.device):
            return self._queue(gradient, scale, bad)
        future: Future[Tensor] = Future()

        def run() -> None:
            try:
                self._exchange(gradient, scale, bad)
                future.set_result(gradient)
            except Exception as error:  # noqa: BLE001 - DDP raises it in the backward pass
                future.set_exception(error)  # type: ignore[arg-type]

        self._worker.submit(run)
        return future

    def _queue(self, gradient: Tensor, scale: Scalar, bad: Tensor) -> Future[Tensor]:
        """Launch everything at once: torch runs ``finish`` on a stream beside the backward pass's.

        That stream waits for the first stage, and neither the backward pass nor the host does.
        """
        (part,) = self._parts

        def finish(future: Future[list[Tensor]]) -> Tensor:
            future.value()  # raises what went wrong
            part.gather(self.flagged)
            part.spread(gradient, scale, self.flagged)
            return gradient

        future: Future[Tensor] = part.scatter(self.owed.pending, bad).get_future().then(finish)
        return future

    def _exchange(self, gradient: Tensor, scale: Scalar, bad: Tensor) -> None:
        parts = self._parts
        # One part is coded while the mean of the one before and that before it are on their way.
        # All ranks launch collectives in this order.
        for turn in range(len(parts) + 2):
            if turn < len(parts):
                parts[turn].scatter(self.owed.pending, bad)
            if 1 <= turn <= len(parts):
                parts[turn - 1].gather(self.flagged)
            if turn >= 2:
                parts[turn - 2].spread(gradient, scale, self.flagged)

    def commit(self, lost: Tensor) -> None:
        """The step has been applied; see :meth:`Channel.commit`."""
        super().commit(lost)
        for part in self._parts:
            part.owed_mean.commit(lost)

    def fold(self) -> None:
        """Move what this rank owes to the mean of its shard into its residual."""
        for part in self._parts:
            self.owed.kept[part.own].add_(part.owed_mean.kept, alpha=self._world)
            part.owed_mean.kept.zero_()
