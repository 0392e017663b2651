"""Leaving out one update of an optimizer, or scaling it, so that nothing of it remains."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer

from lightning_opt.core.numerics.norms import parameters_of
from lightning_opt.core.numerics.scalars import Condition


def skips_on_device(optimizer: Optimizer) -> bool:
    """Return whether the optimizer leaves a step out by itself if ``optimizer.found_inf`` is 1.

    Those are torch's fused kernels. A subclass may override ``step``, so it does not count. SGD's
    momentum does not count before it exists: torch (2.13) allocates it in the first step without a
    value, and a first step that is skipped leaves it so.
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
    """Withholds one update of an optimizer, or scales its learning rate for one update.

    Both happen after everybody's hooks, right before the update, and are undone right after it, so
    that modules, loggers, schedulers and checkpoints see gradients and optimizer as they were.

    A withheld update changes nothing: with a flag on a device the optimizer's own kernel returns
    early; with a ``bool`` the optimizer finds no gradients, which makes every optimizer of torch
    pass over the parameter, its momentum, weight decay and step count included.

    Args:
        optimizer: The optimizer itself, without Lightning's wrapper.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer: Any = optimizer
        self._depth = 0
        self._skip: Condition = False
        self._lr_scale = 1.0
        self._undo: list[Callable[[], None]] = []
        self._hooks = [
            optimizer.register_step_pre_hook(self._before_update),
            optimizer.register_step_post_hook(self._after_update),
        ]

    def release(self) -> None:
        """Undo everything and remove the hooks."""
        self.forget()
        for hook in self._hooks:
            hook.remove()

    def hold(self, skip: Condition, lr_scale: float) -> None:
        """Prepare the coming update. Call it in ``on_before_optimizer_step``.

        Args:
            skip: Whether to leave it out. A tensor only where :func:`skips_on_device`.
            lr_scale: What to multiply the learning rate with.
        """
        self._skip, self._lr_scale = skip, lr_scale

    def _before_update(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        # A subclass that calls `super().step()` may run the hooks of both.
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
            self.forget()

    def _apply(self) -> None:
        optimizer = self._optimizer
        if isinstance(self._skip, Tensor):
            found = getattr(optimizer, "found_inf", None)
            flag = self._skip.to(torch.float32)
            if found is None:
                self._undo.append(partial(delattr, optimizer, "found_inf"))
            else:
                # A loss scaler has put its own flag there, and takes it away afterwards.
                self._undo.append(partial(setattr, optimizer, "found_inf", found))
                flag = torch.maximum(flag, found.to(flag.device))
            optimizer.found_inf = flag
        elif self._skip:
            # Some optimizers count steps in the group, whether there are gradients or not.
            self._undo += [partial(group.update, dict(group)) for group in optimizer.param_groups]
            for parameter in parameters_of(optimizer):
                self._undo.append(partial(setattr, parameter, "grad", parameter.grad))
                parameter.grad = None
        if self._lr_scale != 1.0:
            for group in optimizer.param_groups:
                rate = group.get("lr")
                if rate is not None:
                    group["lr"] = scaled = rate * self._lr_scale
                    self._undo.append(partial(_put_back_rate, group, rate, scaled))

    def forget(self) -> None:
        """Undo what was applied, and forget what was to be."""
        for undo in self._undo:
            undo()
        self._undo = []
        self._skip, self._lr_scale, self._depth = False, 1.0, 0


def _put_back_rate(group: dict[str, Any], rate: Any, scaled: Any) -> None:
    if group["lr"] is scaled:  # else the optimizer has set another one
        group["lr"] = rate
