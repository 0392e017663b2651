"""A compiled part of a model, which changes to its next mode if compilation fails.

A region is one module, or several modules of the same structure that share their compiled code.
Only ``forward`` is compiled, below the modules' hooks: hooks of strategies (FSDP2 gathers
parameters in them) and of other callbacks run unchanged, and a checkpointed ``forward`` is inside
the graph.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from textwrap import shorten
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from lightning_opt.core.measure.exhaustion import is_out_of_memory
from lightning_opt.core.modules.batches import tensors_of
from lightning_opt.core.modules.compiling import CLOCK, STANCE
from lightning_opt.core.modules.patching import ReplacedForward, replaced
from lightning_opt.core.modules.preserve import StepState

EAGER = "eager"
# Python modules of compilers' exception classes.
COMPILERS = ("torch._dynamo.", "torch._inductor.", "torch._functorch.", "triton.")
# Maximum number of characters of a reason.
MAX_REASON = 300

_copy_numbers = itertools.count()


@dataclass
class CompileOptions:
    """Settings that all regions of a run share.

    Attributes:
        modes: Modes of ``torch.compile`` in the order in which they are tried.
        backend: As in ``torch.compile``; so are ``fullgraph`` and ``dynamic``.
        device: Device of the model.
        on_failure: Called with a region and the mode that failed.
    """

    modes: Sequence[str]
    backend: str | Callable[..., Any]
    fullgraph: bool
    dynamic: bool | None
    device: torch.device
    on_failure: Callable[[Region, str], None]


class Region:
    """Modules of the same structure that share their compiled code.

    Args:
        name: Name of the first module.
        modules: The modules.
        options: Shared settings.

    Attributes:
        reason: Reason of the latest failure; empty without one.
        seconds: Seconds of compilation.
        graphs: Number of compiled graphs, without backward graphs.
        breaks: Number of graph breaks.
        recompilations: Number of calls that compiled again in the same mode.
    """

    def __init__(self, name: str, modules: Sequence[nn.Module], options: CompileOptions) -> None:
        self.name, self.options = name, options
        self.kind = type(modules[0]).__name__
        self.modes = [*options.modes, EAGER]  # the current mode, then the modes left to try
        self.seconds = 0.0
        self.graphs = self.breaks = self.recompilations = 0
        self.reason = ""
        self.compiled: Callable[..., Any] | None = None
        self.passes_module = True
        self.forwards = [CompiledForward(module, self) for module in modules]

    @property
    def mode(self) -> str:
        return self.modes[0]

    def _compile(self) -> None:
        self.compiled = None
        for forward in self.forwards:
            forward.reset()
        if self.mode == EAGER:
            return
        is_shadowed = any(forward.shadowed is not None for forward in self.forwards)
        kind = type(self.forwards[0].module)
        self.passes_module = isinstance(kind.forward, FunctionType) and not is_shadowed
        self.compiled = torch.compile(
            self._copied_forward(),
            mode=self.mode if self.options.backend == "inductor" else None,
            backend=self.options.backend,
            fullgraph=self.options.fullgraph,
            dynamic=self.options.dynamic,
        )

    def _copied_forward(self) -> Callable[..., Any]:
        """Return a copy of ``forward`` with its own code object.

        torch stores compiled code and input sizes per code object and name, so regions with equal
        code objects would share them. A ``forward`` defined in torch is called through a function
        of this file, because torch would wrap all of them in one function with one recompilation
        limit.
        """
        function: Any = type(self.forwards[0].module).forward if self.passes_module else _run
        if function.__module__.startswith("torch."):
            function = _class_forward
        copy = FunctionType(
            function.__code__.replace(co_name=f"{function.__name__}_{next(_copy_numbers)}"),
            function.__globals__,
            function.__name__,
            function.__defaults__,
            function.__closure__,
        )
        copy.__kwdefaults__ = function.__kwdefaults__
        return copy

    def fall_back(self, error: BaseException) -> None:
        """Use the next mode, and report the reason."""
        failed_mode = self.modes.pop(0)
        self.reason = reason(error)
        self._compile()
        self.options.on_failure(self, failed_mode)

    def apply(self, stack: ExitStack) -> None:
        """Replace ``forward`` of the modules until ``stack`` is closed."""
        self._compile()
        for forward in self.forwards:
            stack.callback(forward.remove)
            forward.apply()


class CompiledForward(ReplacedForward):
    """Runs a module's compiled ``forward``, or the uncompiled one if that fails.

    A call that fails is rolled back (random numbers, buffers and attributes) and repeated
    uncompiled. If that raises as well, the error is the model's own.

    Args:
        module: The module.
        region: Its region.
    """

    def __init__(self, module: nn.Module, region: Region) -> None:
        super().__init__(module)
        self.region = region
        self.reset()

    @property
    def is_compiled(self) -> bool:
        return self.region.compiled is not None

    def reset(self) -> None:
        self._compiled_calls: set[Any] = set()
        self._compiled_contexts: set[Any] = set()
        self._saved_state: StepState | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():  # another compiled region contains this one
            return _run(self, *args, **kwargs)
        compiled = self.region.compiled
        if compiled is None or STANCE.eager:
            return _run(self, *args, **kwargs)
        return self._attempt(compiled, args, kwargs)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _attempt(self, compiled: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        region = self.region
        context = (self.module.training, torch.is_grad_enabled(), torch.is_inference_mode_enabled())
        call = (context, _shapes(args), _shapes(kwargs))
        # Known shapes need no saved state: if compilation fails, no code has run yet. With graph
        # breaks, the second graph may fail to compile after the first one has run.
        known = call in self._compiled_calls and not region.breaks
        saved = None if known else self._save_state()
        versions = [] if known else _versions((args, kwargs))
        compilations, seconds, counters = CLOCK.compilations, CLOCK.seconds, _counters()
        try:
            output = compiled(self.module if region.passes_module else self, *args, **kwargs)
        except Exception as error:  # noqa: BLE001 - the model's or the compiler's
            problem = error
        else:
            if saved is not None:
                saved.record_writes()
                saved.clear()
                self._compiled_calls.add(call)
            if CLOCK.compilations != compilations:
                self._count(context, seconds, counters)
            return output
        region.seconds += CLOCK.seconds - seconds
        try:
            return self._recover(problem, saved, versions, args, kwargs)
        finally:
            del problem  # its traceback keeps this frame and the activations alive

    def _recover(
        self,
        problem: Exception,
        saved: StepState | None,
        versions: Sequence[tuple[Tensor, int]],
        args: Any,
        kwargs: Any,
    ) -> Any:
        """Repeat the call uncompiled; outside ``except``, so the model's errors have no context."""
        if is_out_of_memory(problem):
            raise problem
        if saved is not None:
            saved.restore()
            saved.clear()
            if any(tensor._version != version for tensor, version in versions):
                raise problem  # the call overwrote its input and cannot be repeated
        elif not is_compiler_error(problem) and not isinstance(
            problem, (RuntimeError, AssertionError)
        ):
            raise problem  # compiled code raises only these two: the model's own error
        with replaced(STANCE, eager=True):
            output = _run(self, *args, **kwargs)
        if saved is None and not is_compiler_error(problem):
            raise problem  # compiled code failed midway, and no state was saved
        self.region.fall_back(problem)
        return output

    def _save_state(self) -> StepState:
        if self._saved_state is None:
            self._saved_state = StepState(self.module, self.region.options.device)
        self._saved_state.take()
        return self._saved_state

    def _count(self, context: Any, seconds: float, counters: tuple[int, int]) -> None:
        region = self.region
        region.seconds += CLOCK.seconds - seconds
        graphs, breaks = _counters()
        region.graphs += max(0, graphs - counters[0])  # torch._dynamo.reset() clears them
        region.breaks += max(0, breaks - counters[1])
        if context in self._compiled_contexts:
            region.recompilations += 1
        self._compiled_contexts.add(context)


def _run(forward: CompiledForward, /, *args: Any, **kwargs: Any) -> Any:
    if forward.shadowed is not None:
        return forward.shadowed(*args, **kwargs)
    return _class_forward(forward.module, *args, **kwargs)


def _class_forward(module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
    cls: Any = type(module)
    return cls.forward(module, *args, **kwargs)


def _shapes(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.shape, value.dtype
    if isinstance(value, (list, tuple)):
        return tuple([_shapes(item) for item in value])
    if isinstance(value, dict):
        return tuple([(name, _shapes(item)) for name, item in value.items()])
    if isinstance(value, (bool, int, str)):
        return value
    return type(value)


def _versions(tree: Any) -> list[tuple[Tensor, int]]:
    return [(leaf, leaf._version) for leaf in tensors_of(tree) if not leaf.is_inference()]


def _counters() -> tuple[int, int]:
    """Return torch's counts of graphs and of graph breaks in this process."""
    from torch._dynamo.utils import counters

    return counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())


# --- errors ---------------------------------------------------------------------------------------


def is_compiler_error(error: BaseException) -> bool:
    return any(f"{kind.__module__}.".startswith(COMPILERS) for kind in type(error).__mro__)


def reason(error: BaseException) -> str:
    """Return the class and the first words of the innermost error."""
    shown = getattr(error, "inner_exception", None) or error
    return shorten(f"{type(shown).__name__}: {shown}", MAX_REASON, placeholder="...")
