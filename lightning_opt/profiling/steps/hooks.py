"""What Lightning tells no profiler: forward, loss, the wait for gradients, logging, validation."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lightning_opt.core.compiling import hooks_are_compiled
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

    Attributes:
        separate: Whether the forward pass can be told from the rest of ``training_step``.
        seen: Whether a forward pass was seen since this was last set to False.
    """

    def __init__(self, clock: StepClock, trainer: pl.Trainer) -> None:
        self.clock, self._trainer = clock, trainer
        self._module = trainer.lightning_module
        modules = list(_called_modules(self._module))
        self.separate = not any(map(hooks_are_compiled, modules))
        self.seen = False
        self._open: nn.Module | None = None
        self._replaced: list[tuple[dict[str, Any], str, Any, Any]] = []
        self._handles: list[Any] = []
        try:
            self._attach(modules if self.separate else [])
        except BaseException:
            self.detach()
            raise

    def _attach(self, modules: list[nn.Module]) -> None:
        trainer = self._trainer
        loop, connector = trainer.fit_loop.epoch_loop, trainer._logger_connector
        self._time(loop, "on_run_start", DATA)  # starts the workers of the loader
        self._time(loop.val_loop, "run", VALIDATION)
        self._time(connector, "update_train_step_metrics", LOGGING)
        self._time(self._module, "log", LOGGING)
        if trainer.world_size > 1:
            self._time(loop, "_broadcast_sigterm_tensor", RANKS)
        self._replace(trainer.precision_plugin, "backward", self._backward)
        enter, leave = _Hook(self._enter_forward), _Hook(self._leave_forward)
        for module in modules:
            self._handles.append(module.register_forward_pre_hook(enter))
            self._handles.append(module.register_forward_hook(leave))

    def detach(self) -> None:
        """Leave everything as it was."""
        for handle in self._handles:
            handle.remove()
        for attributes, name, ours, before in reversed(self._replaced):
            if attributes.get(name) is not ours:
                continue  # somebody else's by now, who will put back what was theirs
            del attributes[name]
            if before is not None:
                attributes[name] = before
        self._handles, self._replaced = [], []

    def _replace(self, owner: Any, name: str, replacement: Callable[..., Any]) -> None:
        if not callable(getattr(owner, name, None)):
            return  # another version of Lightning
        ours = _Replacement(owner, name, replacement)
        attributes = vars(owner)
        self._replaced.append((attributes, name, ours, attributes.get(name)))
        attributes[name] = ours

    def _time(self, owner: Any, name: str, phase: int) -> None:
        clock, key = self.clock, object()

        def timed(inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            clock.enter(phase, key)
            try:
                return inner(*args, **kwargs)
            finally:
                clock.leave(key)

        self._replace(owner, name, timed)

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


class _Hook:
    """A hook on a module that is left out where the module is copied or pickled."""

    def __init__(self, function: Callable[..., None]) -> None:
        self._function = function

    def __call__(self, *args: Any) -> None:
        self._function(*args)

    def __reduce__(self) -> Any:  # for copies too
        return _no_hook, ()


class _Replacement:
    """Stands in for a method of one object; a copy of that object has the method itself."""

    def __init__(self, owner: Any, name: str, function: Callable[..., Any]) -> None:
        self._owner, self._name, self._function = owner, name, function
        self._inner = getattr(owner, name)
        functools.update_wrapper(self, self._inner)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(self._inner, *args, **kwargs)

    def __reduce__(self) -> Any:
        return _method_of, (self._owner, self._name)


def _no_hook() -> Callable[..., None]:
    return _do_nothing


def _do_nothing(*args: Any) -> None:
    pass


def _method_of(owner: Any, name: str) -> Any:
    return getattr(type(owner), name).__get__(owner)


def _called_modules(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the LightningModule and the modules that it calls itself, but losses and metrics."""
    yield module
    yield from _children(module)


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
