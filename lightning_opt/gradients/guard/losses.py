"""Which losses an update comes from, and their mean."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_opt.core.modules.sharding import is_dtensor
from lightning_opt.core.numerics.norms import parameters_of
from lightning_opt.core.numerics.scalars import Scalar, move, wide_dtype

if TYPE_CHECKING:
    import lightning.pytorch as pl


class LossLedger:
    """The losses since the last step of each optimizer, unread.

    With several optimizers a loss belongs to those whose parameters got gradients from it: the
    backward passes of a GAN may come both before the two steps.

    Args:
        optimizers: Those of the Trainer.
    """

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self._optimizers = optimizers
        self._losses: list[list[Tensor]] = [[] for _ in optimizers]
        self._coming: list[Tensor] = []
        self._marks: list[list[Any]] = []

    def before_backward(self, loss: Tensor) -> None:
        """Take in the loss of the coming backward pass."""
        loss = loss.detach()
        if is_dtensor(loss):
            loss = loss.full_tensor()  # type: ignore[attr-defined]
        self._coming = [loss if loss.ndim == 0 else loss.sum()]
        if len(self._optimizers) > 1:
            self._marks = [_marks(optimizer) for optimizer in self._optimizers]
            for losses, marks in zip(self._losses, self._marks, strict=True):
                if not any(marks):
                    losses.clear()  # their gradients have been thrown away

    def after_backward(self) -> None:
        """Enter the loss where its gradients went."""
        for index, losses in enumerate(self._losses):
            if not self._marks or _marks(self._optimizers[index]) != self._marks[index]:
                losses += self._coming
        self._coming = []

    def take(self, index: int) -> list[Tensor]:
        """Return the losses of an optimizer that steps now, and forget them."""
        losses, self._losses[index] = self._losses[index], []
        return losses


def _marks(optimizer: Optimizer) -> list[Any]:
    """Return a list that changes with any gradient; only None where there is no gradient."""
    gradients = [parameter.grad for parameter in parameters_of(optimizer)]
    return [None if grad is None else (id(grad), grad._version) for grad in gradients]


def mean_loss(
    trainer: pl.Trainer, losses: Sequence[Tensor], loss_scale: Scalar | None, *, read: bool
) -> Scalar:
    """Return the mean loss of an accumulation window, without the loss scale; 0 if there is none.

    Args:
        trainer: Whose step it is.
        losses: From :class:`LossLedger`: scaled by the loss scaler, and divided by
            ``accumulate_grad_batches``.
        loss_scale: What they were scaled with.
        read: Whether to return a float, which waits for a device.
    """
    if not losses:
        return 0.0
    device = losses[0].device
    summed = losses[0]
    if len(losses) > 1:
        summed = torch.stack([move(loss, device) for loss in losses]).sum(dtype=wide_dtype(device))
    total: Scalar = summed.item() if read else summed  # as its caller asked
    if loss_scale is not None:
        total = total / loss_scale
    # A short last window was divided by the length of a full one too.
    part = trainer.accumulate_grad_batches / len(losses)
    return total if part == 1.0 else total * part
