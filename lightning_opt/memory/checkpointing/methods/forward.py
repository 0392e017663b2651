"""The one thing that is put onto a module: a ``forward`` that recomputes.

Classes, names of parameters, hooks and attributes stay as they are, since the module is not wrapped
in another one. ``CheckpointedForward`` is an object and no closure, so that the module can be
copied and pickled, and torch.compile can look into it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from types import MethodType
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.checkpoint import checkpoint, noop_context_fn

from lightning_opt.core import replacing
from lightning_opt.core.preserve import GENERATORS
from lightning_opt.core.splitting import tensors_of
from lightning_opt.memory.checkpointing.methods.arguments import contents_of, objects_in
from lightning_opt.memory.checkpointing.methods.restored_state import (
    BufferKey,
    HostRandom,
    WrittenBuffers,
)
from lightning_opt.memory.checkpointing.methods.segments import Chain

ContextPair = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]


class Choice(Protocol):
    """Decides which operators' outputs are kept: what selective checkpointing adds."""

    def contexts(self) -> ContextPair:
        """Return the contexts of the forward pass and of its recomputation."""
        ...


class Probe:
    """Is told when a module runs; used only while measuring."""

    def forward(self, module: nn.Module, inputs: Sequence[Tensor]) -> AbstractContextManager[Any]:
        """Return the context of a first run."""
        return nullcontext()

    def returned(self, module: nn.Module, outputs: Sequence[Tensor]) -> None:
        """Take notice of what a first run has returned."""

    def recompute(self, module: nn.Module) -> AbstractContextManager[Any]:
        """Return the context of a recomputation."""
        return nullcontext()


NOBODY = Probe()


class CheckpointedForward(replacing.Replacement):
    """Runs a module without keeping what it computes, and runs it again in the backward pass.

    Args:
        module: The module whose ``forward`` this replaces.
        chain: Joins the call with its neighbours' into segments; alone, torch's checkpoint is used.
        choice: Which operators' outputs are kept; ``None`` keeps nothing but the inputs.
        keep_all: Only tell the probe, and recompute nothing.
    """

    def __init__(
        self,
        module: nn.Module,
        chain: Chain | None = None,
        choice: Choice | None = None,
        keep_all: bool = False,
    ) -> None:
        self.module, self.chain, self.choice, self.keep_all = module, chain, choice, keep_all
        self.buffers = WrittenBuffers(module)
        self.generators = [
            value
            for part in module.modules()
            for value in vars(part).values()
            if isinstance(value, GENERATORS)
        ]
        self.probe = NOBODY
        # Someone else's replacement of `forward` stays in use, below this one.
        self.shadowed: Callable[..., Any] | None = module.__dict__.get("forward")

    @property
    def original(self) -> Callable[..., Any]:
        """The ``forward`` below this one."""
        if self.shadowed is not None:
            return self.shadowed
        return MethodType(type(self.module).forward, self.module)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module, so that it can be recomputed if gradients are wanted at all."""
        if not torch.is_grad_enabled():
            return self.original(*args, **kwargs)
        if torch.compiler.is_compiling() and self.buffers.read_only:
            # Traced as an operator of its own, which knows about random numbers.
            module, kind, shadowed = self.module, type(self.module), self.shadowed

            def forward(*args: Any, **kwargs: Any) -> Any:
                if shadowed is not None:
                    return shadowed(*args, **kwargs)
                return kind.forward(module, *args, **kwargs)

            return checkpoint(forward, *args, use_reentrant=False, **kwargs)
        return self._run(args, kwargs)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        run = _Run(self, args, kwargs)
        if self.keep_all:
            return run.first(*args, **kwargs)
        if self.chain is not None:
            segment = self.chain.segment_for(args, kwargs)
            return segment.run(run.first, args, kwargs, repeat=run.again)
        # Tensors as arguments of their own, wherever they were: torch looks only there for devices
        # whose generators it must remember, and for inputs that were changed in place.
        leaves, run.spec = tree_flatten((args, kwargs))
        context_fn = noop_context_fn if self.choice is None else run.contexts
        return checkpoint(run, *leaves, use_reentrant=False, context_fn=context_fn)


class _Run:
    """One forward pass through a module, which may be repeated."""

    def __init__(
        self, owner: CheckpointedForward, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        self.owner = owner
        self.given: Any = (args, kwargs)
        self.spec: Any = None
        self.done = False
        self.start: dict[BufferKey, Tensor] = {}
        self._before = owner.buffers.before()
        given = (thing for thing in objects_in(self.given) if isinstance(thing, GENERATORS))
        self._random = HostRandom([*owner.generators, *given])

    def __call__(self, *leaves: Any) -> Any:
        if not self.done:  # with the very containers that were given: a block may append to one
            args, kwargs = self.given
            return self.first(*args, **kwargs)
        args, kwargs = tree_unflatten(list(leaves), self.spec)
        if self.owner.choice is not None:  # the buffers are cared for outside of its context
            return self._repeat(*args, **kwargs)
        return self.again(*args, **kwargs)

    def contexts(self) -> ContextPair:
        """Return those of the choice; for it, copying buffers is no operator of the module."""
        assert self.owner.choice is not None
        forward, recompute = self.owner.choice.contexts()
        return forward, _OnScratch(self, recompute)

    def first(self, *args: Any, **kwargs: Any) -> Any:
        owner, self.given = self.owner, None
        inputs, objects = list(tensors_of((args, kwargs))), objects_in((args, kwargs))
        versions, contents = [tensor._version for tensor in inputs], contents_of(objects)
        with owner.probe.forward(owner.module, inputs):
            output = owner.original(*args, **kwargs)
        owner.probe.returned(owner.module, list(tensors_of(output)))
        self.start = owner.buffers.after(self._before)
        self._before, self.done = [], True
        if not owner.keep_all:
            if versions != [tensor._version for tensor in inputs]:
                raise InputChangedError(owner.module)
            for thing, before, after in zip(objects, contents, contents_of(objects), strict=True):
                if before != after:
                    raise InputChangedError(owner.module, thing)
        return output

    def again(self, *args: Any, **kwargs: Any) -> Any:
        with self.owner.buffers.scratch(self.start):
            return self._repeat(*args, **kwargs)

    def _repeat(self, *args: Any, **kwargs: Any) -> Any:
        owner = self.owner
        with self._random.restored(), owner.probe.recompute(owner.module):
            return owner.original(*args, **kwargs)


class _OnScratch:
    """The context of a recomputation, around it copies of the buffers that it writes.

    It can be entered again and again, for a graph can be walked more than once.
    """

    def __init__(self, run: _Run, inner: AbstractContextManager[Any]) -> None:
        self._run, self._inner = run, inner
        self._stack = ExitStack()

    def __enter__(self) -> None:
        with ExitStack() as stack:
            stack.enter_context(self._run.owner.buffers.scratch(self._run.start))
            stack.enter_context(self._inner)
            self._stack = stack.pop_all()

    def __exit__(self, *error: Any) -> bool | None:
        return self._stack.__exit__(*error)


class InputChangedError(RuntimeError):
    """A block writes to its own input, which is then lost for the recomputation.

    Args:
        module: The block.
        thing: What it writes to; a tensor if not given.
    """

    def __init__(self, module: nn.Module, thing: Any = None) -> None:
        super().__init__(
            f"{type(module).__name__} changes its input in place, so it cannot be recomputed from "
            "it. Make its first operation out-of-place (ReLU(inplace=False)), or leave it out of "
            "ActivationCheckpointing(modules=[...])."
            if thing is None
            else f"{type(module).__name__} writes to the {type(thing).__name__} that it is given, "
            "and a recomputation would write to it again. Train without it (use_cache=False for "
            "a cache), or leave the block out of ActivationCheckpointing(modules=[...])."
        )
        self.module = module


def is_checkpointed(module: nn.Module) -> bool:
    """Return whether ``module`` has a :class:`CheckpointedForward` now."""
    return isinstance(module.__dict__.get("forward"), CheckpointedForward)


def put_on(forward: CheckpointedForward) -> None:
    """Make it the module's ``forward``.

    Raises:
        RuntimeError: If the module has one already.
    """
    if is_checkpointed(forward.module):
        raise RuntimeError(f"{type(forward.module).__name__} is checkpointed already.")
    forward.module.forward = forward


def take_off(forward: CheckpointedForward) -> None:
    """Give the module back the ``forward`` it had; nothing happens if that has been done."""
    replacing.take_off(forward)


@contextmanager
def probed(forwards: list[CheckpointedForward], probe: Probe) -> Iterator[None]:
    """Let ``probe`` watch."""
    try:
        for forward in forwards:
            forward.probe = probe
        yield
    finally:
        for forward in forwards:
            forward.probe = NOBODY
