"""The seam between Lightning and the gradients: true, whole, and measured once a step.

What differs between strategies, precisions and optimizers is answered here, so that no callback
asks which of them it runs under.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from lightning.pytorch.strategies import DeepSpeedStrategy
from torch import Tensor
from torch.amp.grad_scaler import OptState
from torch.optim import LBFGS, Optimizer

from lightning_opt.core.norms import (
    Gradients,
    GradientStep,
    collect_gradients,
    norm_cache,
    parameters_of,
)
from lightning_opt.core.scalars import Scalar, wide_dtype
from lightning_opt.core.sharding import Groups, flat_parameter_groups

if TYPE_CHECKING:
    import lightning.pytorch as pl


class GradientAccess:
    """Gives a callback the gradients of each optimizer in ``on_before_optimizer_step``.

    Args:
        owner: The callback's name, for error messages.
    """

    def __init__(self, owner: str) -> None:
        self._owner = owner
        self.names: dict[Tensor, str] = {}
        self._flat: dict[Tensor, Groups] = {}
        self._rounds: dict[int, int] = {}

    def check_trainer(self, trainer: pl.Trainer) -> None:
        """Refuse strategies under which gradients cannot be reached. Call it in ``setup``.

        Raises:
            ValueError: Under DeepSpeed, which keeps gradients in buffers of its own.
        """
        if isinstance(trainer.strategy, DeepSpeedStrategy):
            raise ValueError(
                f"{self._owner} does not work with the DeepSpeed strategy: DeepSpeed keeps "
                "gradients in its own buffers, so no callback can read or change them. Use "
                "DeepSpeed's own settings (such as gradient_clipping in its config), or the "
                "strategies 'ddp', 'fsdp' or ModelParallelStrategy."
            )

    def start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Learn the model's names and shards. Call it in ``on_fit_start``.

        Raises:
            ValueError: For an LBFGS optimizer, which evaluates the loss several times a step.
        """
        for optimizer in trainer.optimizers:
            if isinstance(optimizer, LBFGS):
                raise ValueError(
                    f"{self._owner} does not work with torch.optim.LBFGS: it evaluates the "
                    "gradient several times within one step and needs it unchanged. Use a "
                    "first-order optimizer such as AdamW or SGD."
                )
        self.stop()
        for name, parameter in pl_module.named_parameters():
            self.names[parameter] = name.replace("_fsdp_wrapped_module.", "")
        for index, optimizer in enumerate(trainer.optimizers):
            for place, held in enumerate(parameters_of(optimizer)):
                # An optimizer may hold parameters that are not the module's.
                self.names.setdefault(held, f"optimizer_{index}.{place}")
        # FSDP1's outermost unit wraps the module, and holds what no unit within takes.
        self._flat = flat_parameter_groups(trainer.model or pl_module)

    def stop(self) -> None:
        """Let go of the model."""
        self.names, self._flat, self._rounds = {}, {}, {}
        norm_cache.clear()

    def collect(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Optimizer
    ) -> tuple[int, Gradients, Scalar]:
        """Return the optimizer's index, its gradients, and what they are multiplied with."""
        index = next(i for i, own in enumerate(trainer.optimizers) if own is optimizer)
        self._rounds[index] = self._rounds.get(index, 0) + 1
        gradients = collect_gradients(parameters_of(optimizer), self._flat)
        return index, gradients, grad_scale(trainer, optimizer)

    def measure(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Optimizer
    ) -> tuple[int, GradientStep]:
        """Return the optimizer's index and its gradients with their norms.

        Every callback of a run has its hook called once a step, so their counts of steps agree, and
        the first to ask measures for all.
        """
        index, gradients, scale = self.collect(trainer, pl_module, optimizer)
        norms = norm_cache.measure(optimizer, gradients, step=self._rounds[index], grad_scale=scale)
        return index, GradientStep(gradients, norms, scale, self.names)


def grad_scale(trainer: pl.Trainer, optimizer: Optimizer) -> Scalar:
    """Return what the gradients of ``optimizer`` are multiplied with in this hook, unread.

    Lightning has the loss scaler unscale the gradients before ``on_before_optimizer_step``, except
    for optimizers that do it within their own step (the fused ones).
    """
    if not unscales_itself(optimizer):
        return 1.0
    scale = loss_scale(trainer)
    if scale is None:
        return 1.0
    scaler: torch.amp.GradScaler = trainer.precision_plugin.scaler  # type: ignore[attr-defined]
    # `get` adds nothing to this defaultdict; user code may have unscaled by hand.
    state = scaler._per_optimizer_states.get(id(optimizer), {})
    return 1.0 if state.get("stage") is OptState.UNSCALED else scale


def loss_scale(trainer: pl.Trainer) -> Tensor | None:
    """Return the loss scale in use, unread; None where no loss scaler is at work."""
    scaler: torch.amp.GradScaler | None = getattr(trainer.precision_plugin, "scaler", None)
    if scaler is None or not scaler.is_enabled():
        return None
    return scaler._scale  # None until the first loss; `get_scale()` would wait for the device


def unscales_itself(optimizer: Optimizer) -> bool:
    """Return whether a loss scaler leaves it to the optimizer's kernel to unscale the gradients."""
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))


def loss_scale_of(trainer: pl.Trainer, *, read: bool) -> Scalar | None:
    """Return :func:`loss_scale`, as a float if it is to be ``read``, which waits for a device."""
    scale = loss_scale(trainer)
    return scale.item() if read and scale is not None else scale  # on a CPU


def loss_of_step(
    trainer: pl.Trainer, losses: Sequence[Tensor], loss_scale: Scalar | None, *, read: bool
) -> Scalar:
    """Return the mean loss of an accumulation window, without the loss scale; 0 if there is none.

    Args:
        trainer: Whose step it is.
        losses: What ``on_before_backward`` was given since the last step, 0-dimensional: scaled by
            the loss scaler, and divided by ``accumulate_grad_batches``.
        loss_scale: From :func:`loss_scale_of`.
        read: Whether to return a float, which waits for a device.
    """
    if not losses:
        return 0.0
    values: list[Scalar] = (
        [loss.item() for loss in losses]  # as its caller asked
        if read
        else [loss.to(wide_dtype(loss.device)) for loss in losses]
    )
    total = sum(values[1:], values[0])
    if loss_scale is not None:
        total = total / loss_scale
    window = trainer.accumulate_grad_batches
    # A short last window was divided by the length of a full one too.
    return total if window == 1 else total * (window / len(losses))
