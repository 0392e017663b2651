"""Momentum before compression, where a gradient that waits keeps its momentum.

An optimizer's momentum sees a held back gradient only when it arrives, all at once and with the
momentum of one step instead of many. Here each rank keeps the velocity itself, compresses it in the
gradient's place, and forgets the velocity of the elements that it has sent, so that these do not go
on in a direction that is out of date.

References:
    Lin, Han, Mao, Wang and Dally (2018), *Deep Gradient Compression: Reducing the Communication
    Bandwidth for Distributed Training* (momentum correction, momentum factor masking).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_opt.strategies.compression.exchange.channels import Channel, DenseChannel


class Velocity:
    """The velocity of one bucket on one rank.

    Args:
        kept: Flat, float32 or wider, without any loss scale; updated in place.
        factor: How much of it is left after a step.
    """

    def __init__(self, kept: Tensor, factor: float) -> None:
        self._kept = kept
        self._factor = factor
        self._next = torch.empty_like(kept)
        self._channel: Channel | None = None

    def advance(self, gradient: Tensor, scale: float, channel: Channel) -> None:
        """Put in a gradient's place the velocity that it leads to.

        Args:
            gradient: The bucket, flat, multiplied with ``scale``.
            scale: The loss scale.
            channel: What is about to send it.
        """
        torch.mul(self._kept, self._factor, out=self._next).add_(gradient, alpha=1.0 / scale)
        gradient.copy_(self._next if scale == 1.0 else self._next * scale)
        self._channel = channel

    def end_step(self, applied: bool) -> None:
        """Take over the new velocity, or forget it with all that came of it.

        Args:
            applied: Whether all gradients were finite, in all buckets on all ranks.
        """
        channel, self._channel = self._channel, None
        if channel is None:
            return
        if applied:
            self._kept.copy_(self._next)
            channel.clear_sent(self._kept)
        elif not channel.flagged and not isinstance(channel, DenseChannel):
            channel.residual.sub_(self._next)  # it has taken back what it sent of it


def check_optimizers(optimizers: Sequence[Optimizer]) -> None:
    """Make sure that momentum is not applied twice.

    Raises:
        ValueError: For several optimizers, or one with momentum of its own.
    """
    if len(optimizers) > 1:
        raise ValueError(
            f"momentum_correction works with one optimizer, but there are {len(optimizers)}. Leave "
            "it out, and give the optimizers momentum of their own."
        )
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for name in ("momentum", "betas", "nesterov"):
                value = group.get(name)
                if any(value) if isinstance(value, (tuple, list)) else value:
                    raise ValueError(
                        f"momentum_correction applies momentum before compression, but "
                        f"{type(optimizer).__name__} has {name}={value!r}, which would apply it "
                        "twice. Use torch.optim.SGD with momentum=0 and nesterov=False, and give "
                        "the momentum to momentum_correction alone."
                    )
