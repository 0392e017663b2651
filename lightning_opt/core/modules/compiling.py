"""What torch.compile does in this process: which modules it runs, when it compiles, how long."""

from __future__ import annotations

import contextlib
import time
from typing import Any

import torch
from torch import nn

from lightning_opt.core.modules.patching import forwards_of


def is_compiled(module: nn.Module) -> bool:
    """Return whether torch.compile runs this very module, in whichever way it was asked to."""
    return hooks_are_compiled(module) or _compiles_forward(module)


def has_compiled_parts(model: nn.Module) -> bool:
    """Return whether torch.compile runs ``model`` or any module inside of it."""
    return any(map(is_compiled, model.modules()))


def is_checkpointed(module: nn.Module) -> bool:
    """Return whether activations of this very module are recomputed in the backward pass."""
    return (
        any(forward.recomputes for forward in forwards_of(module))
        or getattr(module, "gradient_checkpointing", False) is True  # Transformers
        or type(module).__name__ == "CheckpointWrapper"  # torch's, whose module is slow to import
    )


def has_checkpointed_parts(model: nn.Module) -> bool:
    """Return whether ``model`` or any module inside of it is checkpointed."""
    return any(map(is_checkpointed, model.modules()))


def run_eagerly() -> Any:
    """Return the context in which compiled modules run as they are written."""
    set_stance = getattr(torch.compiler, "set_stance", None)  # since torch 2.6
    return set_stance("force_eager") if set_stance is not None else contextlib.nullcontext()


def hooks_are_compiled(module: nn.Module) -> bool:
    """Return whether torch.compile runs this very module together with its hooks."""
    return (
        getattr(module, "_compiled_call_impl", None) is not None  # module.compile()
        or "_orig_mod" in module._modules  # torch.compile(module)
        or getattr(module, "_compiler_ctx", None) is not None  # what Lightning makes of that
    )


def _compiles_forward(module: nn.Module) -> bool:
    if hasattr(getattr(module, "forward", None), "_torchdynamo_orig_callable"):
        return True  # module.forward = torch.compile(...)
    return any(forward.is_compiled for forward in forwards_of(module))


class CompileClock:
    """Counts compilations and their seconds, of forward and backward graphs, whoever wanted them.

    Whoever measures a step can take the difference of :attr:`seconds` off, so that the first step
    does not count as a slow one. It runs as long as someone has started it.

    Attributes:
        compilations: How often something was compiled while it ran; one call that compiles several
            graphs counts several times.
        seconds: Of wall time.
    """

    def __init__(self) -> None:
        self.compilations = 0
        self.seconds = 0.0
        self._users = 0
        self._since: float | None = None

    def start(self) -> None:
        """Begin to count; each start wants a stop."""
        self._users += 1
        if self._users == 1:
            _handler().register_start_callback(self._begin)
            _handler().register_end_callback(self._end)

    def stop(self) -> None:
        """Stop counting when all have stopped."""
        self._users -= 1
        if self._users == 0:
            self._since = None
            with contextlib.suppress(ValueError):  # `torch._dynamo.reset` has forgotten it
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
"""That of this process."""


def _handler() -> Any:
    """Return torch's registry of callbacks, whose import takes seconds."""
    from torch._dynamo.callback import callback_handler

    return callback_handler
