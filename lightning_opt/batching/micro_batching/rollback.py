"""Protects earlier gradients and finished hooks from a retry; messages of final errors."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from lightning_opt.core.modules.patching import replaced
from lightning_opt.trainer.lightning import is_overridden

if TYPE_CHECKING:
    import lightning.pytorch as pl

REDUCTION_ERROR = (
    "Out of memory on this rank while gradients were being reduced, although a batch as large had "
    "passed before. The other ranks may be waiting in that reduction, so the batch is not retried: "
    "resume from the last checkpoint, with a smaller batch. The allocator's message: "
)

COLLECTIVE_ERROR = (
    "Out of memory on a rank in the middle of a batch. With sharded parameters the other ranks are "
    "in a collective with it, so the batch cannot be retried and the run ends on all ranks: "
    "resume from the last checkpoint, with MicroBatching(size=...) or a smaller batch. The "
    "allocator's message: "
)

GUARDED_HOOKS = ("on_before_zero_grad", "on_before_backward", "on_after_backward")
"""The hooks between ``training_step`` and the optimizer's update."""


class HeldGradients:
    """Gradients of an accumulation window's earlier batches, set aside while a batch runs.

    A failed attempt therefore cannot change them. They are added after the batch's last backward
    pass, and kept until the batch can no longer fail. This takes memory for a second set of
    gradients, except at the first batch of a window, which has no earlier gradients.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self._parameters = list(parameters)
        self._earlier = [(p, p.grad) for p in self._parameters if p.grad is not None]
        self._added = False
        if self._earlier:
            self.drop()

    def drop(self) -> None:
        self._added = False
        for parameter in self._parameters:
            parameter.grad = None

    @torch.no_grad()
    def add_up(self) -> None:
        """Add the earlier gradients to the batch's gradients."""
        self._added = True
        earlier_gradients, gradients = [], []
        for parameter, earlier in self._earlier:
            gradient = parameter.grad
            if gradient is None:
                parameter.grad = earlier
            elif earlier.is_sparse or gradient.is_sparse:
                parameter.grad = earlier + gradient
            else:
                earlier_gradients.append(earlier)
                gradients.append(gradient)
        if gradients:
            torch._foreach_add_(gradients, earlier_gradients)

    def end(self) -> None:
        if not self._added:
            for parameter, earlier in self._earlier:
                parameter.grad = earlier
        self._earlier = []


class HookGuard:
    """Runs each callback's hooks once per batch, however many attempts the batch takes.

    If a batch is rolled back within a hook, the next attempt calls this hook only for callbacks
    that have not finished it. The module's hooks run again, because their effects were undone.

    Attributes:
        muted: Names of hooks to skip, because another part of the batch runs them.
    """

    def __init__(self, trainer: pl.Trainer, module: pl.LightningModule, stack: ExitStack) -> None:
        self.muted: tuple[str, ...] = ()
        self._finished_hooks: set[tuple[int, str]] = set()
        for owner in (*trainer.callbacks, module):  # type: ignore[attr-defined]
            for name in GUARDED_HOOKS:
                if is_overridden(name, owner):
                    hook = getattr(owner, name)
                    guarded = self._guarded(hook, (id(owner), name), owner is not module)
                    stack.enter_context(replaced(owner, **{name: guarded}))

    def reset(self) -> None:
        self._finished_hooks.clear()

    def _guarded(
        self, hook: Callable[..., Any], key: tuple[int, str], once: bool
    ) -> Callable[..., None]:
        def guarded(*args: Any, **kwargs: Any) -> None:
            if key[1] not in self.muted and not (once and key in self._finished_hooks):
                hook(*args, **kwargs)
                self._finished_hooks.add(key)

        return guarded
