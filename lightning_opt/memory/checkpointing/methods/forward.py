"""The one thing that is put onto a module: a ``forward`` that recomputes.

Classes, names of parameters, hooks and attributes stay as they are, since the module is not wrapped
in another one. ``CheckpointedForward`` is an object and no closure, so that the module can be
copied and pickled, and torch.compile can look into it.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.checkpoint import checkpoint

from lightning_opt.core.modules.batches import tensors_of
from lightning_opt.core.modules.compiling import is_checkpointed
from lightning_opt.core.modules.patching import ReplacedForward
from lightning_opt.core.modules.preserve import GENERATORS
from lightning_opt.memory.checkpointing.methods.arguments import contents_of, objects_in
from lightning_opt.memory.checkpointing.methods.restored_state import Surroundings, WrittenBuffers
from lightning_opt.memory.checkpointing.methods.segments import Chain
from lightning_opt.memory.checkpointing.methods.selective import ContextPair, Selection


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


class CheckpointedForward(ReplacedForward):
    """Runs a module without keeping what it computes, and runs it again in the backward pass.

    Args:
        module: The module whose ``forward`` this replaces.
        chain: Joins the call with its neighbours' into segments; alone, torch's checkpoint is used.
        choice: Which operators' outputs are kept; ``None`` keeps nothing but the inputs.

    Attributes:
        keep_all: Only tell the probe, and recompute nothing.
    """

    recomputes = True

    def __init__(
        self, module: nn.Module, chain: Chain | None = None, choice: Selection | None = None
    ) -> None:
        super().__init__(module)
        self.chain, self.choice, self.keep_all = chain, choice, False
        self.buffers = WrittenBuffers(module)
        values = (value for part in module.modules() for value in vars(part).values())
        self.generators = [value for value in values if isinstance(value, GENERATORS)]
        self.probe = Probe()  # that does nothing

    def apply(self) -> None:
        """Make it the module's ``forward``.

        Raises:
            RuntimeError: If the module has one already.
        """
        if is_checkpointed(self.module):
            raise RuntimeError(f"{type(self.module).__name__} is checkpointed already.")
        super().apply()

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
            return segment.run(run.first, run.again, args, kwargs)
        # Tensors as arguments of their own, wherever they were: torch looks only there for inputs
        # that were changed in place.
        leaves, run.spec = tree_flatten((args, kwargs))
        return checkpoint(
            run, *leaves, use_reentrant=False, preserve_rng_state=False, context_fn=run.contexts
        )


class _Run:
    """One forward pass through a module, which may be repeated."""

    def __init__(
        self, owner: CheckpointedForward, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        self.owner = owner
        self.given: Any = (args, kwargs)
        self.spec: Any = None
        self.done = False
        self.start: dict[tuple[nn.Module, str], Tensor] = {}
        self._before = owner.buffers.before()
        given = (thing for thing in objects_in(self.given) if isinstance(thing, GENERATORS))
        # Of a device whatever its tensors come in, even if there are none among the arguments.
        places = (*islice(owner.module.parameters(), 1), *tensors_of(self.given))
        self.surroundings = Surroundings(
            (tensor.device for tensor in places), [*owner.generators, *given]
        )

    def __call__(self, *leaves: Any) -> Any:
        if not self.done:  # with the very containers that were given: a block may append to one
            args, kwargs = self.given
            return self.first(*args, **kwargs)
        args, kwargs = tree_unflatten(list(leaves), self.spec)
        return self._repeat(*args, **kwargs)

    def contexts(self) -> ContextPair:
        """Return those of the choice; for it, copying buffers is no operator of the module."""
        choice = self.owner.choice
        forward, recompute = choice.contexts() if choice else (nullcontext(), nullcontext())
        return forward, _AsThen(self, recompute)

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
        with _AsThen(self, nullcontext()):
            return self._repeat(*args, **kwargs)

    def _repeat(self, *args: Any, **kwargs: Any) -> Any:
        with self.owner.probe.recompute(self.owner.module):
            return self.owner.original(*args, **kwargs)


class _AsThen:
    """The context of a recomputation, around it what surrounded the first run.

    It can be entered again and again, for a graph can be walked more than once.
    """

    def __init__(self, run: _Run, inner: AbstractContextManager[Any]) -> None:
        self._run, self._inner = run, inner
        self._stack = ExitStack()

    def __enter__(self) -> None:
        with ExitStack() as stack:
            stack.enter_context(self._run.surroundings.restored())
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
