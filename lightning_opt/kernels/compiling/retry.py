"""Taking back a training step whose compiled backward pass has failed, and doing it uncompiled.

A failure in a forward pass is dealt with where it happens. One in a backward pass has a training
step around it that has logged, counted and called hooks.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lightning_opt.core.exhaustion import is_out_of_memory
from lightning_opt.core.preserve import Before, CannotUndoError, replaced
from lightning_opt.kernels.compiling.errors import passed_compiled_backward
from lightning_opt.kernels.compiling.regions import Shared

if TYPE_CHECKING:
    import lightning.pytorch as pl


HOOKS = ("on_before_zero_grad", "on_before_backward")
"""What callbacks and the module are told within a closure before a backward pass can fail."""


class Retry:
    """Makes closures of automatic optimisation that survive a failing backward pass.

    Meant for single steps in a single process: it copies gradients and logged values.

    Args:
        trainer: The Trainer.
        module: Its module.
        shared: What pauses compilation.
        failed: Called with the error once the step has been done without compilation.
    """

    def __init__(
        self,
        trainer: pl.Trainer,
        module: pl.LightningModule,
        shared: Shared,
        failed: Callable[[BaseException], None],
    ) -> None:
        self._trainer, self._module, self._shared, self._failed = trainer, module, shared, failed
        self._optimization: Any = trainer.fit_loop.epoch_loop.automatic_optimization
        self._before = Before(module, shared.device)
        # Whoever makes closures now (Lightning, or a callback in its place) goes on doing so.
        self._make = self._optimization._make_closure
        self._own = vars(self._optimization).get("_make_closure")
        self._replacement: Any = self._make_retried
        vars(self._optimization)["_make_closure"] = self._replacement

    def remove(self) -> None:
        """Give the closures back, unless another has done so."""
        attributes = vars(self._optimization)
        if attributes.get("_make_closure") is self._replacement:
            del attributes["_make_closure"]
            if self._own is not None:
                attributes["_make_closure"] = self._own

    def _make_retried(self, *arguments: Any) -> Any:
        closure: Any = self._make(*arguments)
        attempt = closure.closure

        @torch.enable_grad()
        def retried(*args: Any, **kwargs: Any) -> Any:
            undo, told = self._remember(), Counter[tuple[int, str]]()
            try:
                with self._hooks(told, 1):
                    return attempt(*args, **kwargs)
            except Exception as error:
                if is_out_of_memory(error) or not passed_compiled_backward(error):
                    raise
                problem = error
            try:
                undo()
                result = self._again(arguments, told)
                self._failed(problem)
                return result
            except CannotUndoError:
                raise problem from None
            finally:
                del problem  # its traceback holds this frame

        closure.closure = retried
        return closure

    def _again(self, arguments: Any, told: Counter[tuple[int, str]]) -> Any:
        """Do the step again, without those calls of hooks that the failed one has made."""
        with self._shared.pause(), self._hooks(told, -1):
            return self._make(*arguments).closure()

    @contextmanager
    def _hooks(self, told: Counter[tuple[int, str]], change: int) -> Iterator[None]:
        """Count calls of hooks (1), or leave out as many as were counted (-1)."""

        def guarded(owner: Any, name: str) -> Callable[..., Any]:
            hook, key = getattr(owner, name), (id(owner), name)

            def call(*args: Any, **kwargs: Any) -> Any:
                if change < 0 and not told[key]:
                    return hook(*args, **kwargs)
                told[key] += change
                return hook(*args, **kwargs) if change > 0 else None

            return call

        with ExitStack() as stack:
            for owner in (self._module, *self._trainer.callbacks):  # type: ignore[attr-defined]
                hooks = {name: guarded(owner, name) for name in HOOKS}
                stack.enter_context(replaced(owner, **hooks))
            yield

    def _remember(self) -> Callable[[], None]:
        trainer, module, before = self._trainer, self._module, self._before
        before.take()
        gradients = [
            (parameter, parameter.grad, None if parameter.grad is None else parameter.grad.clone())
            for parameter in module.parameters()
        ]
        progress = copy.deepcopy(self._optimization.optim_progress.state_dict())
        hook = module._current_fx_name
        results = trainer._results
        logged = [(key, value, _attributes(value)) for key, value in (results or {}).items()]

        def undo() -> None:
            before.restore()
            for parameter, gradient, values in gradients:
                if gradient is not None and values is not None:
                    gradient.data.copy_(values)
                parameter.grad = gradient
            self._optimization.optim_progress.load_state_dict(progress)
            module._current_fx_name = hook
            if results is not None:
                results.clear()
                for key, value, attributes in logged:
                    vars(value).update(attributes)
                    results[key] = value

        return undo


def _attributes(logged: Any) -> dict[str, Any]:
    """Return what Lightning keeps of a logged value, with tensors of its own."""
    return {
        name: value.clone() if isinstance(value, Tensor) else value
        for name, value in vars(logged).items()
    }
