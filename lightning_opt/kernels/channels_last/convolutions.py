"""The convolutions of a model, and the order in which their weights lie in memory."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter
from torch.optim import Optimizer

from lightning_opt.core.modules.sharding import is_dtensor
from lightning_opt.kernels.layouts import laid_out, same_layout

CONVOLUTIONS: dict[int, tuple[type[nn.Module], ...]] = {
    4: (nn.Conv2d, nn.ConvTranspose2d),
    5: (nn.Conv3d, nn.ConvTranspose3d),
}
"""By the number of dimensions of what they take: batch, channels, and two or three of space."""

FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}

OTHERS = (nn.Linear, nn.Bilinear, nn.MultiheadAttention, nn.RNNBase, nn.Conv1d, nn.ConvTranspose1d)
"""Other layers that multiply, to which channels_last means nothing."""


class Convolutions:
    """Those of a model, whose weights can be switched to channels_last and back.

    Only weights of convolutions are switched; what they compute follows. A weight that is a part of
    a larger piece of memory is left alone, since it could not stay there.

    Args:
        model: A model whose layers are all there.

    Attributes:
        count: How many there are.
        others: How many other layers multiply.
    """

    def __init__(self, model: nn.Module) -> None:
        self.count = self.others = 0
        self._formats: dict[nn.Parameter, Any] = {}
        self._strides: dict[nn.Parameter, tuple[int, ...]] = {}
        for module in model.modules():
            for ndim, kinds in CONVOLUTIONS.items():
                if isinstance(module, kinds):
                    self.count += 1
                    for weight in module.parameters():
                        if weight.ndim == ndim and _can_move(weight):
                            self._formats[weight] = FORMATS[ndim]
            self.others += isinstance(module, OTHERS)

    @property
    def dominate(self) -> bool:
        """Whether at least half of the layers that multiply are convolutions."""
        return self.count > 0 and self.count >= self.others

    @property
    def converted(self) -> bool:
        """Whether the weights are in channels_last now because of :meth:`convert`."""
        return bool(self._strides)

    def convert(self) -> None:
        """Put weights and their gradients into channels_last."""
        if self.converted:
            return
        for weight, memory_format in self._formats.items():
            self._strides[weight] = weight.stride()
            weight.data = weight.data.to(memory_format=memory_format)
        self._follow(())

    def restore(self, optimizers: Iterable[Optimizer] = ()) -> None:
        """Put all of it, and the state of optimizers, into the order in which it was found."""
        for weight, strides in self._strides.items():
            weight.data = laid_out(weight.data, strides)
        if self._strides:
            self._strides = {}
            self._follow(optimizers)

    def _follow(self, optimizers: Iterable[Optimizer]) -> None:
        for weight in self._formats:
            if weight.grad is not None and not same_layout(weight.grad, weight):
                weight.grad = laid_out(weight.grad, weight.stride())
        for optimizer in optimizers:
            self.align_state(optimizer)

    def align_state(self, optimizer: Optimizer) -> None:
        """Put an optimizer's state for these weights into the order of the weights.

        Fused kernels need that, and the others are faster.
        """
        for weight in self._formats:
            state = optimizer.state.get(weight) or {}
            state.update(_relaid(state, weight, weight.stride()))

    def disguise(self, optimizer: Optimizer, saved: dict[str, Any]) -> None:
        """Put a saved state of ``optimizer`` into the order in which the weights were found.

        Loaded into a model without us it would keep the order that it was saved in.
        """
        for group, live in zip(saved["param_groups"], optimizer.param_groups, strict=True):
            for key, weight in zip(group["params"], live["params"], strict=True):
                if weight in self._strides and key in saved["state"]:
                    state = saved["state"][key]
                    saved["state"][key] = {**state, **_relaid(state, weight, self._strides[weight])}


def _can_move(weight: nn.Parameter) -> bool:
    if isinstance(weight, UninitializedParameter) or is_dtensor(weight):
        return False
    return weight.untyped_storage().nbytes() == weight.numel() * weight.element_size()


def _relaid(state: dict[str, Any], weight: Tensor, strides: tuple[int, ...]) -> dict[str, Any]:
    """Return what in ``state`` has the weight's shape, laid out with ``strides``."""
    return {
        name: laid_out(value, strides)
        for name, value in state.items()
        if isinstance(value, Tensor) and value.shape == weight.shape
    }
