"""What Lightning tells no profiler: forward, loss, the wait for gradients, logging, validation."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lightning_opt.core.modules.batches import samples_in, tokens_in
from lightning_opt.core.modules.compiling import hooks_are_compiled
from lightning_opt.profiling.steps.step_clock import StepClock
from lightning_opt.profiling.steps.step_phases import (
    BACKWARD,
    COMMUNICATION,
    DATA,
    FORWARD,
    LOGGING,
    LOSS,
    RANKS,
    VALIDATION,
)

if TYPE_CHECKING:
    import lightning.pytorch as pl


class Watch:
    """Is on the model and the Trainer's parts during an epoch, and at no other time.

    An epoch is one of Lightning's actions, whose end comes also after an exception, which other
    ends do not. So nothing can stay behind.

    Args:
        clock: What to tell.
        trainer: The Trainer.
        tokens: How tokens are counted, if they are.

    Attributes:
        samples: In the batch that was moved to the device last.
        tokens: Likewise.
        separate: Whether the forward pass can be told from the rest of ``training_step``.
        seen: Whether a forward pass was seen since this was last set to False.
    """

    def __init__(self, clock: StepClock, trainer: pl.Trainer, tokens: int | str | None) -> None:
        self.clock, self._trainer, self._tokens = clock, trainer, tokens
        self._module = trainer.lightning_module
        # The LightningModule and the modules that it calls itself, but losses and metrics.
        modules = [self._module, *_children(self._module)]
        self.separate = not any(map(hooks_are_compiled, modules))
        self.seen = False
        self.samples = self.tokens = 0
        self._open: nn.Module | None = None
        with ExitStack() as stack:
            self._attach(stack, modules if self.separate else [])
            self.detach = stack.pop_all().close
            """Leave everything as it was."""

    def _attach(self, stack: ExitStack, modules: list[nn.Module]) -> None:
        trainer, timed = self._trainer, self._timed
        loop = trainer.fit_loop.epoch_loop
        replace(stack, loop, "on_run_start", timed(DATA))  # starts the workers of the loader
        replace(stack, loop.val_loop, "run", timed(VALIDATION))
        for logger in trainer.loggers:
            replace(stack, logger, "log_metrics", timed(LOGGING))
        if trainer.world_size > 1:
            replace(stack, loop, "_broadcast_sigterm_tensor", timed(RANKS))
        replace(stack, trainer.strategy, "batch_to_device", self._look_at_batch)
        replace(stack, trainer.precision_plugin, "backward", self._backward)
        enter, leave = _Hook(self._enter_forward), _Hook(self._leave_forward)
        for module in modules:
            stack.callback(module.register_forward_pre_hook(enter).remove)
            stack.callback(module.register_forward_hook(leave).remove)

    def _timed(self, phase: int) -> Callable[..., Any]:
        clock, key = self.clock, object()

        def around(inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            clock.enter(phase, key)
            try:
                return inner(*args, **kwargs)
            finally:
                clock.leave(key)

        return around

    def _look_at_batch(
        self, inner: Callable[..., Any], batch: Any, *args: Any, **kwargs: Any
    ) -> Any:
        if self._trainer.training:
            self.samples = samples_in(batch)
            if self._tokens is not None:
                self.tokens = tokens_in(batch, self._tokens, "StepProfiler")
        return inner(batch, *args, **kwargs)

    # --- forward and loss -----------------------------------------------------------------------

    def begin_step(self) -> None:
        """A ``training_step`` begins."""
        self._open = None

    def _enter_forward(self, module: nn.Module, *_: Any) -> None:
        if self.clock.phase == LOSS:
            if module is self._module and _is_redirected(module):
                return  # DDP and others call `training_step` by way of `forward`
            self._open = module
            self.clock.enter(FORWARD, self)
            self.seen = True

    def _leave_forward(self, module: nn.Module, *_: Any) -> None:
        if module is self._open:
            self._open = None
            self.clock.leave(self)

    # --- backward and the wait for gradients ----------------------------------------------------

    def _backward(
        self, inner: Callable[..., Any], loss: Any, model: Any, optimizer: Any, *args: Any,
        **kwargs: Any,
    ) -> Any:  # fmt: skip
        self.clock.enter(BACKWARD, Watch)
        handle = None
        try:
            if self._reduces() and isinstance(loss, Tensor) and loss.requires_grad:
                handle = loss.register_hook(self._begin_backward)
            return inner(loss, model, optimizer, *args, **kwargs)
        finally:
            if handle is not None:
                handle.remove()
            self.clock.leave(Watch)

    def _reduces(self) -> bool:
        if self._trainer.world_size == 1:
            return False
        return bool(getattr(self._trainer.strategy.model, "require_backward_grad_sync", True))

    def _begin_backward(self, gradient: Tensor) -> None:
        # Callbacks of the engine run when all gradients are computed, in the order in which they
        # were queued. DDP and FSDP queue theirs, in which they wait for communication, later in
        # the same backward pass.
        torch.autograd.Variable._execution_engine.queue_callback(self._computed)

    def _computed(self) -> None:
        self.clock.enter(COMMUNICATION, self)


def replace(stack: ExitStack, owner: Any, name: str, around: Callable[..., Any]) -> None:
    """Put something around a method of one object, until the stack is closed.

    Args:
        stack: What puts the method back.
        owner: The object.
        name: Of its method; nothing happens if it has none.
        around: Takes the method and its arguments, and returns what it returns.
    """
    inner = getattr(owner, name, None)
    if inner is None:
        return  # another version of Lightning
    attributes, ours = vars(owner), functools.wraps(inner)(functools.partial(around, inner))
    before = attributes.get(name)

    def put_back() -> None:
        if attributes.get(name) is not ours:
            return  # somebody else's by now, who will put back what was theirs
        del attributes[name]
        if before is not None:
            attributes[name] = before

    attributes[name] = ours
    stack.callback(put_back)


class _Hook:
    """A hook on a module that does nothing on copies of the module."""

    def __init__(self, function: Callable[..., None]) -> None:
        self._function = function

    def __call__(self, *args: Any) -> None:
        self._function(*args)

    def __reduce__(self) -> Any:  # for copies too
        return _Hook, (_do_nothing,)


def _do_nothing(*args: Any) -> None:
    pass


def _children(module: nn.Module) -> Iterator[nn.Module]:
    for name, child in module.named_children():
        if type(child).forward is nn.Module.forward:  # a list or a dict of modules
            yield from _children(child)
        elif not _is_loss_or_metric(name, child):
            yield child


def _is_loss_or_metric(name: str, module: nn.Module) -> bool:
    if isinstance(module, nn.modules.loss._Loss):
        return True
    if any(base.__module__.startswith("torchmetrics") for base in type(module).__mro__):
        return True
    words = f"{name} {type(module).__name__}".lower()
    return "loss" in words or "criterion" in words


def _is_redirected(module: nn.Module) -> bool:
    name = getattr(module.forward, "__qualname__", "")
    return name.startswith("_ForwardRedirection.")
