"""Averages one bucket over all ranks: uncompressed, by an all-gather, or in two stages.

On a CPU, a collective's callback never launches another one: gloo matches collectives by the order
of their calls, so that would deadlock. Every rank adds the messages in rank order, so that all
replicas are bit-identical.

The traffic of an all-gather grows with the number of ranks. In two stages, each rank sums one shard
of the bucket for all ranks and sends them the compressed mean. So a rank sends less than twice the
message at any number of ranks.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from lightning_opt.core.modules.sharding import reads_are_free
from lightning_opt.strategies.compressors import Codec, Compressor, Quantize
from lightning_opt.strategies.own_exchange import ExchangeThread, all_to_all, start_all_to_all
from lightning_opt.strategies.packing import any_flag, read_count, write_flag

# torch 2.13 has renamed this function, and warns about the old name.
all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)


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
        committed: The residual before the current step.
        pending: The residual after the current step.
    """

    def __init__(self, committed: Tensor) -> None:
        self.committed = committed
        self.pending = torch.empty_like(committed)

    def commit(self, skipped: Tensor | None = None) -> None:
        """Commit the pending residual unless the step was ``skipped``, 0-dimensional."""
        if skipped is not None and not reads_are_free(skipped.device):
            torch.where(skipped, self.committed, self.pending, out=self.committed)
        elif not skipped:  # on a CPU
            self.committed, self.pending = self.pending, self.committed


class Exchange(ABC):
    """Averages one bucket over all ranks with compression and error feedback, step after step.

    Args:
        residual: The bucket's residual.
        thread: Exchanges messages on a CPU; the same for all buckets.

    Attributes:
        skipped: Whether the latest step is not applied, for example because a rank's gradient is
            not finite: 0-dimensional, on the bucket's device.
        sent_bytes: Bytes that this rank sends per step.
        codec: The codec of the messages.
    """

    sent_bytes: int
    codec: Codec
    _messages: Tensor

    def __init__(self, residual: Residual, thread: ExchangeThread) -> None:
        self.residual, self._thread = residual, thread
        self.skipped = torch.zeros((), dtype=torch.bool, device=residual.committed.device)
        self._world = dist.get_world_size()

    @abstractmethod
    def start(self, residual: Tensor, gradient: Tensor, scale: Tensor) -> Future[Tensor]:
        """Launch the exchange of one step. On a GPU, the host does not wait.

        Args:
            residual: The residual to add to the gradient. The unsent rest of the sum is written to
                ``residual.pending``.
            gradient: This rank's bucket, flat. It is overwritten with the mean over ranks of the
                sent values, or with NaN if any rank's gradient was not finite.
            scale: The loss scale of the gradient; the residual is unscaled.

        Returns:
            A future of ``gradient``.
        """

    def commit(self) -> None:
        """Commit the residual unless the step was skipped."""
        self.residual.commit(self.skipped)

    def fold(self) -> None:
        """Add all residuals that the exchange keeps elsewhere to ``residual.committed``."""

    @property
    def selected(self) -> int:
        """Number of elements in the latest messages."""
        return sum(map(read_count, self._messages))


class GatherExchange(Exchange):
    """Sends every rank's message to every rank.

    Args:
        compressor: Compresses the bucket.
        residual: See :class:`Exchange`.
        thread: See :class:`Exchange`.
    """

    def __init__(self, compressor: Compressor, residual: Residual, thread: ExchangeThread) -> None:
        super().__init__(residual, thread)
        committed = residual.committed
        self.codec = compressor.codec(len(committed), committed.device)
        self._messages = self.codec.message[None]
        self._gathered = self._messages.repeat(self._world, 1)
        self.sent_bytes = (self._world - 1) * self.codec.nbytes

    def start(self, residual: Tensor, gradient: Tensor, scale: Tensor) -> Future[Tensor]:
        codec, gathered = self.codec, self._gathered
        finite = codec.compress(residual, gradient, self.residual.pending, scale.reciprocal())
        write_flag(codec.message, finite.logical_not())
        self.skipped.zero_()

        def finish(arrived: Callable[[], object]) -> Tensor:
            arrived()  # raises if the exchange failed, for example because a rank was lost
            self.skipped.logical_or_(any_flag(gathered))
            zero_or_nan(gradient, self.skipped)
            for message in gathered:  # in rank order: bit-identical on all ranks
                codec.decompress_add(message, gradient, scale / self._world)
            return gradient

        if reads_are_free(gradient.device):
            wait = start_all_to_all(codec.message.expand(self._world, -1), gathered)
            return self._thread.submit(partial(finish, wait), Future())
        work = all_gather(gathered.view(-1), codec.message, async_op=True)
        future: Future[Tensor] = work.get_future().then(lambda arrived: finish(arrived.value))
        return future


class TwoStageExchange(Exchange):
    """Sends quantized shards to the ranks that add them up, and gathers the quantized means.

    Both stages have error feedback: each rank keeps the residual of its gradient, and of the mean
    of its shard.

    Args:
        compressor: Compresses the messages of both stages.
        residual: See :class:`Exchange`.
        group: A process group that nothing else uses: the stages of all buckets must be launched in
            the same order on all ranks.
        thread: See :class:`Exchange`. It runs the stages in order.
    """

    def __init__(
        self,
        compressor: Quantize,
        residual: Residual,
        group: dist.ProcessGroup,
        thread: ExchangeThread,
    ) -> None:
        super().__init__(residual, thread)
        self._group = group
        committed, world = residual.committed, self._world
        # Shards end at the end of a block; the last shards of a small bucket may be empty.
        size = -(-len(committed) // (world * compressor.block)) * compressor.block
        ends = [min(rank * size, len(committed)) for rank in range(world + 1)]
        self._shards = [slice(start, end) for start, end in pairwise(ends)]
        self.codec = compressor.codec(size, committed.device)
        self._messages = self.codec.message.repeat(world, 1)
        self._received = torch.empty_like(self._messages)
        self._own_shard = self._shards[dist.get_rank(group)]
        self._mean_residual = Residual(torch.zeros_like(committed[self._own_shard]))
        self._mean_message = torch.zeros_like(self.codec.message)
        self._gathered = torch.empty_like(self._messages)
        self.sent_bytes = 2 * (world - 1) * self.codec.nbytes

    def start(self, residual: Tensor, gradient: Tensor, scale: Tensor) -> Future[Tensor]:
        codec, factor, finite = self.codec, scale.reciprocal(), []
        for codec.message, shard in zip(self._messages, self._shards, strict=True):
            rest = self.residual.pending[shard]
            finite.append(codec.compress(residual[shard], gradient[shard], rest, factor))
        write_flag(self._messages, torch.stack(finite).all().logical_not())
        self.skipped.zero_()
        finish = partial(self._finish, gradient, scale)
        if reads_are_free(gradient.device):
            first_stage = partial(all_to_all, self._messages, self._received, self._group)
            # DDP raises the thread's errors in the backward pass.
            return self._thread.submit(partial(finish, first_stage), Future())
        tensors = self._received, self._messages
        work = dist.all_to_all_single(*tensors, group=self._group, async_op=True)
        # torch calls `finish` now, on a stream that waits for the first stage.
        future: Future[Tensor] = work.get_future().then(lambda arrived: finish(arrived.value))
        return future

    def _finish(self, gradient: Tensor, scale: Tensor, first_stage: Callable[[], object]) -> Tensor:
        """Encode and gather the means of the shards, and decode them into the gradient.

        A rank with a non-finite gradient flags all its messages, so that every rank sees it.
        ``first_stage`` waits for the messages, and raises if they have not arrived.
        """
        first_stage()
        codec, skipped = self.codec, self.skipped
        skipped.logical_or_(any_flag(self._received))
        mean = self._mean_residual.pending.zero_()
        for message in self._received:
            codec.decompress_add(message, mean, 1.0 / self._world)
        codec.message = self._mean_message
        codec.compress(self._mean_residual.committed, mean, mean, mean.new_ones(()))
        if reads_are_free(gradient.device):
            all_to_all(codec.message.expand(self._world, -1), self._gathered, self._group)
        else:
            all_gather(self._gathered.view(-1), codec.message, group=self._group)
        for shard, message in zip(self._shards, self._gathered, strict=True):
            codec.decompress_add(message, zero_or_nan(gradient[shard], skipped), scale)
        return gradient

    def commit(self) -> None:
        super().commit()
        self._mean_residual.commit(self.skipped)

    def fold(self) -> None:
        """Add the residual of the mean to this rank's residual."""
        mean = self._mean_residual.committed
        self.residual.committed[self._own_shard].add_(mean, alpha=self._world)
        mean.zero_()


def zero_or_nan(out: Tensor, non_finite: Tensor) -> Tensor:
    """Fill ``out`` with zeros, or with NaN if any rank's gradient was not finite."""
    return out.fill_(torch.where(non_finite, math.nan, 0.0))
