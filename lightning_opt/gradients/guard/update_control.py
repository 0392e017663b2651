"""Skips one update of an optimizer, or scales its learning rate, without side effects."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer

from lightning_opt.core.modules.patching import replaced
from lightning_opt.core.numerics.norms import parameters_of
from lightning_opt.core.numerics.scalars import Condition


def skips_on_device(optimizer: Optimizer) -> bool:
    """Return whether the optimizer skips a step by itself if ``optimizer.found_inf`` is 1.

    True for torch's fused kernels, but not for subclasses, which may override ``step``. SGD with
    momentum only counts after its first step: torch (2.13) allocates the momentum in the first step
    without a value, and a skipped first step leaves it so.
    """
    if type(optimizer) not in (Adam, AdamW, SGD, Adagrad):
        return False
    if not all(group.get("fused") for group in optimizer.param_groups):
        return False
    return type(optimizer) is not SGD or all(
        group["momentum"] == 0 or any(map(optimizer.state.get, group["params"]))
        for group in optimizer.param_groups
    )


class UpdateControl:
    """Skips one update of an optimizer, or scales its learning rate for one update.

    Both are applied right before the update, after all hooks of callbacks and modules, and undone
    right after it. Modules, loggers, schedulers and checkpoints see unchanged gradients and
    learning rates.

    A skipped update changes nothing. If the flag is a tensor, the optimizer's fused kernel returns
    early. If it is a ``bool``, the optimizer finds no gradients, and torch's optimizers then skip a
    parameter with its momentum, weight decay and step count.

    Args:
        optimizer: The optimizer itself, without Lightning's wrapper.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer: Any = optimizer
        self._depth = 0
        self._skip: Condition = False
        self._lr_scale = 1.0
        self._changes = ExitStack()
        self._hooks = [
            optimizer.register_step_pre_hook(self._before_update),
            optimizer.register_step_post_hook(self._after_update),
        ]

    def release(self) -> None:
        """Undo everything and remove the hooks."""
        self.reset()
        for hook in self._hooks:
            hook.remove()

    def prepare(self, skip: Condition, lr_scale: float) -> None:
        """Set what happens to the next update. Call it in ``on_before_optimizer_step``.

        Args:
            skip: Whether to skip it. A tensor only if :func:`skips_on_device`.
            lr_scale: Factor on the learning rate.
        """
        self._skip, self._lr_scale = skip, lr_scale

    def reset(self) -> None:
        """Undo what was applied, and cancel what was prepared."""
        self._changes.close()
        self._skip, self._lr_scale, self._depth = False, 1.0, 0

    def _before_update(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        # A subclass that calls `super().step()` may run the hooks of both classes.
        self._depth += 1
        if self._depth > 1:
            return None
        # Without a loss scaler Lightning runs forward, backward and all hooks in a closure within
        # the optimizer's `step`.
        closure = kwargs.get("closure")
        if closure is None:
            self._apply()
            return None

        def then_apply() -> Any:
            result = closure()
            self._apply()
            return result

        return args, {**kwargs, "closure": then_apply}

    def _after_update(self, *_: Any) -> None:
        self._depth -= 1
        if self._depth <= 0:
            self.reset()

    def _apply(self) -> None:
        optimizer = self._optimizer
        if isinstance(self._skip, Tensor):
            flag = self._skip.to(torch.float32)
            found = getattr(optimizer, "found_inf", None)
            if found is not None:  # set by a loss scaler, which removes it afterwards
                flag = torch.maximum(flag, found.to(flag.device))
            self._changes.enter_context(replaced(optimizer, found_inf=flag))
        elif self._skip:
            for group in optimizer.param_groups:
                # Some optimizers count steps in the group, even without gradients.
                self._changes.callback(group.update, dict(group))
            for parameter in parameters_of(optimizer):
                self._changes.callback(setattr, parameter, "grad", parameter.grad)
                parameter.grad = None
        if self._lr_scale != 1.0:
            for group in optimizer.param_groups:
                rate = group.get("lr")
                if rate is not None:
                    group["lr"] = scaled = rate * self._lr_scale
                    self._changes.callback(_restore_rate, group, rate, scaled)


def _restore_rate(group: dict[str, Any], rate: Any, scaled: Any) -> None:
    if group["lr"] is scaled:  # else the optimizer has set another one
        group["lr"] = rate
