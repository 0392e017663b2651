"""Compressed gradients among many ranks: scatter, add up, compress again, gather.

An all-gather of whole messages grows with the number of ranks; here each rank adds up one shard of
the bucket for all, so that a rank sends less than twice the message, however many there are.

References:
    Li, Gong, Wang and Hoefler (2022), *Near-Optimal Sparse Allreduce for Distributed Deep
    Learning*, for sparse messages.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from lightning_opt.strategies.compressors import Compressor, Quantize, TopK
from lightning_opt.strategies.packing import NON_FINITE, read_header, write_header
from lightning_opt.strategies.transport import CompressedChannel, all_gather


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


class TwoStageChannel(CompressedChannel):
    """Sends compressed shards to the ranks that add them up, and gathers the compressed means.

    Both stages have error feedback: what compressing a rank's gradient loses stays on that rank,
    what compressing a shard's mean loses stays on the rank that has added it up. Of sparse messages
    each stage selects the largest elements shard by shard.

    Args:
        compressor: How both stages are compressed.
        residual: See :class:`~lightning_opt.strategies.transport.Channel`.
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
        rank = dist.get_rank(group)
        compressor, block = shard_compressor(compressor, residual.numel())
        # Shards end where a block does; of a small bucket the last ones may be empty.
        size = -(-residual.numel() // (self._world * block)) * block
        self._cuts = [
            slice(min(start, residual.numel()), min(start + size, residual.numel()))
            for start in range(0, self._world * size, size)
        ]
        self._codecs = [
            compressor.codec(cut.stop - cut.start, residual.device) for cut in self._cuts
        ]
        # Rows of one length, on 8 bytes each so that the scales within are aligned.
        row = -(-self._codecs[0].nbytes // 8) * 8
        self._sent = self._codecs[0].message.new_zeros(self._world, row)
        for codec, message in zip(self._codecs, self._sent, strict=True):
            codec.message = message[: codec.nbytes]
        self._received = self._sent.new_empty(self._world, row)
        self._own = self._cuts[rank]
        self._mean_codec = compressor.codec(self._own.stop - self._own.start, residual.device)
        self._mean_row = self._sent.new_zeros(row)
        self._mean_codec.message = self._mean_row[: self._mean_codec.nbytes]
        self._owed_mean = residual.new_zeros(self._own.stop - self._own.start)
        self._gathered = self._sent.new_empty(self._world * row)
        self.sent_bytes = 2 * (self._world - 1) * row

    def start(self, gradient: Tensor, scale: float = 1.0) -> Future[Tensor]:
        """Launch the exchange of one step; see :meth:`Channel.start`."""
        added = 0
        for codec, cut in zip(self._codecs, self._cuts, strict=True):
            if not codec.compress(self.residual[cut], gradient[cut], 1.0 / scale):
                break
            added += 1
        self._finite = added == self._world
        if not self._finite:
            self._recover(added)
            for cut in self._cuts[:added]:
                self.residual[cut].sub_(gradient[cut], alpha=1.0 / scale)
            for message in self._sent:
                write_header(message, 0, NON_FINITE)
        devices = [gradient.device] if gradient.is_cuda else None
        future: Future[Tensor] = Future(devices=devices)  # type: ignore[arg-type]

        def run() -> None:
            try:
                future.set_result(self._exchange(gradient, scale))
            except Exception as error:  # noqa: BLE001 - DDP raises it in the backward pass
                future.set_exception(error)  # type: ignore[arg-type]

        if gradient.is_cuda:
            run()  # collectives only queue up on the stream there
        else:
            self._worker.submit(run)
        return future

    def _exchange(self, gradient: Tensor, scale: float) -> Tensor:
        dist.all_to_all_single(self._received, self._sent, group=self._group)
        # A rank flags all its messages, so that all ranks come to the same decision.
        self.flagged = any(read_header(message)[1] == NON_FINITE for message in self._received)
        if self.flagged:
            return self._reject(gradient, scale)
        for message in self._received:
            part = message[: self._mean_codec.nbytes]
            self._mean_codec.decompress_add(part, self._owed_mean, 1.0 / self._world)
        self._mean_codec.compress(self._owed_mean)
        all_gather(self._gathered, self._mean_row, group=self._group)
        rows = self._gathered.view(self._world, 1, -1)
        for codec, cut, message in zip(self._codecs, self._cuts, rows, strict=True):
            codec.decompress_sum(message[:, : codec.nbytes], gradient[cut], scale)
        return gradient

    def _recover(self, shards: int | None = None) -> None:
        for codec, cut in list(zip(self._codecs, self._cuts, strict=True))[:shards]:
            codec.decompress_add(codec.message, self.residual[cut])

    def take_back(self) -> None:
        """Keep the mean that was sent, since it will not be applied."""
        self._mean_codec.decompress_add(self._mean_codec.message, self._owed_mean)

    def clear_sent(self, flat: Tensor) -> None:
        """Set to zero the elements that this rank's latest messages carry."""
        for codec, cut in zip(self._codecs, self._cuts, strict=True):
            codec.clear_sent(flat[cut])

    def fold(self) -> None:
        """Move what this rank owes to the mean of its shard into its residual."""
        self.residual[self._own].add_(self._owed_mean, alpha=self._world)
        self._owed_mean.zero_()

    @property
    def selected(self) -> int:
        """How many elements this rank's latest messages carry."""
        return sum(read_header(message)[0] for message in self._sent)
