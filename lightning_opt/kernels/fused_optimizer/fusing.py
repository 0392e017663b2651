"""Which implementation of an update an optimizer can use, and switching it there and back.

torch's fused kernels take the memory of parameter, gradient and state as three flat arrays. On
CUDA they refuse tensors whose values lie in different orders; on a CPU (torch 2.13) they do not
look, and update each weight with the gradient of another. So it is checked here, each time.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer

from lightning_opt.core.sharding import is_dtensor
from lightning_opt.kernels.layouts import is_dense, laid_out, same_layout

Implementation = Literal["fused", "foreach"]

FUSED: tuple[type[Optimizer], ...] = (AdamW, Adam, SGD, Adagrad)
FLAGS: dict[Implementation, dict[str, bool]] = {
    "fused": {"fused": True, "foreach": False},
    "foreach": {"foreach": True},
}
"""What is set in each parameter group."""

_ATTRIBUTES = ("_step_supports_amp_scaling", "_need_device_dtype_check_for_fused")
_MISSING = object()


def choose_implementation(
    optimizer: Optimizer, sparse: Iterable[Tensor] = ()
) -> tuple[Implementation | None, str]:
    """Return the fastest implementation to switch to, and why it is not a faster one.

    Args:
        optimizer: Whose parameters are where they will be trained.
        sparse: Parameters that get sparse gradients.

    Returns:
        ``"fused"`` and an empty string; ``"foreach"`` or None with the reason.
    """
    obstacle = _obstacle_to_fused(optimizer, sparse)
    if obstacle is None:
        return "fused", ""
    if all(group.get("fused") for group in optimizer.param_groups):
        return None, "already fused"
    further = _obstacle_to_foreach(optimizer)
    if further is None:
        return "foreach", obstacle
    return None, obstacle if further == obstacle else f"{obstacle}; {further}"


def _obstacle_to_fused(optimizer: Optimizer, sparse: Iterable[Tensor]) -> str | None:
    groups = optimizer.param_groups
    if all(group.get("fused") for group in groups):
        return "already fused"
    base = _fused_base(type(optimizer))
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
    parameters = list(_parameters(optimizer))
    return _obstacle_in_parameters(base, parameters, sparse)


def _obstacle_in_parameters(
    base: type[Optimizer], parameters: list[Tensor], sparse: Iterable[Tensor]
) -> str | None:
    odd = set(sparse)
    kinds: set[tuple[str, torch.dtype]] = set()
    meshes = {getattr(parameter, "device_mesh", None) for parameter in parameters}
    if len(meshes) > 1:
        return "parameters that are sharded in different ways"  # the kernel takes them all at once
    if base not in (Adam, AdamW) and any(is_dtensor(parameter) for parameter in parameters):
        return f"torch has no fused {base.__name__} for sharded parameters"
    for parameter in parameters:
        if parameter in odd:
            return "sparse gradients"
        if not parameter.is_floating_point():
            return f"parameters of {parameter.dtype}"
        plain = type(parameter) in (Tensor, nn.Parameter) or is_dtensor(parameter)
        if not plain:
            return f"parameters of type {type(parameter).__name__}"
        if not is_dense(parameter):
            return "a parameter that is a view with gaps"
        kinds.add((parameter.device.type, parameter.dtype))
    for device, dtype in sorted(kinds, key=str):
        if not _works_fused(base, device, dtype):  # type: ignore[arg-type]  # classes hash
            return f"no fused {base.__name__} on {device} in {dtype}"
    return None


def _obstacle_to_foreach(optimizer: Optimizer) -> str | None:
    groups = optimizer.param_groups
    if not all("foreach" in group for group in groups):
        return f"torch has no fused {type(optimizer).__name__}"
    if any(group["foreach"] is not None for group in groups):
        return f"foreach={groups[0]['foreach']} was chosen"
    if any(group.get("differentiable") for group in groups):
        return "differentiable=True"
    if any(
        isinstance(value, Tensor) and not group.get("capturable")
        for group in groups
        for value in (group.get("lr"), *(group.get("betas") or ()))
    ):
        return "settings that are tensors"
    devices = {parameter.device.type for parameter in _parameters(optimizer)}
    if "cpu" in devices:
        # There torch loops over the tensors all the same, with temporaries of the whole model.
        return "foreach does not pay on a CPU"
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
    """Return whether the fused implementation runs there: it is asked to update one number."""
    try:
        parameter = nn.Parameter(torch.zeros(1, device=device, dtype=dtype))
        parameter.grad = torch.ones_like(parameter)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            base([parameter], lr=0.5, fused=True).step()
        return bool(parameter.item() < 0)  # once for each kind of optimizer
    except (RuntimeError, TypeError, ValueError):  # which of them depends on the version of torch
        return False


def _parameters(optimizer: Optimizer) -> Iterator[Tensor]:
    return (parameter for group in optimizer.param_groups for parameter in group["params"])


class Switch:
    """One optimizer on another implementation, until :meth:`undo`.

    What it saves says what its user had set, so that checkpoints do not tell that it was switched;
    what it loads is put where the implementation wants it.

    Args:
        optimizer: The optimizer itself, without Lightning's wrapper.
        implementation: From :func:`choose_implementation`.
        takes_scaled: Whether a loss scaler is to leave unscaling to the fused kernel.
    """

    def __init__(
        self, optimizer: Optimizer, implementation: Implementation, *, takes_scaled: bool = False
    ) -> None:
        self.optimizer, self.implementation = optimizer, implementation
        self._takes_scaled = takes_scaled
        self._flags = FLAGS[implementation]
        self._defaults = self._flags_of(optimizer.defaults)
        self._attributes = {name: vars(optimizer).get(name, _MISSING) for name in _ATTRIBUTES}
        self._apply()
        self._hooks = [
            optimizer.register_state_dict_post_hook(self._disguise),
            optimizer.register_load_state_dict_post_hook(lambda optimizer: self._apply()),
        ]

    def _apply(self) -> None:
        optimizer = self.optimizer
        self._before = [self._flags_of(group) for group in optimizer.param_groups]
        for settings in (optimizer.defaults, *optimizer.param_groups):
            settings.update(self._flags)
        if self.implementation == "fused":
            if self._takes_scaled:
                optimizer._step_supports_amp_scaling = True  # type: ignore[attr-defined]
            self._lay_out_state()

    def _flags_of(self, settings: dict[str, Any]) -> dict[str, Any]:
        return {flag: settings.get(flag, _MISSING) for flag in self._flags}

    def _lay_out_state(self) -> None:
        """Have step counts beside their parameters, and all else in the same order as they."""
        for parameter, state in self.optimizer.state.items():
            for name, value in state.items():
                if not isinstance(value, Tensor) or is_dtensor(value):
                    continue
                if name == "step":
                    state[name] = value.to(parameter.device, torch.float32)
                elif value.shape == parameter.shape and not same_layout(value, parameter):
                    state[name] = laid_out(value, parameter.stride())

    def prepare_update(self) -> str | None:
        """See to it that the fused kernel can take the gradients. Call it when they are there.

        Returns:
            Why it cannot, or None.
        """
        if self.implementation != "fused":
            return None
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

    def _disguise(self, optimizer: Optimizer, saved: dict[str, Any]) -> None:
        """Have a saved state say what its user set, with step counts where that wants them."""
        for group, before in zip(saved["param_groups"], self._users_flags(), strict=True):
            _put_back(group, before)
            if self._moves_steps(group):
                for key in group["params"]:
                    state = saved["state"].get(key)
                    if state is not None and isinstance(state.get("step"), Tensor):
                        # A checkpoint is read from the device anyway.
                        saved["state"][key] = {**state, "step": state["step"].cpu()}

    def _users_flags(self) -> list[dict[str, Any]]:
        """Return what the user has set in each group, those included that have come since."""
        more = len(self.optimizer.param_groups) - len(self._before)
        return [*self._before, *[self._defaults] * more]

    def _moves_steps(self, group: dict[str, Any]) -> bool:
        return self.implementation == "fused" and not group.get("capturable")

    def undo(self) -> None:
        """Leave the optimizer as it was found."""
        optimizer = self.optimizer
        for hook in self._hooks:
            hook.remove()
        for group, before in zip(optimizer.param_groups, self._users_flags(), strict=True):
            _put_back(group, before)
            if self._moves_steps(group):
                for parameter in group["params"]:
                    state = optimizer.state.get(parameter)
                    if state and isinstance(state.get("step"), Tensor):
                        state["step"] = state["step"].cpu()  # at the end of the run
        _put_back(optimizer.defaults, self._defaults)
        _put_back(vars(optimizer), self._attributes)


def _put_back(where: dict[str, Any], before: dict[str, Any]) -> None:
    for name, value in before.items():
        if value is _MISSING:
            where.pop(name, None)
        else:
            where[name] = value
