"""Whether an optimizer can use torch's fused kernel, and switching it there and back.

Fused kernels take the memory of parameter, gradient and state as three flat arrays. On CUDA they
refuse tensors whose values lie in different orders; on a CPU (torch 2.13) they do not look, and
update each weight with the gradient of another. So it is checked here, each time.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer

from lightning_opt.core.modules.sharding import is_dtensor
from lightning_opt.kernels.layouts import is_dense, laid_out, same_layout

FUSED: tuple[type[Optimizer], ...] = (AdamW, Adam, SGD, Adagrad)
FLAGS = {"fused": True, "foreach": False}
"""What is set in each parameter group."""

CHECKED = "_need_device_dtype_check_for_fused"
"""An attribute with which torch notes that a fused optimizer has been checked."""


def obstacle_to_fused(optimizer: Optimizer) -> str | None:
    """Return why ``optimizer`` cannot be fused, or None.

    Args:
        optimizer: Whose parameters are where they will be trained.
    """
    groups = optimizer.param_groups
    base = _fused_base(type(optimizer))
    if all(group.get("fused") for group in groups):
        return "already fused"
    if base is None:
        return f"torch has no fused {type(optimizer).__name__}"
    if any(group.get("fused") is False for group in groups):
        return "fused=False was chosen"
    if any(group.get("differentiable") for group in groups):
        return "differentiable=True"
    if base is SGD and any(group["momentum"] and group["dampening"] for group in groups):
        # The first update leaves dampening out, and fused SGD knows only of one first update for
        # all parameters of a group.
        return "momentum with dampening"
    parameters = [parameter for group in groups for parameter in group["params"]]
    if len({getattr(parameter, "device_mesh", None) for parameter in parameters}) > 1:
        return "parameters that are sharded in different ways"  # the kernel takes them all at once
    return next((why for p in parameters if (why := _obstacle_in(p, base)) is not None), None)


def _obstacle_in(parameter: Tensor, base: type[Optimizer]) -> str | None:
    if is_dtensor(parameter):
        if base not in (Adam, AdamW):
            return f"torch has no fused {base.__name__} for sharded parameters"
    elif type(parameter) not in (Tensor, nn.Parameter):
        return f"parameters of type {type(parameter).__name__}"
    if not is_dense(parameter):
        return "a parameter that is a view with gaps"
    device, dtype = parameter.device.type, parameter.dtype
    if not _works_fused(base, device, dtype):  # type: ignore[arg-type]  # classes hash
        return f"no fused {base.__name__} on {device} in {dtype}"
    return None


def _fused_base(kind: type[Optimizer]) -> type[Optimizer] | None:
    """Return the class of torch whose update ``kind`` runs unchanged, if that can be fused."""
    for parent in kind.__mro__:
        if parent in FUSED:
            return parent
        if "step" in vars(parent) or "_init_group" in vars(parent):
            return None
    return None


@functools.cache
def _works_fused(base: Callable[..., Optimizer], device: str, dtype: torch.dtype) -> bool:
    """Return whether the fused kernel runs there: it is asked to update one number."""
    try:
        parameter = nn.Parameter(torch.zeros(1, device=device, dtype=dtype))
        parameter.grad = torch.ones_like(parameter)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            base([parameter], lr=0.5, fused=True).step()
        return bool(parameter.item() < 0)  # once for each kind of optimizer
    except (RuntimeError, TypeError, ValueError):  # which of them depends on the version of torch
        return False


class Fused:
    """One optimizer on its fused kernel, until :meth:`undo`.

    What it saves says what its user had set, so that checkpoints do not tell that it was switched;
    what it loads is put where the kernel wants it.

    Args:
        optimizer: The optimizer itself, without Lightning's wrapper.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self._defaults = _flags_of(optimizer.defaults)
        self._was_checked = CHECKED in vars(optimizer)
        self._apply()
        self._hooks = [
            optimizer.register_state_dict_post_hook(
                lambda optimizer, saved: self._put_back(saved["param_groups"])
            ),
            optimizer.register_load_state_dict_post_hook(lambda optimizer: self._apply()),
        ]

    def _apply(self) -> None:
        self._before = [_flags_of(group) for group in self.optimizer.param_groups]
        for settings in (self.optimizer.defaults, *self.optimizer.param_groups):
            settings.update(FLAGS)
        # Step counts lie beside their parameters, and all else in the same order as they.
        for parameter, state in self.optimizer.state.items():
            for name, value in state.items():
                if not isinstance(value, Tensor) or is_dtensor(value):
                    continue
                if name == "step":
                    state[name] = value.to(parameter.device, torch.float32)
                elif value.shape == parameter.shape and not same_layout(value, parameter):
                    state[name] = laid_out(value, parameter.stride())

    def prepare_update(self) -> str | None:
        """See to it that the kernel can take the gradients. Call it when they are there.

        Returns:
            Why it cannot, or None.
        """
        for group in self.optimizer.param_groups:
            has_momentum = bool(group.get("momentum")) and isinstance(self.optimizer, SGD)
            for parameter in group["params"]:
                gradient = parameter.grad
                if gradient is None:
                    continue
                if gradient.layout is not torch.strided:
                    return "sparse gradients"
                if gradient.dtype != parameter.dtype:
                    return f"gradients of {gradient.dtype}"
                if gradient.stride() != parameter.stride() and not same_layout(gradient, parameter):
                    parameter.grad = laid_out(gradient, parameter.stride())
                if has_momentum:
                    state = self.optimizer.state[parameter]
                    if state.get("momentum_buffer") is None:
                        # Fused SGD fails if only some of a group have theirs, as when a layer gets
                        # its first gradient later than others. From 0 the result is the same.
                        state["momentum_buffer"] = torch.zeros_like(
                            parameter, memory_format=torch.preserve_format
                        )
        return None

    def _put_back(self, groups: list[dict[str, Any]]) -> None:
        """Have ``groups`` say what the user has set; those that have come since, the defaults."""
        for place, group in enumerate(groups):
            group.update(self._before[place] if place < len(self._before) else self._defaults)

    def undo(self) -> None:
        """Leave the optimizer as it was found."""
        for hook in self._hooks:
            hook.remove()
        self._put_back(self.optimizer.param_groups)
        self.optimizer.defaults.update(self._defaults)
        if not self._was_checked:
            vars(self.optimizer).pop(CHECKED, None)


def _flags_of(settings: dict[str, Any]) -> dict[str, Any]:
    return {flag: settings.get(flag) for flag in FLAGS}
