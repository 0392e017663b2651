"""What a loss scaler has multiplied with, known without waiting for the device."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState
from torch.optim import Optimizer

from lightning_opt.core.numerics.scalars import Scalar

if TYPE_CHECKING:
    import lightning.pytorch as pl


def loss_scale(trainer: pl.Trainer) -> Tensor | None:
    """Return the loss scale in use, unread; None where no loss scaler is at work."""
    scaler: torch.amp.GradScaler | None = getattr(trainer.precision_plugin, "scaler", None)
    if scaler is None or not scaler.is_enabled():
        return None
    return scaler._scale  # None until the first loss; `get_scale()` would wait for the device


def grad_scale(trainer: pl.Trainer, optimizer: Optimizer) -> Scalar:
    """Return what the gradients of ``optimizer`` are multiplied with before its step, unread.

    Lightning has the loss scaler unscale the gradients before ``on_before_optimizer_step``, except
    for optimizers that do it within their own step (the fused ones).
    """
    scale = loss_scale(trainer)
    if scale is None or not getattr(optimizer, "_step_supports_amp_scaling", False):
        return 1.0
    scaler: torch.amp.GradScaler = trainer.precision_plugin.scaler  # type: ignore[attr-defined]
    # `get` adds nothing to this defaultdict; user code may have unscaled by hand.
    state = scaler._per_optimizer_states.get(id(optimizer), {})
    return 1.0 if state.get("stage") is OptState.UNSCALED else scale
