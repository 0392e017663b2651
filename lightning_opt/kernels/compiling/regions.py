"""A part of a model that is compiled, and goes down the ladder of modes when that fails.

A region is one module, or several of one structure that share one piece of compiled code. What is
compiled is ``forward`` below the modules' hooks: hooks of strategies (FSDP2 gathers parameters in
them) and of other callbacks run as they are, and a checkpointed ``forward`` lies inside.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from lightning_opt.core.measure.exhaustion import is_out_of_memory
from lightning_opt.core.modules.batches import tensors_of
from lightning_opt.core.modules.compiling import CLOCK
from lightning_opt.core.modules.patching import ReplacedForward, replaced
from lightning_opt.core.modules.preserve import StepState
from lightning_opt.kernels.compiling.errors import fails_in_every_mode, is_compilers, reason

EAGER = "eager"
MOST_KEYS = 1000
"""Shapes that are remembered as having run."""

_numbers = itertools.count()


@dataclass
class Shared:
    """What the regions of a run have in common.

    Attributes:
        backend: Of ``torch.compile``; so are ``fullgraph`` and ``dynamic``.
        device: Where the model runs.
        tell: Called with a region, the mode that failed and the error.
        paused: While it is set, modules run as they are.
    """

    backend: str | Callable[..., Any]
    fullgraph: bool
    dynamic: bool | None
    device: torch.device
    tell: Callable[[Region, str, BaseException], None]
    paused: bool = False


class Region:
    """Modules of one structure, compiled as one.

    Args:
        name: Of the first of them in the model.
        modules: They.
        ladder: Modes of ``torch.compile`` in the order in which they are tried.
        shared: What regions have in common.

    Attributes:
        reason: Why it has gone down the ladder; empty if it has not.
        seconds: Of compilation.
        graphs: Graphs that were compiled, backward graphs not counted.
        breaks: Places at which a graph ended, and Python went on.
        recompilations: Calls that compiled again what had been compiled in the same mode.
    """

    def __init__(
        self, name: str, modules: Sequence[nn.Module], ladder: Sequence[str], shared: Shared
    ) -> None:
        self.name, self.shared = name, shared
        self.kind = type(modules[0]).__name__
        self.modes = (*ladder, EAGER)
        self.rung = 0
        self.seconds = 0.0
        self.graphs = self.breaks = self.recompilations = 0
        self.reason = ""
        self.compiled: Callable[..., Any] | None = None
        self.takes_module = True
        self.forwards = [CompiledForward(module, self) for module in modules]

    @property
    def mode(self) -> str:
        """The mode in use."""
        return self.modes[self.rung]

    def go_to(self, rung: int) -> None:
        """Use another mode from the next call on."""
        self.rung = min(rung, len(self.modes) - 1)
        self.compiled = None
        for forward in self.forwards:
            forward.forget()
        if self.mode == EAGER:
            return
        self.takes_module = self._is_plain()
        self.compiled = torch.compile(
            self._function(),
            mode=self.mode if self.shared.backend == "inductor" else None,
            backend=self.shared.backend,
            fullgraph=self.shared.fullgraph,
            dynamic=self.shared.dynamic,
        )

    def _is_plain(self) -> bool:
        """Return whether the class's own ``forward`` is what runs, and is a function."""
        return isinstance(type(self.forwards[0].module).forward, FunctionType) and all(
            forward.shadowed is None for forward in self.forwards
        )

    def _function(self) -> Callable[..., Any]:
        """Return ``forward`` as a function with a code object of its own.

        Torch keeps compiled code, and the sizes that it has seen, by code object and its name. So
        nothing is shared with other regions, and all of it goes with the region. Functions of torch
        itself are called by one of ours: torch would put one of its own around them, and all
        regions of a process would have to share the few compilations that it allows for that.
        """
        function: Any = type(self.forwards[0].module).forward if self.takes_module else _run
        if function.__module__.startswith("torch."):
            function = _forward
        own = FunctionType(
            function.__code__.replace(co_name=f"{function.__name__}_{next(_numbers)}"),
            function.__globals__,
            function.__name__,
            function.__defaults__,
            function.__closure__,
        )
        own.__kwdefaults__ = function.__kwdefaults__
        return own

    def step_down(self, error: BaseException) -> None:
        """Use the next mode that has a chance, and tell why."""
        failed, self.reason = self.mode, reason(error)
        self.go_to(len(self.modes) if fails_in_every_mode(error) else self.rung + 1)
        self.shared.tell(self, failed, error)

    def put_on(self, stack: ExitStack) -> None:
        """Have the modules run compiled until ``stack`` is closed."""
        for forward in self.forwards:
            stack.callback(forward.remove)
            forward.apply()


class CompiledForward(ReplacedForward):
    """Stands in for a module's ``forward``: compiled, or as it was where that does not work.

    A call that fails is taken back (random numbers, buffers and attributes are as before it) and
    done again uncompiled. If that raises as well, the error was not the compiler's.

    Args:
        module: The module.
        region: What it belongs to.
    """

    def __init__(self, module: nn.Module, region: Region) -> None:
        super().__init__(module)
        self.region = region
        self.forget()

    @property
    def is_compiled(self) -> bool:
        """Whether compiled code runs here."""
        return self.region.compiled is not None

    def forget(self) -> None:
        """Take nothing as known any more."""
        self._known: set[Any] = set()
        self._modes: set[Any] = set()
        self._before: StepState | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module."""
        if torch.compiler.is_compiling():  # as a part of a compiled region around it
            return _run(self, *args, **kwargs)
        compiled, shared = self.region.compiled, self.region.shared
        if compiled is None or shared.paused:
            return _run(self, *args, **kwargs)
        return self._attempt(compiled, args, kwargs)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _attempt(self, compiled: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        region = self.region
        mode = (self.module.training, torch.is_grad_enabled(), torch.is_inference_mode_enabled())
        key = (mode, _shapes(args), _shapes(kwargs))
        # Shapes that have run before compile nothing, or fail before anything has run: unless the
        # graph is broken, when a later part of it may be compiled after an earlier one has run.
        known = key in self._known and not region.breaks
        before = None if known else self._remember()
        versions = [] if known else _versions((args, kwargs))
        compilations, seconds, counters = CLOCK.compilations, CLOCK.seconds, _counters()
        try:
            output = compiled(self.module if region.takes_module else self, *args, **kwargs)
        except Exception as error:  # noqa: BLE001 - what it is, the second run will show
            problem = error
        else:
            if before is not None:
                before.record_writes()
                before.clear()
                if len(self._known) >= MOST_KEYS:
                    self._known.clear()
                self._known.add(key)
            if CLOCK.compilations != compilations:
                self._count(mode, seconds, counters)
            return output
        region.seconds += CLOCK.seconds - seconds
        try:
            return self._recover(problem, before, versions, args, kwargs)
        finally:
            del problem  # its traceback holds this frame, and with it the activations

    def _recover(
        self,
        problem: Exception,
        before: StepState | None,
        versions: Sequence[tuple[Tensor, int]],
        args: Any,
        kwargs: Any,
    ) -> Any:
        """Do the call again uncompiled; outside of ``except``, so that an error is the model's."""
        if is_out_of_memory(problem):
            raise problem
        if before is not None:
            before.restore()
            before.clear()
            if any(tensor._version != version for tensor, version in versions):
                raise problem  # its input was written to, and is lost
        elif not is_compilers(problem) and not isinstance(problem, (RuntimeError, AssertionError)):
            raise problem  # compiled code raises nothing else: the model's Python has
        with replaced(self.region.shared, paused=True):
            output = _run(self, *args, **kwargs)
        if before is None and not is_compilers(problem):
            raise problem  # compiled code failed half-way, and there is no copy to go back to
        self.region.step_down(problem)
        return output

    def _remember(self) -> StepState:
        if self._before is None:
            self._before = StepState(self.module, self.region.shared.device)
        self._before.take()
        return self._before

    def _count(self, mode: Any, seconds: float, counters: tuple[int, int]) -> None:
        region = self.region
        region.seconds += CLOCK.seconds - seconds
        graphs, breaks = _counters()
        region.graphs += max(0, graphs - counters[0])  # torch._dynamo.reset() clears them
        region.breaks += max(0, breaks - counters[1])
        if mode in self._modes:
            region.recompilations += 1
        self._modes.add(mode)


def _run(forward: CompiledForward, /, *args: Any, **kwargs: Any) -> Any:
    """Run what ``forward`` stands in for."""
    if forward.shadowed is not None:
        return forward.shadowed(*args, **kwargs)
    return _forward(forward.module, *args, **kwargs)


def _forward(module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
    """Run what the class of ``module`` has as ``forward``."""
    kind: Any = type(module)
    return kind.forward(module, *args, **kwargs)


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
