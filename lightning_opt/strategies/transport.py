"""How compressed buckets travel: each channel sends one bucket, step after step.

No collective is launched from a callback of another: on gloo, which matches collectives by the
order of their calls, that ends in a deadlock. Every rank adds the messages of all ranks in the
order of the ranks, so that all replicas get the same bits.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from lightning_opt.strategies.chunks import is_finite
from lightning_opt.strategies.compressors import Codec
from lightning_opt.strategies.packing import NON_FINITE, read_header

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


class CompressedChannel(Channel):
    """A channel whose messages carry a part of the residual, which is off it while they travel."""

    def __init__(self, residual: Tensor, group: dist.ProcessGroup | None = None) -> None:
        super().__init__(residual, group)
        self._finite = True

    def _reject(self, gradient: Tensor, scale: float) -> Tensor:
        if self._finite:
            self._recover()
            self.residual.sub_(gradient, alpha=1.0 / scale)
        return gradient.fill_(math.nan)

    @abstractmethod
    def _recover(self) -> None:
        """Put back into the residual what this rank's latest messages took off it."""


class GatherChannel(CompressedChannel):
    """Sends every rank's message to every rank, in one all-gather.

    Args:
        codec: Compresses the bucket.
        residual: See :class:`Channel`.
        group: See :class:`Channel`.
    """

    def __init__(
        self, codec: Codec, residual: Tensor, group: dist.ProcessGroup | None = None
    ) -> None:
        super().__init__(residual, group)
        self._codec = codec
        self._gathered = codec.message.new_empty(self._world * codec.nbytes)
        self.sent_bytes = (self._world - 1) * codec.nbytes

    def start(self, gradient: Tensor, scale: float = 1.0) -> Future[Tensor]:
        """Launch the exchange of one step; see :meth:`Channel.start`."""
        self._finite = self._codec.compress(self.residual, gradient, 1.0 / scale)
        work = all_gather(self._gathered, self._codec.message, group=self._group, async_op=True)

        def finish(future: Future[list[Tensor]]) -> Tensor:
            future.value()  # raises what went wrong, such as a lost rank
            messages = self._gathered.view(self._world, -1)
            self.flagged = any(read_header(message)[1] == NON_FINITE for message in messages)
            if self.flagged:
                return self._reject(gradient, scale)
            self._codec.decompress_sum(messages, gradient, scale / self._world)
            return gradient

        future: Future[Tensor] = work.get_future().then(finish)
        return future

    def take_back(self) -> None:
        """Put back into the residual what the latest step sent."""
        self._recover()

    def _recover(self) -> None:
        self._codec.decompress_add(self._codec.message, self.residual)

    def clear_sent(self, flat: Tensor) -> None:
        """Set to zero the elements that this rank's latest message carries."""
        self._codec.clear_sent(flat)

    @property
    def selected(self) -> int:
        """How many elements this rank's latest message carries."""
        return read_header(self._codec.message)[0]


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
