"""Convolutions in the channels_last memory format."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter
from torch.optim import Optimizer

from lightning_opt.core.arguments import check_one_of
from lightning_opt.core.modules.sharding import is_dtensor
from lightning_opt.core.output.report import Report
from lightning_opt.kernels.layouts import same_layout, with_strides
from lightning_opt.trainer.lightning import (
    DeepSpeedStrategy,
    FSDPStrategy,
    ModelParallelStrategy,
    is_overridden,
)
from lightning_opt.trainer.run_callback import RunCallback

if TYPE_CHECKING:
    import lightning.pytorch as pl

Policy = Literal["auto", "always"]

# Convolutions by the number of dimensions of their weights.
CONVOLUTIONS: dict[int, tuple[type[nn.Module], ...]] = {
    4: (nn.Conv2d, nn.ConvTranspose2d),
    5: (nn.Conv3d, nn.ConvTranspose3d),
}
FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}
SHARDING_STRATEGIES = (FSDPStrategy, ModelParallelStrategy, DeepSpeedStrategy)
# Other layers whose main work is matrix products.
OTHER_MATMUL_LAYERS = (
    nn.Linear, nn.Bilinear, nn.MultiheadAttention, nn.RNNBase, nn.Conv1d, nn.ConvTranspose1d,
)  # fmt: skip


class ChannelsLast(RunCallback):
    """Switches the convolutions of convolutional models to channels_last.

    Weights of ``Conv2d``, ``Conv3d`` and their transposes, with their gradients and optimizer
    state, are converted to ``torch.channels_last`` or ``channels_last_3d`` while a stage runs.
    Outputs follow the weights, regardless of the layout of the input. Results are the same up to
    rounding, since a different kernel sums in a different order.

    Everything is restored when the run ends or fails. Checkpoints hold the optimizer state in its
    original layout.

    Nothing is logged; :meth:`report` contains the decision and its reason.

    Args:
        policy: ``"auto"`` uses channels_last if at least half of the matrix-multiplying layers are
            convolutions over two or three dimensions; ``"always"`` uses it in any case.

    Raises:
        ValueError: In ``__init__`` for another policy; in ``setup`` for ``"always"`` under FSDP,
            ``ModelParallelStrategy`` and DeepSpeed, whose shards have their own memory order.
            ``"auto"`` does not change such models.

    Example:
        >>> import lightning as L
        >>> import lightning_opt as lo
        >>> trainer = L.Trainer(callbacks=[lo.ChannelsLast()], logger=False)
    """

    only_one = True
    not_pickled = ("_convolutions",)

    def __init__(self, policy: Policy = "auto") -> None:
        self.policy = check_one_of("policy", policy, get_args(Policy))
        self._convolutions: Convolutions | None = None
        self._decision: dict[str, str] = {}

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Decide and convert, before the strategy wraps the model."""
        strategy = type(trainer.strategy).__name__
        sharded = isinstance(trainer.strategy, SHARDING_STRATEGIES)
        if sharded and self.policy == "always":
            raise ValueError(
                f"ChannelsLast('always') does not work with {strategy}: its shards have their own "
                "memory order. Use DDP, or remove the callback."
            )
        super().setup(trainer, pl_module, stage)
        self.release(trainer)
        self._decision = {}
        if sharded:
            self._decide(False, f"{strategy} lays out the weights itself")
        elif not is_overridden("configure_model", pl_module):
            self._inspect(pl_module)
        elif trainer.world_size > 1:
            self._decide(False, "configure_model creates the layers, which are wrapped immediately")

    def _inspect(self, pl_module: pl.LightningModule) -> None:
        """Decide by the model's layers, and convert them."""
        convolutions = Convolutions(pl_module)
        count, others = convolutions.count, convolutions.others
        channels_last = count > 0 and (self.policy == "always" or count >= others)
        other_layers = f"{others} other layers that multiply"
        reason = f"{count} convolutions over two or three dimensions, {other_layers}"
        self._decide(channels_last, reason)
        if channels_last:
            convolutions.convert()
            self._convolutions = convolutions

    def _decide(self, channels_last: bool, reason: str) -> None:
        name = "channels_last" if channels_last else "contiguous"
        self._decision = {"memory format": name, "because": reason}

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Inspect models of ``configure_model``, and convert optimizer states on save and load."""
        if not self._decision:
            self._inspect(pl_module)
        convolutions = self._convolutions
        if convolutions is None:
            return
        self._patches.close()  # validation starts within a fit
        for optimizer in trainer.optimizers:
            saving = optimizer.register_state_dict_post_hook(convolutions.restore_saved_state)
            loading = optimizer.register_load_state_dict_post_hook(convolutions.align_state)
            self._patches.callback(saving.remove)
            self._patches.callback(loading.remove)

    on_validation_start = on_test_start = on_predict_start = on_fit_start

    def report(self) -> Report:
        """Return the decision and its reason."""
        return Report("ChannelsLast", [self._decision] if self._decision else [])

    def release(self, trainer: pl.Trainer) -> None:
        """Restore the weights and the optimizers."""
        super().release(trainer)
        if self._convolutions is not None:
            self._convolutions.restore(trainer.optimizers)
        self._convolutions = None


class Convolutions:
    """The weights of a model's convolutions, which can be switched to channels_last and back.

    Outputs follow the weights. A weight that is a view of a larger memory block is not
    converted, because it would no longer be a view.

    Args:
        model: A model with all of its layers.

    Attributes:
        count: Number of convolutions.
        others: Number of other matrix-multiplying layers.
    """

    def __init__(self, model: nn.Module) -> None:
        self.count = 0
        self.others = 0
        self._formats: dict[nn.Parameter, Any] = {}
        self._strides: dict[nn.Parameter, tuple[int, ...]] = {}
        for module in model.modules():
            for ndim, kinds in CONVOLUTIONS.items():
                if isinstance(module, kinds):
                    self.count += 1
                    for weight in module.parameters():
                        if weight.ndim == ndim and _owns_memory(weight):
                            self._formats[weight] = FORMATS[ndim]
            self.others += isinstance(module, OTHER_MATMUL_LAYERS)

    def convert(self) -> None:
        for weight, memory_format in self._formats.items():
            self._strides[weight] = weight.stride()
            weight.data = weight.data.to(memory_format=memory_format)
        self._align_gradients()

    def restore(self, optimizers: Iterable[Optimizer] = ()) -> None:
        for weight, strides in self._strides.items():
            weight.data = with_strides(weight.data, strides)
        self._strides = {}
        self._align_gradients()
        for optimizer in optimizers:
            self.align_state(optimizer)

    def _align_gradients(self) -> None:
        for weight in self._formats:
            if weight.grad is not None and not same_layout(weight.grad, weight):
                weight.grad = with_strides(weight.grad, weight.stride())

    def align_state(self, optimizer: Optimizer) -> None:
        """Convert an optimizer's state to the layout of the weights.

        Fused kernels require the same layout, and other kernels are faster with it.
        """
        for weight in self._formats:
            state = optimizer.state.get(weight) or {}
            state.update(_with_layout(state, weight, weight.stride()))

    def restore_saved_state(self, optimizer: Optimizer, saved: dict[str, Any]) -> None:
        """Convert a ``state_dict`` of ``optimizer`` to the original layout of the weights.

        Otherwise a run without this callback would load the state in channels_last.
        """
        for group, live in zip(saved["param_groups"], optimizer.param_groups, strict=True):
            for key, weight in zip(group["params"], live["params"], strict=True):
                if weight in self._strides and key in saved["state"]:
                    state = saved["state"][key]
                    converted = _with_layout(state, weight, self._strides[weight])
                    saved["state"][key] = {**state, **converted}


def _owns_memory(weight: nn.Parameter) -> bool:
    if isinstance(weight, UninitializedParameter) or is_dtensor(weight):
        return False
    return weight.untyped_storage().nbytes() == weight.numel() * weight.element_size()


def _with_layout(state: dict[str, Any], weight: Tensor, strides: tuple[int, ...]) -> dict[str, Any]:
    """Return copies with ``strides`` of the tensors in ``state`` that have the weight's shape."""
    return {
        name: with_strides(value, strides)
        for name, value in state.items()
        if isinstance(value, Tensor) and value.shape == weight.shape
    }
