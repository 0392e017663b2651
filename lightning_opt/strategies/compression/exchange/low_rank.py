"""PowerSGD as torch brings it, with what it is owed kept like that of every other compressor.

torch's own error feedback keeps a NaN for ever, is multiplied with the loss scale of its step, and
is in no checkpoint.

References:
    Vogels, Karimireddy and Jaggi (2019), *PowerSGD: Practical Low-Rank Gradient Compression for
    Distributed Optimization*.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.futures import Future

from lightning_opt.core.numerics.scalars import Scalar
from lightning_opt.strategies.chunks import is_finite
from lightning_opt.strategies.compression.exchange.channels import Channel, dense_bytes
from lightning_opt.strategies.compression.exchange.residuals import Owed

LEAST_RATE = 2
"""Matrices that would not become this many times smaller are sent whole, as torch does it."""


class LowRankChannel(Channel):
    """Sends two factors of each matrix of a bucket, and vectors whole.

    On gloo there must be one bucket for the whole model: torch's hook launches collectives from
    within collectives, which deadlocks with two.

    Args:
        rank: Of the factors.
        owed: See :class:`~lightning_opt.strategies.compression.exchange.channels.Channel`.
        shapes: Of the bucket's parameters, in order.
    """

    def __init__(self, rank: int, owed: Owed, shapes: Sequence[torch.Size]) -> None:
        super().__init__(owed)
        self._rank = rank
        self._shapes = shapes
        self._state = self._start_anew()
        sent = 0
        for shape in shapes:
            rows = shape[0] if shape else 1
            columns = shape.numel() // max(rows, 1)
            factors = (rows + columns) * min(rows, columns, rank)
            sent += factors if factors * LEAST_RATE < shape.numel() else shape.numel()
        self.sent_bytes = dense_bytes(sent, owed.kept.element_size(), self._world)

    def _start_anew(self) -> powerSGD_hook.PowerSGDState:
        """Return torch's state: the factors of the step before, from which the next begin."""
        state = powerSGD_hook.PowerSGDState(
            None,
            matrix_approximation_rank=self._rank,
            min_compression_rate=LEAST_RATE,
            start_powerSGD_iter=2,
            use_error_feedback=False,
        )
        state.iter = 2  # the warm-up is not torch's
        return state

    def start(self, gradient: Tensor, scale: Scalar = 1.0) -> Future[Tensor]:
        """Launch the exchange of one step; see :meth:`Channel.start`."""
        gradient.copy_(self.owed.pending * scale)

        def finish(future: Future[Tensor]) -> Tensor:
            mean = future.value()
            torch.logical_not(is_finite(mean), out=self.flagged)  # the same bits on all ranks
            if self.flagged:  # torch's hook has just waited for the device itself
                self._state = self._start_anew()  # else the factors would stay so
            else:
                self.owed.pending.sub_(mean / scale)
            return mean

        numels = [shape.numel() for shape in self._shapes]
        pairs = zip(gradient.split(numels), self._shapes, strict=True)
        matrices = [part.view(shape) for part, shape in pairs]
        bucket: Any = SimpleNamespace(  # all that torch's hook asks of one
            buffer=lambda: gradient,
            gradients=lambda: matrices,
            index=lambda: 0,
            is_last=lambda: False,
        )
        future: Future[Tensor] = powerSGD_hook.powerSGD_hook(self._state, bucket).then(finish)
        return future
