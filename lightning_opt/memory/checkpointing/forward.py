"""The only patch applied to a module: a ``forward`` that recomputes in the backward pass.

The module is not wrapped, so classes, parameter names, hooks and attributes stay the same.
``CheckpointedForward`` is an object and not a closure, so the module can be copied, pickled and
traced by torch.compile.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterable, Mapping, Sequence
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
from lightning_opt.memory.checkpointing.process_state import ProcessState, WrittenBuffers
from lightning_opt.memory.checkpointing.segments import Chain
from lightning_opt.memory.checkpointing.selective import ContextPair, Selection

PLAIN_TYPES = (
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    type(None),
    torch.dtype,
    torch.device,
    nn.Module,
)
# Levels of nested attributes and items that are compared. Key-value caches need this many.
MAX_DEPTH = 5


class Probe:
    """Contexts around each run of a checkpointed module, used to measure. This one does nothing."""

    def forward(self, module: nn.Module, inputs: Sequence[Tensor]) -> AbstractContextManager[Any]:
        return nullcontext()

    def after_forward(self, module: nn.Module, outputs: Sequence[Tensor]) -> None:
        """Receive the outputs of a first run."""

    def recompute(self, module: nn.Module) -> AbstractContextManager[Any]:
        return nullcontext()


class CheckpointedForward(ReplacedForward):
    """Runs a module without keeping its activations, and runs it again in the backward pass.

    Args:
        module: The module whose ``forward`` this replaces.
        chain: Joins consecutive calls into segments. None: use torch's checkpoint.
        selection: The operators whose outputs are kept; ``None`` keeps only the inputs.

    Attributes:
        keep_all: Call the probe, but recompute nothing.
    """

    recomputes = True

    def __init__(
        self, module: nn.Module, chain: Chain | None = None, selection: Selection | None = None
    ) -> None:
        super().__init__(module)
        self.chain = chain
        self.selection = selection
        self.keep_all = False
        self.probe = Probe()
        self.buffers = WrittenBuffers(module)
        values = (value for part in module.modules() for value in vars(part).values())
        self.generators = [value for value in values if isinstance(value, GENERATORS)]

    def apply(self) -> None:
        """Install this object as the module's ``forward``.

        Raises:
            RuntimeError: If the module is checkpointed already.
        """
        if is_checkpointed(self.module):
            raise RuntimeError(f"{type(self.module).__name__} is checkpointed already.")
        super().apply()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module; if gradients are enabled, prepare its recomputation."""
        if not torch.is_grad_enabled():
            return self.original(*args, **kwargs)
        if torch.compiler.is_compiling() and self.buffers.read_only:
            # Dynamo traces this as one operator that handles random state itself.
            module, cls, shadowed = self.module, type(self.module), self.shadowed

            def forward(*args: Any, **kwargs: Any) -> Any:
                if shadowed is not None:
                    return shadowed(*args, **kwargs)
                return cls.forward(module, *args, **kwargs)

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
        # torch detects inputs that were changed in place only if they are separate arguments.
        leaves, run.spec = tree_flatten((args, kwargs))
        return checkpoint(
            run, *leaves, use_reentrant=False, preserve_rng_state=False, context_fn=run.contexts
        )


class _Run:
    """One forward pass through a module, and its recomputations.

    As a context manager it restores the state of the first run for a recomputation. It can be
    entered repeatedly, because a graph may have several backward passes.
    """

    def __init__(
        self, owner: CheckpointedForward, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        self.owner = owner
        self.arguments: Any = (args, kwargs)
        self.spec: Any = None
        self.has_run = False
        self.buffer_values: dict[tuple[nn.Module, str], Tensor] = {}
        self._copies = owner.buffers.copies()
        self._recompute_context: AbstractContextManager[Any] = nullcontext()
        self._stack = ExitStack()
        received = [item for item in objects_in(self.arguments) if isinstance(item, GENERATORS)]
        # The module's device counts even if no argument is on it.
        tensors = (*islice(owner.module.parameters(), 1), *tensors_of(self.arguments))
        self.state = ProcessState(
            (tensor.device for tensor in tensors), [*owner.generators, *received]
        )

    def __call__(self, *leaves: Any) -> Any:
        if not self.has_run:  # pass the original containers: a block may append to one
            args, kwargs = self.arguments
            return self.first(*args, **kwargs)
        args, kwargs = tree_unflatten(list(leaves), self.spec)
        return self._repeat(*args, **kwargs)

    def contexts(self) -> ContextPair:
        """Return the contexts for torch's checkpoint; this object is the one of the recomputation.

        The selection's own context is entered after the buffers are copied, so it does not record
        the copies.
        """
        selection = self.owner.selection
        forward, recompute = selection.contexts() if selection else (nullcontext(), nullcontext())
        self._recompute_context = recompute
        return forward, self

    def __enter__(self) -> None:
        with ExitStack() as stack:
            stack.enter_context(self.state.restored())
            stack.enter_context(self.owner.buffers.replaced_by_copies(self.buffer_values))
            stack.enter_context(self._recompute_context)
            self._stack = stack.pop_all()

    def __exit__(self, *error: Any) -> bool | None:
        return self._stack.__exit__(*error)

    def first(self, *args: Any, **kwargs: Any) -> Any:
        owner = self.owner
        self.arguments = None
        inputs = list(tensors_of((args, kwargs)))
        objects = objects_in((args, kwargs))
        versions = [tensor._version for tensor in inputs]
        contents = contents_of(objects)
        with owner.probe.forward(owner.module, inputs):
            output = owner.original(*args, **kwargs)
        owner.probe.after_forward(owner.module, list(tensors_of(output)))
        self.buffer_values = owner.buffers.written_since(self._copies)
        self._copies = []
        self.has_run = True
        if not owner.keep_all:
            if versions != [tensor._version for tensor in inputs]:
                raise InputChangedError(owner.module)
            for item, before, after in zip(objects, contents, contents_of(objects), strict=True):
                if before != after:
                    raise InputChangedError(owner.module, item)
        return output

    def again(self, *args: Any, **kwargs: Any) -> Any:
        with self:
            return self._repeat(*args, **kwargs)

    def _repeat(self, *args: Any, **kwargs: Any) -> Any:
        with self.owner.probe.recompute(self.owner.module):
            return self.owner.original(*args, **kwargs)


class InputChangedError(RuntimeError):
    """Raised if a block writes to its own input, so that it cannot be recomputed.

    Args:
        module: The block.
        changed: The object that was written to; ``None`` for a tensor.
    """

    def __init__(self, module: nn.Module, changed: Any = None) -> None:
        name = type(module).__name__
        if changed is None:
            message = (
                f"{name} changes its input in place, so it cannot be recomputed from it. Make its "
                "first operation out-of-place (ReLU(inplace=False)), or leave it out of "
                "ActivationCheckpointing(modules=[...])."
            )
        else:
            message = (
                f"{name} writes to the {type(changed).__name__} that it receives, and a "
                "recomputation would write to it again. Train without it (use_cache=False for a "
                "cache), or leave the block out of ActivationCheckpointing(modules=[...])."
            )
        super().__init__(message)
        self.module = module


def objects_in(tree: Any) -> list[Any]:
    """Return the arguments that are neither tensors nor plain values."""
    leaves = tree_flatten(tree)[0]
    return [leaf for leaf in leaves if not isinstance(leaf, (Tensor, *PLAIN_TYPES))]


def contents_of(objects: Iterable[Any]) -> list[Any]:
    """Return a comparable description of the present contents of each object."""
    return [_content(item, MAX_DEPTH) for item in objects]


def _content(value: Any, depth: int) -> Any:
    if isinstance(value, Tensor):
        return id(value), value._version, value.shape
    if isinstance(value, PLAIN_TYPES):
        return value if isinstance(value, (bool, int, str)) else repr(type(value))
    parts = parts_of(value)
    return id(value), [_content(part, depth - 1) for part in parts] if depth else len(parts)


def parts_of(value: Any) -> Collection[Any]:
    """Return the items of a container, or the attribute values of any other object."""
    if isinstance(value, Mapping):
        return value.values()
    if isinstance(value, (list, tuple, set, frozenset)):
        return value
    return getattr(value, "__dict__", {}).values()  # such as a dataclass, a cache or a graph


def disable_caches(model: nn.Module) -> ExitStack:
    """Run models of ``transformers`` with ``use_cache=False`` while they are in training mode.

    Their decoders pass one key-value cache to every block, and a recomputation would write to it
    again. Training does not need the cache; ``transformers`` disables it for its own checkpointing
    too.

    Returns:
        A stack whose ``close`` removes the hooks.
    """
    undo = ExitStack()
    for module in model.modules():
        if getattr(getattr(module, "config", None), "use_cache", False):
            parameters = inspect.signature(type(module).forward).parameters
            if "use_cache" in parameters:
                hook = module.register_forward_pre_hook(_without_cache, with_kwargs=True)
                undo.callback(hook.remove)
    return undo


def _without_cache(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return args, {**kwargs, "use_cache": False} if module.training else kwargs
