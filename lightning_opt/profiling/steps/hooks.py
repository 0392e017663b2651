"""Hooks for phases that Lightning does not report to profilers, such as forward and logging."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lightning_opt.core.modules.batches import samples_in, tokens_in
from lightning_opt.core.modules.compiling import hooks_are_compiled
from lightning_opt.core.modules.patching import replaced
from lightning_opt.profiling.steps import step_phases as phases
from lightning_opt.profiling.steps.phase_clock import PhaseClock

if TYPE_CHECKING:
    import lightning.pytorch as pl


class EpochHooks:
    """Hooks on the model and the Trainer's parts during one epoch.

    The hooks are always removed. The end of an epoch is the only end that Lightning reports to
    profilers even after an exception.

    Args:
        clock: The clock to control.
        trainer: The Trainer.
        tokens: Tokens per sample, or the batch's key of the token tensor. None: do not count.

    Attributes:
        samples: Number of samples in the last training batch that was moved to the device.
        tokens: Number of tokens in that batch.
        separates_forward: Whether the forward pass can be separated from the rest of
            ``training_step``.
        saw_forward: Each forward pass sets this to True.
    """

    def __init__(self, clock: PhaseClock, trainer: pl.Trainer, tokens: int | str | None) -> None:
        self.clock, self._trainer, self._tokens = clock, trainer, tokens
        self._module = trainer.lightning_module
        # The LightningModule and its direct child modules, except losses and metrics.
        modules = [self._module, *_children(self._module)]
        self.separates_forward = not any(map(hooks_are_compiled, modules))
        self.saw_forward = False
        self.samples = self.tokens = 0
        self._open: nn.Module | None = None
        with ExitStack() as stack:
            self._attach(stack, modules if self.separates_forward else [])
            self.remove = stack.pop_all().close
            """Remove all hooks."""

    def _attach(self, stack: ExitStack, modules: list[nn.Module]) -> None:
        trainer = self._trainer
        loop = trainer.fit_loop.epoch_loop

        def wrap(owner: Any, name: str, around: Callable[..., Any]) -> None:
            inner = getattr(owner, name, None)
            if inner is not None:  # not all versions of Lightning have it
                wrapped = functools.wraps(inner)(functools.partial(around, inner))
                stack.enter_context(replaced(owner, **{name: wrapped}))

        wrap(loop, "on_run_start", self._timed(phases.DATA))  # starts the workers of the loader
        wrap(loop.val_loop, "run", self._timed(phases.VALIDATION))
        for logger in trainer.loggers:
            wrap(logger, "log_metrics", self._timed(phases.LOGGING))
        if trainer.world_size > 1:
            wrap(loop, "_broadcast_sigterm_tensor", self._timed(phases.RANKS))
        wrap(trainer.strategy, "batch_to_device", self._batch_to_device)
        wrap(trainer.precision_plugin, "backward", self._backward)
        enter, leave = _Hook(self._enter_forward), _Hook(self._leave_forward)
        for module in modules:
            stack.callback(module.register_forward_pre_hook(enter).remove)
            stack.callback(module.register_forward_hook(leave).remove)

    def _timed(self, phase: int) -> Callable[..., Any]:
        def around(inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            with self.clock.within(phase):
                return inner(*args, **kwargs)

        return around

    def _batch_to_device(
        self, inner: Callable[..., Any], batch: Any, *args: Any, **kwargs: Any
    ) -> Any:
        if self._trainer.training:
            self.samples = samples_in(batch, default=1)
            if self._tokens is not None:
                self.tokens = tokens_in(batch, self._tokens, "StepProfiler")
        return inner(batch, *args, **kwargs)

    # --- forward and loss -----------------------------------------------------------------------

    def start_training_step(self) -> None:
        self._open = None

    def _enter_forward(self, module: nn.Module, *_: Any) -> None:
        if self.clock.phase == phases.LOSS:
            if module is self._module and _calls_training_step(module):
                return
            self._open = module
            self.clock.enter(phases.FORWARD, self)
            self.saw_forward = True

    def _leave_forward(self, module: nn.Module, *_: Any) -> None:
        if module is self._open:
            self._open = None
            self.clock.leave(self)

    # --- backward and the wait for gradients ----------------------------------------------------

    def _backward(
        self, inner: Callable[..., Any], loss: Any, model: Any, optimizer: Any, *args: Any,
        **kwargs: Any,
    ) -> Any:  # fmt: skip
        with self.clock.within(phases.BACKWARD), ExitStack() as stack:
            if self._reduces_gradients() and isinstance(loss, Tensor) and loss.requires_grad:
                stack.callback(loss.register_hook(self._queue_communication).remove)
            return inner(loss, model, optimizer, *args, **kwargs)

    def _reduces_gradients(self) -> bool:
        if self._trainer.world_size == 1:
            return False
        return bool(getattr(self._trainer.strategy.model, "require_backward_grad_sync", True))

    def _queue_communication(self, gradient: Tensor) -> None:
        # Autograd runs queued callbacks in order, after all gradients are computed. DDP and FSDP
        # queue theirs later. Those wait for communication, so this one starts the phase.
        torch.autograd.Variable._execution_engine.queue_callback(self._enter_communication)

    def _enter_communication(self) -> None:
        self.clock.enter(phases.COMMUNICATION, self)


class _Hook:
    """A module hook whose copies do nothing."""

    def __init__(self, function: Callable[..., None]) -> None:
        self._function = function

    def __call__(self, *args: Any) -> None:
        self._function(*args)

    def __reduce__(self) -> Any:  # for copy.deepcopy too
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


def _calls_training_step(module: nn.Module) -> bool:
    """Return whether ``forward`` is redirected to ``training_step``, as DDP and others do."""
    name = getattr(module.forward, "__qualname__", "")
    return name.startswith("_ForwardRedirection.")
