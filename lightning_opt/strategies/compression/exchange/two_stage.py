"""Compressed gradients among many ranks: scatter, add up, compress again, gather.

An all-gather of whole messages grows with the number of ranks; here each rank adds up one shard of
the bucket for all, so that a rank sends less than twice the message, however many there are.

References:
    Li, Gong, Wang and Hoefler (2022), *Near-Optimal Sparse Allreduce for Distributed Deep
    Learning*, for sparse messages.
"""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from lightning_opt.strategies.compression.codecs.chunks import cut, is_finite
from lightning_opt.strategies.compression.codecs.compressors import Compressor, Quantize, TopK
from lightning_opt.strategies.compression.codecs.packing import (
    NON_FINITE,
    read_header,
    write_header,
)
from lightning_opt.strategies.compression.exchange.channels import (
    Channel,
    all_gather,
    is_sound,
    piece_size,
)


def is_staged(scheme: object, *, world: int, sparse_from: int, may_skip: bool) -> bool:
    """Return whether messages travel in two stages.

    Args:
        scheme: How buckets are compressed.
        world: Number of ranks.
        sparse_from: Ranks from which on sparse messages do.
        may_skip: Whether a step may leave parameters without a gradient.
    """
    if may_skip:
        return False  # what an unused parameter is owed as a mean cannot be set aside
    return (isinstance(scheme, Quantize) and world > 2) or (
        isinstance(scheme, TopK) and world >= sparse_from
    )


def shard_compressor(compressor: Compressor, numel: int) -> tuple[Compressor, int]:
    """Return what compresses a shard of a bucket, and what the shard's length is a multiple of.

    A shard of a bucket gets its share of the bucket's elements.
    """
    if isinstance(compressor, Quantize):
        return compressor, compressor.block
    if isinstance(compressor, TopK) and compressor.k is not None:
        return TopK(compressor.capacity(numel) / numel, values=compressor.values), 1
    return compressor, 1


class Part:
    """A part of every shard of a bucket, which travels by itself.

    Args:
        compressor: How both stages are compressed.
        cuts: Where the parts of the shards lie in the bucket, one a rank.
        residual: That of the bucket.
        group: See :class:`TwoStageChannel`.
    """

    def __init__(
        self, compressor: Compressor, cuts: list[slice], residual: Tensor, group: dist.ProcessGroup
    ) -> None:
        self.cuts = cuts
        self._residual = residual
        self._group = group
        self._codecs = [
            compressor.codec(where.stop - where.start, residual.device) for where in cuts
        ]
        # Rows of one length, on 8 bytes each so that the scales within are aligned.
        row = -(-self._codecs[0].nbytes // 8) * 8
        self._sent = self._codecs[0].message.new_zeros(len(cuts), row)
        for codec, message in zip(self._codecs, self._sent, strict=True):
            codec.message = message[: codec.nbytes]
        self._received = torch.empty_like(self._sent)
        self.own = cuts[dist.get_rank(group)]
        self._mean_codec = compressor.codec(self.own.stop - self.own.start, residual.device)
        self._mean_row = self._sent.new_zeros(row)
        self._mean_codec.message = self._mean_row[: self._mean_codec.nbytes]
        self.owed_mean = residual.new_zeros(self.own.stop - self.own.start)
        self._gathered = torch.empty_like(self._sent)
        self._scattering: dist.Work | None = None
        self._gathering: dist.Work | None = None
        self.sent_bytes = 2 * (len(cuts) - 1) * row

    def scatter(self, gradient: Tensor, alpha: float, finite: bool) -> None:
        """Code ``alpha`` times the bucket's gradient, and launch the first stage."""
        for codec, where in zip(self._codecs, self.cuts, strict=True):
            if finite:
                codec.compress(self._residual[where], gradient[where], alpha)
            else:
                write_header(codec.message, 0, NON_FINITE)
        self._scattering = dist.all_to_all_single(
            self._received, self._sent, group=self._group, async_op=True
        )

    def gather(self) -> bool:
        """Wait for the first stage, code the mean of this rank's shard, and launch the second.

        Returns:
            Whether all ranks' gradients were finite. If not, no second stage is launched. All ranks
            come to the same decision, since a rank flags all its messages.
        """
        _wait(self._scattering)
        if not is_sound(self._received):
            return False
        messages = self._received[:, : self._mean_codec.nbytes]
        self._mean_codec.decompress_sum(
            messages, self.owed_mean, 1.0 / len(self.cuts), overwrite=False
        )
        self._mean_codec.compress(self.owed_mean)
        self._gathering = all_gather(
            self._gathered.view(-1), self._mean_row, group=self._group, async_op=True
        )
        return True

    def spread(self, gradient: Tensor, scale: float) -> None:
        """Wait for the second stage, and put ``scale`` times the means in the gradient's place."""
        _wait(self._gathering)
        rows = self._gathered.unsqueeze(1)
        for codec, where, message in zip(self._codecs, self.cuts, rows, strict=True):
            codec.decompress_sum(message[:, : codec.nbytes], gradient[where], scale)

    def recover(self) -> None:
        """Put back into the residual what the messages of the first stage took off it."""
        for codec, where in zip(self._codecs, self.cuts, strict=True):
            codec.decompress_add(codec.message, self._residual[where])

    def keep_mean(self) -> None:
        """Put back what the message of the second stage took off the mean."""
        self._mean_codec.decompress_add(self._mean_codec.message, self.owed_mean)

    def clear_sent(self, flat: Tensor) -> None:
        """Set to zero the elements that the messages of the first stage carry."""
        for codec, where in zip(self._codecs, self.cuts, strict=True):
            codec.clear_sent(flat[where])

    @property
    def selected(self) -> int:
        """How many elements the messages of the first stage carry."""
        return sum(read_header(message)[0] for message in self._sent)


class TwoStageChannel(Channel):
    """Sends compressed shards to the ranks that add them up, and gathers the compressed means.

    Both stages have error feedback: what compressing a rank's gradient loses stays on that rank,
    what compressing a shard's mean loses stays on the rank that has added it up. Of sparse messages
    each stage selects the largest elements shard by shard.

    What is quantised travels in parts on a CPU: while one is on its way, others are coded. The
    bits are the same as of whole shards.

    Args:
        compressor: How both stages are compressed.
        residual: See :class:`~lightning_opt.strategies.compression.exchange.channels.Channel`.
        group: A process group that nothing else uses, since the two stages of one bucket and the
            next must come in the same order on all ranks.
        worker: One thread, the same for all buckets, which runs them in order.
    """

    def __init__(
        self,
        compressor: Compressor,
        residual: Tensor,
        group: dist.ProcessGroup,
        worker: ThreadPoolExecutor,
    ) -> None:
        super().__init__(residual, group)
        self._worker = worker
        numel = residual.numel()
        compressor, block = shard_compressor(compressor, numel)
        # Shards end where a block does; of a small bucket the last ones may be empty.
        size = -(-numel // (self._world * block)) * block
        step = piece_size(compressor, size, residual.device, self._world)
        self._parts = []
        for within in cut(size, step):
            cuts = [
                slice(min(start + within.start, numel), min(start + within.stop, numel))
                for start in range(0, self._world * max(size, 1), max(size, 1))
            ]
            self._parts.append(Part(compressor, cuts, residual, group))
        self.sent_bytes = sum(part.sent_bytes for part in self._parts)

    def start(self, gradient: Tensor, scale: float = 1.0) -> Future[Tensor]:
        """Launch the exchange of one step; see :meth:`Channel.start`."""
        devices = [gradient.device] if gradient.is_cuda else None
        future: Future[Tensor] = Future(devices=devices)  # type: ignore[arg-type]

        def run() -> None:
            try:
                self._exchange(gradient, scale)
                future.set_result(gradient)
            except Exception as error:  # noqa: BLE001 - DDP raises it in the backward pass
                future.set_exception(error)  # type: ignore[arg-type]

        if gradient.is_cuda:
            run()  # collectives only queue up on the stream there
        else:
            self._worker.submit(run)
        return future

    def _exchange(self, gradient: Tensor, scale: float) -> None:
        # Parts arrive, and take the place of their gradients, before the last one is coded: it must
        # be known beforehand whether all are finite.
        finite, self.flagged = is_finite(gradient), False
        parts = self._parts
        # One part is coded while the mean of the one before and that before it are on their way.
        # All ranks launch collectives in this order.
        for turn in range(len(parts) + 2):
            if turn < len(parts):
                parts[turn].scatter(gradient, 1.0 / scale, finite)
            if 1 <= turn <= len(parts) and not parts[turn - 1].gather():
                self.flagged = True  # so are all parts
            if turn >= 2 and not self.flagged:
                parts[turn - 2].spread(gradient, scale)
        if self.flagged:
            if finite:
                for part in parts:
                    part.recover()
                self.residual.sub_(gradient, alpha=1.0 / scale)
            gradient.fill_(math.nan)

    def take_back(self) -> None:
        """Keep the means that were sent, since they will not be applied."""
        for part in self._parts:
            part.keep_mean()

    def clear_sent(self, flat: Tensor) -> None:
        """Set to zero the elements that this rank's latest messages carry."""
        for part in self._parts:
            part.clear_sent(flat)

    def fold(self) -> None:
        """Move what this rank owes to the mean of its shard into its residual."""
        for part in self._parts:
            self.residual[part.own].add_(part.owed_mean, alpha=self._world)
            part.owed_mean.zero_()

    @property
    def selected(self) -> int:
        """How many elements this rank's latest messages carry."""
        return sum(part.selected for part in self._parts)


def _wait(work: dist.Work | None) -> None:
    assert work is not None
    work.wait()
