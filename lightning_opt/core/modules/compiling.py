"""Detects compiled and checkpointed modules, and measures the time of torch.compile."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from lightning_opt.core.modules.patching import forwards_of, replaced


def is_compiled(module: nn.Module) -> bool:
    """Return whether this module itself is compiled, not only modules inside it."""
    return (
        hooks_are_compiled(module)
        or any(forward.is_compiled for forward in forwards_of(module))
        or original_of(getattr(module, "forward", None)) is not None
    )


def has_compiled_parts(model: nn.Module) -> bool:
    """Return whether any module is compiled, or uses a compiled function."""
    return any(is_compiled(part) or _uses_compiled_function(part) for part in model.modules())


def _uses_compiled_function(module: nn.Module) -> bool:
    methods = [getattr(type(module), name, None) for name in ("forward", "training_step")]
    values = [*methods, *vars(module).values()]
    for method in methods:
        names = getattr(getattr(method, "__code__", None), "co_names", ())
        values += [method.__globals__.get(name) for name in names]  # type: ignore[union-attr]
    return any(original_of(value) is not None for value in values)


def original_of(function: Any) -> Any:
    """Return the function that ``torch.compile`` has compiled to this one; None for others."""
    return getattr(function, "__dict__", {}).get("_torchdynamo_orig_callable")


def is_checkpointed(module: nn.Module) -> bool:
    """Return whether activations of this module itself are recomputed in the backward pass."""
    return (
        any(forward.recomputes for forward in forwards_of(module))
        or getattr(module, "gradient_checkpointing", False) is True  # Transformers
        or type(module).__name__ == "CheckpointWrapper"  # torch's class, which is slow to import
    )


def has_checkpointed_parts(model: nn.Module) -> bool:
    return any(map(is_checkpointed, model.modules()))


STANCE = SimpleNamespace(eager=False)
"""Its attribute ``eager`` is True while `CompileModel` must run its modules uncompiled."""


@contextlib.contextmanager
def run_eagerly() -> Iterator[None]:
    """Run compiled modules uncompiled inside the context."""
    set_stance = getattr(torch.compiler, "set_stance", contextlib.nullcontext)  # since torch 2.6
    with replaced(STANCE, eager=True), set_stance("force_eager"):
        yield


def hooks_are_compiled(module: nn.Module) -> bool:
    """Return whether this module itself is compiled together with its hooks."""
    return (
        getattr(module, "_compiled_call_impl", None) is not None  # module.compile()
        or "_orig_mod" in module._modules  # torch.compile(module)
        or getattr(module, "_compiler_ctx", None) is not None  # set by Lightning
    )


class CompileClock:
    """Counts all compiled graphs of this process and their seconds of wall time.

    Subtract the difference of :attr:`seconds` from the time of a step to exclude compilation.
    """

    def __init__(self) -> None:
        self.compilations = 0
        self.seconds = 0.0
        self._since: float | None = None

    def start(self) -> None:
        """Start counting. Each start needs a stop."""
        _handler().register_start_callback(self._begin)
        _handler().register_end_callback(self._end)

    def stop(self) -> None:
        self._since = None
        with contextlib.suppress(ValueError):  # `torch._dynamo.reset` has removed it
            _handler().remove_start_callback(self._begin)
            _handler().remove_end_callback(self._end)

    def _begin(self, *args: Any) -> None:  # torch 2.5 passes nothing
        self.compilations += 1
        self._since = time.perf_counter()

    def _end(self, *args: Any) -> None:
        if self._since is not None:
            self.seconds += time.perf_counter() - self._since
            self._since = None


CLOCK = CompileClock()
"""The clock of this process."""


def _handler() -> Any:
    """Return torch's registry of callbacks. Importing it takes seconds."""
    from torch._dynamo.callback import callback_handler

    return callback_handler
