"""Skips one update of an optimizer, or scales its learning rate, without side effects."""

from __future__ import annotations

from contextlib import ExitStack
from functools import wraps
from types import MethodType
from typing import Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks

from lightning_opt.core.modules.patching import replaced
from lightning_opt.core.numerics.norms import parameters_of
from lightning_opt.core.numerics.scalars import Condition


def skips_on_device(optimizer: Optimizer) -> bool:
    """Return whether the optimizer skips a step by itself if ``optimizer.found_inf`` is 1.

    True for torch's fused kernels. False for subclasses, which may override ``step``, and for SGD
    with momentum before its first step: torch (2.13) allocates the momentum uninitialised, and a
    skipped first step would never set it.
    """
    if type(optimizer) not in (Adam, AdamW, SGD, Adagrad):
        return False
    if not all(group.get("fused") for group in optimizer.param_groups):
        return False
    return type(optimizer) is not SGD or all(
        group["momentum"] == 0 or any(map(optimizer.state.get, group["params"]))
        for group in optimizer.param_groups
    )


class _SkippedUpdate(Exception):  # noqa: N818 - not an error
    """Raised in the closure to end ``Optimizer.step`` before it updates the weights."""


class UpdateControl:
    """Skips one update of an optimizer, or scales its learning rate for one update.

    Changes are applied right before the update, after all hooks of callbacks and modules. They are
    undone right after it. Modules, loggers, schedulers and checkpoints see unchanged gradients and
    learning rates.

    If ``skip`` is a tensor, the optimizer's fused kernel skips the update. If it is True, the
    optimizer's ``step`` ends after its closure has evaluated the loss.

    Args:
        optimizer: The optimizer itself, without Lightning's wrapper.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer: Any = optimizer
        self._skip: Condition = False
        self._lr_scale = 1.0
        self._changes, self._patch = ExitStack(), ExitStack()
        original: Any = optimizer.step

        # A method with the same signature: schedulers and loss scalers inspect it.
        @wraps(getattr(original, "__func__", original))
        def step(_: Optimizer, *args: Any, **kwargs: Any) -> Any:
            return self._step(original, *args, **kwargs)

        self._patch.enter_context(replaced(optimizer, step=MethodType(step, optimizer)))

    def release(self) -> None:
        """Undo all changes to the optimizer, and restore its ``step``."""
        self.reset()
        self._patch.close()

    def prepare(self, skip: Condition, lr_scale: float) -> None:
        """Set how the next update is changed. Call it in ``on_before_optimizer_step``.

        Args:
            skip: Whether to skip the update. A tensor requires :func:`skips_on_device`.
            lr_scale: Factor on the learning rate.
        """
        self._skip, self._lr_scale = skip, lr_scale

    def reset(self) -> None:
        """Undo the applied changes, and cancel the prepared ones."""
        self._changes.close()
        self._skip, self._lr_scale = False, 1.0

    def _step(self, original: Any, closure: Any = None, **kwargs: Any) -> Any:
        versions, has_moved, result = self._versions(), False, None

        # Without a loss scaler Lightning runs the forward pass, the backward pass and all hooks in
        # the closure.
        def evaluate() -> Any:
            nonlocal has_moved, result
            has_moved = self._versions() != versions
            result = closure()
            if self._skip is True:
                raise _SkippedUpdate
            self._apply()
            return result

        try:
            if closure is not None:
                return original(closure=evaluate, **kwargs)
            if self._skip is True:
                return None
            self._apply()
            return original(**kwargs)
        except _SkippedUpdate:
            if has_moved:
                rank_zero_warn(
                    f"NonFiniteGuard skips a step of {type(self._optimizer).__name__}, which had "
                    "changed the weights before it evaluated the loss, or between two "
                    "evaluations. This change is not undone."
                )
            self._run_post_hooks({**kwargs, "closure": closure})
            return result
        finally:
            self.reset()

    def _versions(self) -> int:
        """Return a number that grows with each in-place change of a weight.

        It is 0 for torch's own optimizers, which are not checked.
        """
        if type(self._optimizer).__module__.startswith("torch.optim"):
            return 0
        return sum(parameter._version for parameter in parameters_of(self._optimizer))

    def _run_post_hooks(self, kwargs: dict[str, Any]) -> None:
        """Run the optimizer's post hooks without gradients, because its pre hooks have run."""
        for parameter in parameters_of(self._optimizer):
            self._changes.callback(setattr, parameter, "grad", parameter.grad)
            parameter.grad = None
        own = self._optimizer._optimizer_step_post_hooks
        for hook in [*own.values(), *_global_optimizer_post_hooks.values()]:
            hook(self._optimizer, (), kwargs)

    def _apply(self) -> None:
        optimizer = self._optimizer
        self._changes.close()  # changes of an earlier evaluation of the loss
        if isinstance(self._skip, Tensor):
            flag = self._skip.to(torch.float32)
            found = getattr(optimizer, "found_inf", None)
            if found is not None:  # set by a loss scaler, which removes it afterwards
                flag = torch.maximum(flag, found.to(flag.device))
            self._changes.enter_context(replaced(optimizer, found_inf=flag))
        if self._lr_scale != 1.0:
            for group in optimizer.param_groups:
                rate = group.get("lr")
                if rate is not None:
                    group["lr"] = scaled = rate * self._lr_scale
                    self._changes.callback(_restore_rate, group, rate, scaled)


def _restore_rate(group: dict[str, Any], rate: Any, scaled: Any) -> None:
    if group["lr"] is scaled:  # otherwise the optimizer has set another rate
        group["lr"] = rate
