"""Averages one bucket of gradients over all ranks: uncompressed, by an all-gather, or low-rank.

No collective is launched from a callback of another: gloo matches collectives by the order of their
calls, and that would deadlock. Every rank adds the messages in rank order, so that all replicas get
the same bits.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
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

MIN_COMPRESSION_RATE = 2
"""PowerSGD sends a matrix uncompressed unless it becomes more than this many times smaller."""


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
        self._codecs: list[Codec] = []  # of this rank's messages; none if torch encodes them

    @abstractmethod
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

    def commit(self, skipped: Tensor) -> None:
        """Commit the residual unless the step was ``skipped``, which includes ``non_finite``."""
        self.residual.commit(skipped)

    def fold(self) -> None:
        """Add all residuals that the exchange keeps elsewhere to ``residual.committed``."""

    @property
    def selected(self) -> int:
        if not self._codecs:
            return self.residual.committed.numel()
        return sum(read_count(codec.message) for codec in self._codecs)


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
            self._codecs.append(codec)
        self.sent_bytes = (self._world - 1) * sum(codec.nbytes for codec in self._codecs)

    def start(self, gradient: Tensor, scale: Scalar = 1.0) -> Future[Tensor]:
        # Computed first: pieces may arrive and overwrite the gradient before the last is encoded.
        bad = is_finite(self.residual.pending).logical_not()
        self.non_finite.zero_()
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


class LowRankExchange(Exchange):
    """Sends two factors of each matrix of a bucket, and vectors whole, with torch's PowerSGD hook.

    torch's own error feedback is off: its residual keeps NaN for ever, includes the loss scale, and
    is in no checkpoint. On gloo there must be one bucket for the whole model: torch's hook
    launches collectives from within collectives, which deadlocks with two.

    Args:
        rank: Rank of the factors.
        residual: See :class:`Exchange`.
        shapes: Shapes of the bucket's parameters, in order.

    References:
        Vogels, Karimireddy and Jaggi (2019), *PowerSGD: Practical Low-Rank Gradient Compression for
        Distributed Optimization*.
    """

    def __init__(self, rank: int, residual: Residual, shapes: Sequence[torch.Size]) -> None:
        super().__init__(residual)
        self._rank = rank
        self._shapes = shapes
        self._state = self._initial_state()
        sent = 0
        for shape in shapes:
            rows = shape[0] if shape else 1
            columns = shape.numel() // max(rows, 1)
            factors = (rows + columns) * min(rows, columns, rank)
            sent += factors if factors * MIN_COMPRESSION_RATE < shape.numel() else shape.numel()
        self.sent_bytes = dense_bytes(sent, residual.committed.element_size(), self._world)

    def _initial_state(self) -> powerSGD_hook.PowerSGDState:
        """Return torch's state, which keeps the factors of the previous step as a start."""
        state = powerSGD_hook.PowerSGDState(
            None,
            matrix_approximation_rank=self._rank,
            min_compression_rate=MIN_COMPRESSION_RATE,
            start_powerSGD_iter=2,
            use_error_feedback=False,
        )
        state.iter = 2  # skips torch's warm-up
        return state

    def start(self, gradient: Tensor, scale: Scalar = 1.0) -> Future[Tensor]:
        gradient.copy_(self.residual.pending * scale)

        def finish(future: Future[Tensor]) -> Tensor:
            mean = future.value()
            torch.logical_not(is_finite(mean), out=self.non_finite)  # the same bits on all ranks
            if self.non_finite:  # no extra wait: torch's hook has waited for the device
                self._state = self._initial_state()  # else the factors would stay NaN
            else:
                self.residual.pending.sub_(mean / scale)
            return mean

        numels = [shape.numel() for shape in self._shapes]
        pairs = zip(gradient.split(numels), self._shapes, strict=True)
        matrices = [part.view(shape) for part, shape in pairs]
        bucket: Any = SimpleNamespace(  # the methods that torch's hook calls
            buffer=lambda: gradient,
            gradients=lambda: matrices,
            index=lambda: 0,
            is_last=lambda: False,
        )
        future: Future[Tensor] = powerSGD_hook.powerSGD_hook(self._state, bucket).then(finish)
        return future


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
