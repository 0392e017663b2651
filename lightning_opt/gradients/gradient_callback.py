"""The base class of callbacks that read or change gradients."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor
from torch.amp.grad_scaler import OptState
from torch.optim import Optimizer

from lightning_opt.core.modules.sharding import Groups, flat_parameter_groups
from lightning_opt.core.numerics.norms import (
    GradientNorms,
    Gradients,
    GradientStep,
    collect_gradients,
    is_same,
    measure_norms,
    parameters_of,
)
from lightning_opt.core.numerics.scalars import Scalar
from lightning_opt.trainer.lightning import DeepSpeedStrategy
from lightning_opt.trainer.run_callback import RunCallback, has_step_hooks, raise_if_lbfgs

if TYPE_CHECKING:
    import lightning.pytorch as pl

WRAPPERS = ("_fsdp_wrapped_module.", "_orig_mod.", "_checkpoint_wrapped_module.")


def plain_name(name: str) -> str:
    """Return a module's or parameter's name without the prefixes of its wrappers.

    The wrappers are those of FSDP1, torch.compile and activation checkpointing. State that is
    stored by plain name can be loaded by a run that wraps the model differently.
    """
    for wrapper in WRAPPERS:
        name = name.replace(wrapper, "").removesuffix(wrapper[:-1]).rstrip(".")
    return name


def loss_scale(trainer: pl.Trainer) -> Tensor | None:
    """Return the current loss scale, still on the device; None without a loss scaler."""
    scaler: torch.amp.GradScaler | None = getattr(trainer.precision_plugin, "scaler", None)
    if scaler is None or not scaler.is_enabled():
        return None
    return scaler._scale  # None until the first loss; `get_scale()` would wait for the device


def grad_scale(trainer: pl.Trainer, optimizer: Optimizer) -> Scalar:
    """Return the loss scale in the optimizer's gradients before its step, still on the device.

    It is 1 if the gradients are already unscaled. Lightning unscales them before
    ``on_before_optimizer_step``, unless the optimizer is fused and unscales in its own step, or
    ``training_step`` returned None.
    """
    scale = loss_scale(trainer)
    if scale is None:
        return 1.0
    scaler: torch.amp.GradScaler = trainer.precision_plugin.scaler  # type: ignore[attr-defined]
    # User code may have unscaled already. `get` does not add a key to this defaultdict.
    state = scaler._per_optimizer_states.get(id(optimizer), {})
    return 1.0 if state.get("stage") is OptState.UNSCALED else scale


class GradientCallback(RunCallback):
    """A callback that reads or changes gradients in ``on_before_optimizer_step``.

    It handles the differences between strategies, precisions and optimizers for its subclasses.

    Attributes:
        names: The model's parameters by name; empty outside of a fit.
        barriers: One number per optimizer index: infinity if this callback skips the update of
            this step, else 0. If the host skips it, later callbacks get no gradients. If the device
            skips it, the number is a tensor, and later callbacks see it added to the norm.

    Raises:
        ValueError: In ``setup`` under DeepSpeed, which keeps gradients in its own buffers; in
            ``on_fit_start`` for LBFGS, which evaluates the loss several times per step.
    """

    not_pickled = ("_earlier",)

    def __init__(self) -> None:
        self.names: Mapping[Tensor, str] = {}
        self._held: dict[int, list[Tensor]] = {}  # parameters by optimizer index
        self.barriers: dict[int, Scalar] = {}
        self._flat: dict[Tensor, Groups] = {}
        self._earlier: list[GradientCallback] = []
        self._measured_by: GradientCallback | None = None
        self._next_reuses = False
        # By optimizer. The next callback removes the entry it uses, so that gradients can be freed.
        self._measurements: dict[int, GradientStep] = {}
        self._was_called = self._has_warned = False

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Raise under DeepSpeed, which does not expose the gradients."""
        super().setup(trainer, pl_module, stage)
        if stage == "fit" and isinstance(trainer.strategy, DeepSpeedStrategy):
            raise ValueError(
                f"{type(self).__name__} does not work with the DeepSpeed strategy: DeepSpeed keeps "
                "gradients in its own buffers, so no callback can read or change them. Use "
                "DeepSpeed's own settings (such as gradient_clipping in its config), or the "
                "strategies 'ddp', 'fsdp' or ModelParallelStrategy."
            )

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Find the parameters' names and shards, and the gradient callbacks before this one."""
        raise_if_lbfgs(type(self).__name__, trainer.optimizers)
        GradientCallback.release(self, trainer)
        self._find_parameters(trainer, pl_module)
        # FSDP1's outermost unit, `trainer.model`, holds all parameters outside inner units.
        self._flat = flat_parameter_groups(trainer.model or pl_module)
        before = self.callbacks_before(trainer)
        self._earlier = [other for other in before if isinstance(other, GradientCallback)]
        last = before[-1] if before else None
        if isinstance(last, GradientCallback):
            # A user's override may change the gradients after they were measured.
            hook = type(last).on_before_optimizer_step
            self._measured_by = last if hook.__module__.startswith("lightning_opt.") else None
        for optimizer in [] if self._earlier else filter(has_step_hooks, trainer.optimizers):
            self._patches.callback(optimizer.register_step_post_hook(self._warn_if_unseen).remove)

    def _warn_if_unseen(self, optimizer: Optimizer, *_: Any) -> None:
        """Warn once if the optimizer has stepped without ``on_before_optimizer_step``."""
        if not (self._was_called or self._has_warned):
            rank_zero_warn(
                f"{type(self).__name__} and later gradient callbacks do not act: the model calls "
                f"step() of {type(optimizer).__name__} itself, where Lightning calls no hooks. "
                "Call step() of self.optimizers(), or of the argument of optimizer_step."
            )
            self._has_warned = True

    def on_after_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Wait for the next call of ``on_before_optimizer_step``."""
        self._was_called = False  # not after a step: a subclass's `step` and its base run all hooks

    def _find_parameters(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._held = dict(enumerate(map(parameters_of, trainer.optimizers)))
        self.names = {p: plain_name(name) for name, p in pl_module.named_parameters()}
        for index, parameters in self._held.items():
            for position, parameter in enumerate(parameters):
                # An optimizer may hold parameters that are not the module's.
                self.names.setdefault(parameter, f"optimizer_{index}.{position}")

    def callbacks_before(self, trainer: pl.Trainer) -> list[pl.Callback]:
        """Return the Trainer's callbacks before this one."""
        callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]
        return callbacks[: callbacks.index(self)] if self in callbacks else []

    def release(self, trainer: pl.Trainer) -> None:
        """Drop references to the model."""
        super().release(trainer)
        self.names, self._held, self._flat = {}, {}, {}
        self._earlier, self._measured_by, self._next_reuses = [], None, False
        self.barriers, self._measurements = {}, {}

    def collect(self, trainer: pl.Trainer, optimizer: Optimizer) -> tuple[Gradients, Scalar]:
        """Return the optimizer's gradients, and the loss scale they contain."""
        self._was_called = True
        index = trainer.optimizers.index(optimizer)
        if any(other._skips_on_host(index) for other in self._earlier):
            return Gradients([], []), 1.0
        parameters = parameters_of(optimizer)
        if not is_same(parameters, self._held.get(index, [])):  # some were added during training
            self._find_parameters(trainer, trainer.lightning_module)
        gradients = collect_gradients(parameters, self._flat)
        return gradients, grad_scale(trainer, optimizer)

    def measure(self, trainer: pl.Trainer, optimizer: Optimizer) -> tuple[int, GradientStep]:
        """Return the optimizer's index and its gradients with their norms.

        If the callback directly before this one is a gradient callback, its measurement is reused.
        Any other callback may have changed the gradients, so they are measured again.
        """
        index = trainer.optimizers.index(optimizer)
        step = self._measured_by._pop_measurement(index) if self._measured_by else None
        if step is None:
            gradients, scale = self.collect(trainer, optimizer)
            norms = measure_norms(gradients, grad_scale=scale)
            step = GradientStep(gradients, norms, scale, self.names)
        self.names = step.names
        if self._next_reuses:
            self._measurements[index] = step
        for other in self._earlier:
            barrier = other.barriers.get(index)
            if isinstance(barrier, Tensor):
                norms = GradientNorms(step.norms.per_tensor, step.norms.total + barrier)
                step = replace(step, norms=norms)
        return index, step

    def _skips_on_host(self, index: int) -> bool:
        """Return whether the host skips the update of this optimizer."""
        barrier = self.barriers.get(index)
        return not isinstance(barrier, Tensor) and barrier == math.inf

    def _pop_measurement(self, index: int) -> GradientStep | None:
        """Remove and return an optimizer's measurement; None if its update is skipped."""
        self._next_reuses = True
        step = self._measurements.pop(index, None)
        return None if self._skips_on_host(index) else step
