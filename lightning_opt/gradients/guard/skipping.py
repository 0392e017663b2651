"""Leaving out one update of an optimizer, or scaling it, so that nothing of it remains."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer

from lightning_opt.core.norms import parameters_of
from lightning_opt.core.scalars import Condition

_MISSING = object()


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

    Both happen as late as possible, and are undone right after the update, so that learning-rate
    schedulers, loggers and checkpoints see the optimizer as its user set it.

    A withheld update changes nothing: with a flag on a device the optimizer's own kernel returns
    early; with a ``bool`` the optimizer finds no gradients, which makes every optimizer of torch
    pass over the parameter, its momentum, weight decay and step count included.

    Args:
        optimizer: The optimizer itself, without Lightning's wrapper.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._depth = 0
        self._skip: Condition = False
        self._lr_scale = 1.0
        self._scaled: list[tuple[dict[str, Any], Any, Any]] = []
        self._groups: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self._found_inf: Any = None
        self._hooks = [
            optimizer.register_step_pre_hook(self._before_update),
            optimizer.register_step_post_hook(self._after_update),
        ]

    def release(self) -> None:
        """Undo everything and remove the hooks."""
        self.forget()
        for hook in self._hooks:
            hook.remove()

    def forget(self) -> None:
        """Undo what was applied, and forget what was to be."""
        self._put_back()
        self._skip, self._lr_scale, self._depth = False, 1.0, 0

    def hold(self, skip: Condition, lr_scale: float, *, scaler_looks: bool) -> None:
        """Prepare the coming update. Call it in ``on_before_optimizer_step``.

        Args:
            skip: Whether to leave it out. A tensor only where :func:`skips_on_device`.
            lr_scale: What to multiply the learning rate with.
            scaler_looks: Whether a loss scaler is still going to look for overflows in the
                gradients, and fails if there are none.
        """
        self._put_back()
        self._skip, self._lr_scale = skip, lr_scale
        if skip is True and not scaler_looks:
            self._drop_gradients()  # now, so that no callback after this one sees them
        # Without a loss scaler Lightning runs forward, backward and this hook within the
        # optimizer's `step`, so that `_before_update` has gone by; with one, before it.
        if self._depth:
            self._apply()

    def _before_update(self, *_: Any) -> None:
        # A subclass that calls `super().step()` may run the hooks of both.
        self._depth += 1
        if self._depth == 1:
            self._apply()

    def _after_update(self, *_: Any) -> None:
        self._depth -= 1
        if self._depth <= 0:
            self.forget()

    def _apply(self) -> None:
        if isinstance(self._skip, Tensor):
            found = getattr(self._optimizer, "found_inf", None)
            flag = self._skip.to(torch.float32)
            self._found_inf = _MISSING if found is None else found
            # A loss scaler has put its own flag there, and takes it away afterwards.
            self._optimizer.found_inf = (  # type: ignore[attr-defined]
                flag if found is None else torch.maximum(flag, found.to(flag.device))
            )
        elif self._skip:
            self._drop_gradients()
            self._groups = [(group, dict(group)) for group in self._optimizer.param_groups]
        if self._lr_scale != 1.0:
            for group in self._optimizer.param_groups:
                rate = group.get("lr")
                if rate is not None:
                    group["lr"] = scaled = rate * self._lr_scale
                    self._scaled.append((group, rate, scaled))

    def _put_back(self) -> None:
        for group, rate, scaled in self._scaled:
            if group["lr"] is scaled:  # else the user has set another one in the meantime
                group["lr"] = rate
        self._scaled = []
        for group, values in self._groups:
            # Some optimizers count steps in the group, whether there are gradients or not.
            group.update(values)
        self._groups = []
        if self._found_inf is _MISSING:
            self._optimizer.__dict__.pop("found_inf", None)
        elif self._found_inf is not None:
            self._optimizer.found_inf = self._found_inf  # type: ignore[attr-defined]
        self._found_inf = None

    def _drop_gradients(self) -> None:
        for parameter in parameters_of(self._optimizer):
            parameter.grad = None
