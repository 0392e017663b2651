"""The precision plugin for float16 mixed precision with an observable loss scale."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import OptState
from torch.optim import Optimizer

from lightning_opt.core.arguments import check_at_least, check_positive
from lightning_opt.core.measure.reading import DelayedReads, Schedule
from lightning_opt.core.modules.patching import Patches, replaced
from lightning_opt.core.modules.sharding import is_dtensor, reads_are_free
from lightning_opt.core.numerics.scalars import Condition, Scalar, move, to_plain
from lightning_opt.core.output.loggers import log_scalars
from lightning_opt.trainer.lightning import (
    BaseMixedPrecision,
    GradClipAlgorithmType,
    LightningModule,
    Precision,
    optimizer_handles_unscaling,
)
from lightning_opt.trainer.run_callback import raise_if_lbfgs

if TYPE_CHECKING:
    import lightning.pytorch as pl

COUNTS = ("updates", "skipped", "overflows", "stuck")
"""Counters of the scaler over the whole run, which checkpoints contain."""


class CountingScaler(torch.amp.GradScaler):
    """A ``GradScaler`` with a minimum scale that counts skipped updates.

    Counts of skipped updates are numbers on a CPU and tensors on a device.

    Attributes:
        updates: Updates so far, including skipped ones.
        skipped: Skipped updates so far.
        overflows: Skipped updates with a finite loss.
        stuck: Consecutive skipped updates at ``min_scale``.
        last_skipped: Whether the last update was skipped.
    """

    def __init__(self, device: str, min_scale: float, **settings: Any) -> None:
        super().__init__(device, **settings)
        self.min_scale = min_scale
        self.updates = 0
        self.skipped: Scalar = 0
        self.overflows: Scalar = 0
        self.stuck: Scalar = 0
        self.last_skipped: Condition = False
        self._finite: Condition = True

    def record_loss(self, loss: Tensor) -> None:
        finite = torch.isfinite(loss.detach()).all()
        loss_is_finite = bool(finite.item()) if reads_are_free(loss.device) else finite
        self._finite = self._finite & loss_is_finite

    def update(self, new_scale: float | Tensor | None = None) -> None:
        states = self._per_optimizer_states.values()
        found = [flags for state in states if (flags := state["found_inf_per_device"])]
        scale = self._scale
        if new_scale is not None or scale is None or not found:
            super().update(new_scale)
            return
        for flags in found:  # `super().update` copies flags to the host without waiting for them
            flags.update({device: move(flag, scale.device) for device, flag in flags.items()})
        overflow: Condition = sum(flag for flags in found for flag in flags.values()) > 0
        at_floor: Condition = scale <= self.min_scale
        if reads_are_free(scale.device):
            overflow, at_floor = bool(overflow), bool(at_floor)
        super().update()
        scale.clamp_(min=self.min_scale)
        self.last_skipped = overflow
        self.updates += 1
        self.skipped = self.skipped + overflow
        self.overflows = self.overflows + (overflow & self._finite)
        self.stuck = (self.stuck + 1) * (overflow & at_floor)
        self._finite = True

    def state_dict(self) -> dict[str, Any]:
        """Return scale and counts as plain numbers. Waits for the device."""
        return {
            "scale": self.get_scale(),
            "_growth_tracker": self._get_growth_tracker(),
            **to_plain({name: getattr(self, name) for name in COUNTS}),
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore scale and counts from :meth:`state_dict` or torch's scaler; settings stay."""
        self._init_scale = max(state_dict["scale"], self.min_scale)
        self._init_growth_tracker = state_dict["_growth_tracker"]
        if self._scale is not None and self._growth_tracker is not None:  # created together
            self._scale.fill_(self._init_scale)
            self._growth_tracker.fill_(self._init_growth_tracker)
        for name in COUNTS:
            setattr(self, name, state_dict.get(name, 0))


class DynamicLossScale(BaseMixedPrecision):
    """Float16 mixed precision on CUDA and CPU, with a loss scale that is logged and configurable.

    float16 gradients below 6e-8 become zero. So the loss is multiplied by a large scale before the
    backward pass, and gradients are divided by it before the update. If a gradient is not finite,
    the update is skipped and the scale is halved; after ``growth_interval`` updates in a row it is
    doubled. torch's ``GradScaler``, which ``Trainer(precision="16-mixed")`` uses, does the same.
    There are four differences:

    - It works on a CPU, where Lightning replaces ``"16-mixed"`` by bf16.
    - The scale has a floor. A run with ``patience`` skipped updates in a row at the floor stops
      with an error.
    - It logs its values, and schedulers skip a step for each skipped update.
    - ``Trainer(gradient_clip_val=...)`` works with fused optimizers.

    Lightning counts a skipped update in ``global_step``, and steps the schedulers of
    ``interval="step"``. Here these schedulers do not step. ``global_step`` still counts, since
    loggers, checkpoints and ``max_steps`` depend on it.

    On an accelerator, the host does not wait for the device between reports. So a scheduler skips
    its step two steps after the skipped update, and a collapsed scale raises at the next report.

    Logged every ``every_n_steps`` optimizer steps:

    ======================== ===================================================================
    ``loss_scale/scale``     the current scale
    ``loss_scale/skipped``   updates skipped so far
    ``loss_scale/overflows`` skipped updates with a finite loss on this rank; in the other skipped
                             updates the loss itself was NaN or infinite
    ======================== ===================================================================

    Args:
        init_scale: The initial scale.
        growth_interval: Updates in a row without an overflow until the scale grows.
        min_scale: Minimum of the scale, at most ``init_scale``.
        patience: Consecutive skipped updates at the floor, after which the run stops.
        every_n_steps: Optimizer steps between logged values.

    Raises:
        ValueError: In ``__init__`` for arguments out of range; before the first step on a device
            that is neither CUDA nor a CPU, for sharded (FSDP2) or float16 weights, and for LBFGS.
        FloatingPointError: While training, on all ranks, when the scale has collapsed.

    Example:
        >>> import lightning as L
        >>> import lightning_opt as lo
        >>> trainer = L.Trainer(plugins=[lo.DynamicLossScale()], accelerator="cpu", logger=False)

    References:
        Paulius Micikevicius and others, "Mixed Precision Training", 2018.
    """

    scaler: CountingScaler

    def __init__(
        self,
        init_scale: float = 65536.0,
        growth_interval: int = 1000,
        min_scale: float = 1.0,
        patience: int = 10,
        every_n_steps: int = 50,
    ) -> None:
        if check_positive("min_scale", min_scale) > check_positive("init_scale", init_scale):
            raise ValueError(f"min_scale must be at most init_scale={init_scale}, got {min_scale}.")
        self._settings: dict[str, Any] = {
            "init_scale": float(init_scale),
            "growth_interval": check_at_least("growth_interval", growth_interval, 1),
            "min_scale": float(min_scale),
        }
        self.patience = check_at_least("patience", patience, 1)
        self._schedule = Schedule(every_n_steps)
        super().__init__("16-mixed", "cpu")
        self._module: ref[nn.Module] | None = None
        self._patches = Patches()
        self._reset()

    def _reset(self) -> None:
        self.scaler = CountingScaler(self.device, **self._settings)
        self._skips_to_hold = 0  # skipped updates for which schedulers must still skip a step
        self._delayed: DelayedReads[None] = DelayedReads()

    def connect(
        self, model: nn.Module, optimizers: list[Optimizer], lr_schedulers: list[Any]
    ) -> tuple[nn.Module, list[Optimizer], list[Any]]:
        """Connect to model and Trainer, after the model was moved to its device."""
        pl_module = next(
            module
            for module in model.modules()
            if isinstance(module, LightningModule) and module._trainer is not None
        )
        trainer = pl_module.trainer
        device = trainer.strategy.root_device.type
        _check_supported(device, model, optimizers)
        self.teardown()
        if self._module is not None and self._module() is not pl_module:
            self._reset()  # another model needs another scale
        self._module = ref(pl_module)
        if device != self.device:
            state, self.device = self.scaler.state_dict(), device
            self.scaler = CountingScaler(device, **self._settings)
            self.scaler.load_state_dict(state)
        if trainer.state.fn == "fit":
            self._hold_schedulers(trainer)
        return super().connect(model, optimizers, lr_schedulers)

    def pre_backward(  # type: ignore[override]
        self, tensor: Tensor, module: pl.LightningModule
    ) -> Tensor:
        """Record whether the loss is finite, and scale it."""
        self.scaler.record_loss(tensor)
        return super().pre_backward(tensor, module)

    def optimizer_step(  # type: ignore[override]
        self,
        optimizer: Optimizer,
        model: pl.LightningModule,
        closure: Callable[[], Any],
        **kwargs: Any,
    ) -> Any:
        """Update or skip; count the result, log it, and raise if the scale has collapsed."""
        updates = self.scaler.updates
        result = super().optimizer_step(optimizer, model, closure, **kwargs)
        if self.scaler.updates == updates:
            # `training_step` returned None. Nothing was updated, but clipping may have unscaled.
            self.scaler._per_optimizer_states.clear()
            return result
        last_skipped = self.scaler.last_skipped
        if isinstance(last_skipped, Tensor):
            self._delayed.push(last_skipped.reshape(1), None)
            reads = self._delayed.due()
        else:
            reads = self._delayed.flush()  # empty unless the checkpoint is from a GPU
            self._skips_to_hold += last_skipped
        self._skips_to_hold += sum(int(skipped) for (skipped,), _ in reads)
        due = self._schedule.is_due(self.scaler.updates)
        if due:
            state, keys = self.scaler.state_dict(), ("scale", "skipped", "overflows")
            log_scalars(model.trainer, {f"loss_scale/{key}": float(state[key]) for key in keys})
        if due or not isinstance(last_skipped, Tensor):
            self._raise_if_collapsed()
        return result

    def clip_gradients(
        self,
        optimizer: Optimizer,
        clip_val: int | float = 0.0,
        gradient_clip_algorithm: GradClipAlgorithmType = GradClipAlgorithmType.NORM,
    ) -> None:
        """Clip gradients. Gradients of a fused optimizer are unscaled first."""
        optimizer = getattr(optimizer, "optimizer", optimizer)  # without Lightning's wrapper
        if clip_val > 0 and optimizer_handles_unscaling(optimizer):
            state = self.scaler._per_optimizer_states[id(optimizer)]
            if state["stage"] is OptState.READY and self.scaler._scale is not None:
                self.scaler.unscale_(optimizer)
        Precision[0].clip_gradients(self, optimizer, clip_val, gradient_clip_algorithm)

    def teardown(self) -> None:
        """Restore the Trainer, and drop values that were not read yet."""
        self._patches.close()
        self._delayed.clear()

    def state_dict(self) -> dict[str, Any]:
        """Return scale and counts as plain numbers. Waits for the device.

        A single rank may call this: it changes nothing, so schedulers wait at the same steps.
        """
        unread = [int(skipped) for (skipped,), _ in self._delayed.peek()]
        own = {"skips_to_hold": self._skips_to_hold, "unread_skips": unread}
        return self.scaler.state_dict() | own

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the result of :meth:`state_dict`, or the state of Lightning's own plugin."""
        self.scaler.load_state_dict(state_dict)
        self._skips_to_hold = state_dict.get("skips_to_hold", 0)
        self._delayed.clear()
        for skipped in state_dict.get("unread_skips", ()):
            self._delayed.push(torch.tensor([skipped]), None)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Load the scale of a run with ``precision="16-mixed"``."""
        lightning_state = checkpoint.get("MixedPrecision")
        if lightning_state and type(self).__qualname__ not in checkpoint:
            self.load_state_dict(lightning_state)

    def __getstate__(self) -> dict[str, Any]:
        """Drop the reference to the model, which exists only in this process."""
        return {**self.__dict__, "_module": None}

    def _raise_if_collapsed(self) -> None:
        stuck = int(self.scaler.stuck)
        if stuck < self.patience:
            return
        state = self.scaler.state_dict()
        nonfinite_losses = state["skipped"] - state["overflows"]
        raise FloatingPointError(
            f"DynamicLossScale: the loss scale has collapsed. The last {stuck} updates were "
            f"skipped because gradients were not finite, although the scale is down to its floor, "
            f"min_scale={self.scaler.min_scale:g}. Of {state['skipped']} updates skipped in all, "
            f"{nonfinite_losses} had a loss of NaN or infinity on this rank. If there are any, "
            "find their cause (GradientHealth names the layer, NonFiniteGuard skips bad batches). "
            "If there are none, the range of float16 is too small for this model's activations: "
            'use Trainer(precision="bf16-mixed"), or compute the layer that overflows in float32.'
        )

    def _hold_schedulers(self, trainer: pl.Trainer) -> None:
        """Make Lightning skip one scheduler step for each skipped update."""
        loop = trainer.fit_loop.epoch_loop
        original = loop.update_lr_schedulers
        holding = False

        def update_lr_schedulers(interval: str, update_plateau_schedulers: bool) -> None:
            nonlocal holding
            if interval == "step" and not loop._should_accumulate():
                if not update_plateau_schedulers:  # the first of two calls
                    holding = self._skips_to_hold > 0
                    self._skips_to_hold -= holding
                if holding:
                    return
            original(interval, update_plateau_schedulers=update_plateau_schedulers)

        self._patches.enter_context(replaced(loop, update_lr_schedulers=update_lr_schedulers))


def _check_supported(device: str, model: nn.Module, optimizers: list[Optimizer]) -> None:
    if device not in ("cpu", "cuda"):
        raise ValueError(
            f"DynamicLossScale works on CUDA devices and CPUs, and this one is {device!r}. Use "
            'Trainer(precision="bf16-mixed") instead.'
        )
    if any(is_dtensor(parameter) for parameter in model.parameters()):
        raise ValueError(
            "DynamicLossScale does not work with sharded parameters (ModelParallelStrategy): each "
            "rank would see the overflows of its own shards only. Use "
            'Trainer(precision="bf16-mixed"), or the strategy "ddp".'
        )
    if any(parameter.dtype is torch.float16 for parameter in model.parameters()):
        raise ValueError(
            "DynamicLossScale needs weights in float32, since updates of float16 weights are "
            "rounded away; autocast computes in float16. Remove `.half()`."
        )
    raise_if_lbfgs("DynamicLossScale", optimizers)
