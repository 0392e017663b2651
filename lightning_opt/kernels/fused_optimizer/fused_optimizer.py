"""Optimizers on torch's fused kernels.

Fused kernels read parameter, gradient and state as flat arrays. On CUDA they raise if the memory
orders differ. On a CPU (torch 2.13) they do not check the order and would update weights with wrong
gradients, so this module converts the order before each update.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer

from lightning_opt.core.modules.sharding import is_dtensor
from lightning_opt.core.output.report import Report, Verdict
from lightning_opt.kernels.layouts import is_dense, same_layout, with_strides
from lightning_opt.trainer.run_callback import RunCallback

if TYPE_CHECKING:
    import lightning.pytorch as pl

FUSABLE: tuple[type[Optimizer], ...] = (AdamW, Adam, SGD, Adagrad)
# The options of a parameter group that select the fused kernel.
FUSED_FLAGS = {"fused": True, "foreach": False}
# torch sets this attribute after checking a fused optimizer.
CHECKED_ATTRIBUTE = "_need_device_dtype_check_for_fused"


class FusedOptimizer(RunCallback):
    """Switches optimizers to torch's fused implementation during the run.

    A fused update makes one pass over parameter, gradient and state; the default update makes one
    pass for each operation. Adam, AdamW, SGD and Adagrad have a fused update, and so do subclasses
    that do not override ``step``. A trial update shows whether it supports the parameters' device
    and dtype. Other optimizers are not changed, and :meth:`report` contains the reason.

    Results are equal up to rounding.

    Checkpoints contain the user's flags and load without this callback. After loading, the
    optimizer is switched again. When training ends or fails, the optimizer is restored.

    With a loss scaler (fp16) gradients are unscaled before the update, as they are for optimizers
    that are not fused.

    Gradients and state are converted to the memory order of their parameter, which fused kernels
    require but do not check on a CPU (torch 2.13).

    Raises:
        ValueError: In ``setup`` for a second ``FusedOptimizer``.

    Example:
        >>> import lightning as L
        >>> import lightning_opt as lo
        >>> trainer = L.Trainer(callbacks=[lo.FusedOptimizer()], logger=False)

    Args:
        None.
    """

    only_one = True
    not_pickled = ("_fused",)

    def __init__(self) -> None:
        self._fused: dict[Optimizer, Fused] | None = None
        self._rows: list[dict[str, Any]] = []

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Switch the optimizers that have a fused kernel, before their state is loaded."""
        self.release(trainer)
        self._fused, self._rows = {}, []
        for index, optimizer in enumerate(trainer.optimizers):
            obstacle = obstacle_to_fused(optimizer)
            if obstacle is None:
                self._fused[optimizer] = Fused(optimizer)
            row = {
                "optimizer": index,
                "class": type(optimizer).__name__,
                "implementation": _implementation(optimizer),
                "reason": obstacle or "",
            }
            self._rows.append(row)

    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Optimizer
    ) -> None:
        """Convert the gradients' layout; if the kernel cannot use them, restore the optimizer."""
        switched = self._fused or {}
        obstacle = switched[optimizer].prepare_update() if optimizer in switched else None
        if obstacle is not None:
            switched.pop(optimizer).undo()
            row = self._rows[trainer.optimizers.index(optimizer)]
            row.update(implementation=_implementation(optimizer), reason=obstacle)
            rank_zero_warn(
                f"FusedOptimizer restored {row['class']}: fused kernels do not support "
                f"{obstacle}. Training continues without them."
            )

    def diagnose(self) -> list[Verdict]:
        """Return a verdict that names the implementation of each optimizer."""
        if not self._rows:
            return []
        finding = "; ".join(
            f"{row['class']} ran {row['implementation']}"
            + (f" ({row['reason']})" if row["reason"] else "")
            for row in self._rows
        )
        return [Verdict("optimizer", "ok", f"{finding}.")]

    def report(self) -> Report:
        """Return the implementation of each optimizer, and the reason if it is not fused."""
        return Report("FusedOptimizer", self._rows)

    def release(self, trainer: pl.Trainer) -> None:
        """Restore the optimizers."""
        for fused in (self._fused or {}).values():
            fused.undo()
        self._fused = None


def _implementation(optimizer: Optimizer) -> str:
    groups = optimizer.param_groups
    for name in ("fused", "foreach"):
        if all(group.get(name) for group in groups):
            return name
    return "default"


def obstacle_to_fused(optimizer: Optimizer) -> str | None:
    """Return the reason why ``optimizer`` cannot be fused, or None.

    Its parameters must be on their final device.
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
        # A parameter's first update is not dampened, and fused SGD assumes that all parameters of a
        # group have their first update together.
        return "momentum with dampening"
    parameters = [parameter for group in groups for parameter in group["params"]]
    if len({getattr(parameter, "device_mesh", None) for parameter in parameters}) > 1:
        return "parameters that are sharded in different ways"  # one kernel updates all of them
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
    if not _has_fused_kernel(base, device, dtype):  # type: ignore[arg-type]  # hashable
        return f"no fused {base.__name__} on {device} in {dtype}"
    return None


def _fused_base(cls: Any) -> type[Optimizer] | None:
    """Return torch's fusable class whose update ``cls`` inherits unchanged, or None."""
    for base in cls.__mro__:
        if base in FUSABLE:
            inherits = _step_of(cls) is _step_of(base) and cls._init_group is base._init_group
            return base if inherits else None
    return None


def _step_of(cls: Any) -> Any:
    """Return a class's ``step`` without the wrapper that torch sets when it is first used."""
    return cls.step.__wrapped__ if getattr(cls.step, "hooked", False) else cls.step


@functools.cache
def _has_fused_kernel(base: Callable[..., Optimizer], device: str, dtype: torch.dtype) -> bool:
    try:
        parameter = nn.Parameter(torch.zeros(1, device=device, dtype=dtype))
        parameter.grad = torch.ones_like(parameter)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            base([parameter], lr=0.5, fused=True).step()
        return bool(parameter.item() < 0)  # waits for the device, but the result is cached
    except (RuntimeError, TypeError, ValueError):  # the type depends on torch's version
        return False


class Fused:
    """Switches one optimizer to its fused kernel until :meth:`undo`.

    Its ``state_dict`` contains the user's flags. Loaded state is converted to the layout of
    the parameters.

    Args:
        optimizer: The optimizer itself, without Lightning's wrapper.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self._defaults = _flags_of(optimizer.defaults)
        self._was_checked = CHECKED_ATTRIBUTE in vars(optimizer)
        self._apply()
        self._hooks = [
            optimizer.register_state_dict_post_hook(
                lambda optimizer, saved: self._restore_flags(saved["param_groups"])
            ),
            optimizer.register_load_state_dict_post_hook(lambda optimizer: self._apply()),
        ]

    def _apply(self) -> None:
        self._user_flags = [_flags_of(group) for group in self.optimizer.param_groups]
        for settings in (self.optimizer.defaults, *self.optimizer.param_groups):
            settings.update(FUSED_FLAGS)
        # Step counts must be on the parameters' device, other state in their memory order.
        for parameter, state in self.optimizer.state.items():
            for name, value in state.items():
                if not isinstance(value, Tensor) or is_dtensor(value):
                    continue
                if name == "step":
                    state[name] = value.to(parameter.device, torch.float32)
                elif value.shape == parameter.shape and not same_layout(value, parameter):
                    state[name] = with_strides(value, parameter.stride())

    def prepare_update(self) -> str | None:
        """Convert the gradients' layout; return the reason if the kernel cannot use them."""
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
                    parameter.grad = with_strides(gradient, parameter.stride())
                if has_momentum:
                    state = self.optimizer.state[parameter]
                    if state.get("momentum_buffer") is None:
                        # Fused SGD fails if only some parameters of a group have a buffer, as when
                        # a layer gets its first gradient late. Zeros give the same result.
                        state["momentum_buffer"] = torch.zeros_like(
                            parameter, memory_format=torch.preserve_format
                        )
        return None

    def _restore_flags(self, groups: list[dict[str, Any]]) -> None:
        """Restore the user's flags; groups added later get the defaults."""
        for index, group in enumerate(groups):
            is_known = index < len(self._user_flags)
            group.update(self._user_flags[index] if is_known else self._defaults)

    def undo(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._restore_flags(self.optimizer.param_groups)
        self.optimizer.defaults.update(self._defaults)
        for group in self.optimizer.param_groups:
            if group.get("fused") or group.get("capturable"):
                continue
            # Other kernels read every step count, and would wait for the device.
            for parameter in group["params"]:
                state = self.optimizer.state.get(parameter, {})
                if isinstance(state.get("step"), Tensor):
                    state["step"] = state["step"].cpu()
        if not self._was_checked:
            vars(self.optimizer).pop(CHECKED_ATTRIBUTE, None)


def _flags_of(settings: dict[str, Any]) -> dict[str, Any]:
    return {flag: settings.get(flag) for flag in FUSED_FLAGS}
