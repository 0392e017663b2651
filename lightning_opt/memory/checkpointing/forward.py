"""The patches: ``forward`` recomputes a block, caches are disabled, saved tensors are offloaded.

Modules are not wrapped, so classes, parameter names, hooks and attributes stay the same.
``CheckpointedForward`` is an object and not a closure, so the module can be copied, pickled and
traced by torch.compile.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import AbstractContextManager, ContextDecorator, ExitStack, nullcontext
from functools import partial, wraps
from typing import Any, TypeAlias
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.checkpoint import checkpoint

from lightning_opt.core.modules.batches import tensors_of
from lightning_opt.core.modules.patching import ReplacedForward
from lightning_opt.core.modules.preserve import Undo, random_states
from lightning_opt.core.modules.state_kinds import GENERATORS
from lightning_opt.core.modules.trial import storages_of
from lightning_opt.memory.checkpointing.segments import Chain
from lightning_opt.memory.checkpointing.selective import ContextPair, Selection
from lightning_opt.memory.checkpointing.written_state import Key, WrittenState

PLAIN_TYPES = (
    bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, nn.Module,
)  # fmt: skip
PLAIN_LEAVES = (Tensor, *PLAIN_TYPES)
# Maximum depth to which nested attributes and items are compared. Key-value caches are nested.
MAX_DEPTH = 5
_NO_CONTEXT = nullcontext()


# Measures a run of a module. The second argument is whether the run is a recomputation.
Probe: TypeAlias = Callable[[nn.Module, bool], ContextDecorator]


class CheckpointedForward(ReplacedForward):
    """Runs a module without keeping its activations, and runs it again in the backward pass.

    Args:
        module: The module whose ``forward`` this replaces.
        chain: Joins consecutive calls into segments; ``None`` uses torch's ``checkpoint`` for each
            call.
        selection: The operators whose outputs are kept; ``None`` keeps only the inputs.
    """

    recomputes = True

    def __init__(
        self, module: nn.Module, chain: Chain | None = None, selection: Selection | None = None
    ) -> None:
        super().__init__(module)
        self.chain = chain
        self.selection = selection
        self.probe: Probe | None = None
        self.state = WrittenState(module)
        # The random state of the parameters' device is restored even if no argument is on it.
        self.parameter = next(module.parameters(), None)
        values = (value for part in module.modules() for value in vars(part).values())
        self.generators = [value for value in values if isinstance(value, GENERATORS)]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module; if gradients are enabled, prepare its recomputation."""
        if not torch.is_grad_enabled() or getattr(torch.compiler, "is_exporting", bool)():
            return self.original(*args, **kwargs)
        if not torch.compiler.is_compiling():
            return self._run(args, kwargs)
        if not self.state.read_only or not _backend_repeats_random_numbers():
            return self._run_outside_of_the_graph(args, kwargs)
        # Dynamo traces torch's checkpoint as one operator, which handles random state itself.
        forward = self.shadowed or partial(type(self.module).forward, self.module)
        return checkpoint(forward, *args, use_reentrant=False, **kwargs)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _run_outside_of_the_graph(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self._run(args, kwargs)

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # torch.func.grad and torch.func.vmap need graphs without hooks: keep all activations.
        if not torch._C._autograd._saved_tensors_hooks_is_enabled():  # type: ignore[attr-defined]
            return self.original(*args, **kwargs)
        run = Run(self, args, kwargs)
        leaves, run.leaves = run.leaves, []
        if self.chain is not None:
            return self.chain.run(run, leaves)
        # Pass each input separately: otherwise torch does not detect in-place changes of inputs.
        return checkpoint(
            run, *leaves, use_reentrant=False, preserve_rng_state=False, context_fn=run.contexts
        )


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _backend_repeats_random_numbers() -> bool:
    """Return whether the backend that compiles now repeats random numbers in a recomputation.

    Backends without AOTAutograd, such as ``"eager"``, draw others. So may a backend that is not
    registered with torch.
    """
    from torch._dynamo.symbolic_convert import InstructionTranslator

    compiler = InstructionTranslator.current_tx().output.compiler_fn
    name = getattr(compiler, "__name__", "")
    return name in torch.compiler.list_backends() or name.startswith("aot_")


class Run:
    """One forward pass through a module, and its recomputations.

    The first call is the forward pass; each later call is a recomputation. Inside the context of
    this object, the state of the forward pass is restored. The context can be entered repeatedly,
    because a graph may have several backward passes.
    """

    def __init__(
        self, owner: CheckpointedForward, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        self._owner = owner
        self._arguments: Any = (args, kwargs)
        self._spec: Any = None
        self.leaves: list[Any] = list(args)
        if kwargs or not all(isinstance(leaf, PLAIN_LEAVES) for leaf in args):
            self.leaves, self._spec = tree_flatten((args, kwargs))
        self._objects = [leaf for leaf in self.leaves if not isinstance(leaf, PLAIN_LEAVES)]
        self._tensors = [leaf for leaf in self.leaves if isinstance(leaf, Tensor)]
        self._generators = owner.generators
        if self._objects:
            self._tensors += tensors_of(self._objects)
            received = [item for item in self._objects if isinstance(item, GENERATORS)]
            self._generators = [*owner.generators, *received]
        self.devices = {tensor.device for tensor in self._tensors}
        if owner.parameter is not None:
            self.devices.add(owner.parameter.device)
        self._random = random_states(self.devices, self._generators)
        self._state_before, self._swapped = owner.state.save()
        self._overwritten: dict[Key, Any] = {}
        self._selection_context: AbstractContextManager[Any] = _NO_CONTEXT
        self._undo: list[Undo] = []

    def contexts(self) -> ContextPair:
        """Return the contexts of the forward pass and the recomputation, for torch's checkpoint.

        The recomputation's context is this object. It enters the selection's context after it has
        copied the state, so the selection does not record the copies.
        """
        selection = self._owner.selection
        if selection is None:
            return _NO_CONTEXT, self
        forward, self._selection_context = selection.contexts()
        return forward, self

    def __enter__(self) -> None:
        self._undo = random_states(self.devices, self._generators)
        for restore in self._random:
            restore()
        originals = self._owner.state.replace(self._overwritten, self._swapped)
        self._undo.append(partial(self._owner.state.restore, originals))
        self._selection_context.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._selection_context.__exit__(*error)
        # torch returns each kept output only once, so a later recomputation keeps none.
        if self._owner.selection is not None and self._owner.selection.kept:
            self._selection_context = _NO_CONTEXT
        for undo in self._undo:
            undo()

    def __call__(self, *leaves: Any) -> Any:
        if self._arguments is not None:
            return self._run_first()
        args, kwargs = leaves, {}
        if self._spec is not None:
            args, kwargs = tree_unflatten(list(leaves), self._spec)
        forward = self._owner.original
        if self._owner.probe is not None:
            forward = self._owner.probe(self._owner.module, True)(forward)
        return forward(*args, **kwargs)

    def _run_first(self) -> Any:
        owner = self._owner
        # Pass the original objects and not rebuilt ones, because a block may append to a list.
        (args, kwargs), self._arguments = self._arguments, None
        tensors, self._tensors = self._tensors, []
        objects, self._objects = self._objects, []
        contents = contents_of(objects) if objects else []
        # In later runs, autograd raises its own error.
        watched = [*tensors, *owner.module.parameters()] if owner.state.written is None else []
        versions = [tensor._version for tensor in watched]
        forward = owner.original
        if owner.probe is not None:
            forward = owner.probe(owner.module, False)(forward)
        output = forward(*args, **kwargs)
        self._overwritten = owner.state.written_since(self._state_before)
        self._state_before = []
        for tensor, version in zip(watched, versions, strict=True):
            if tensor._version != version:
                raise InputChangedError(owner.module, tensor)
        if objects:
            for item, before, after in zip(objects, contents, contents_of(objects), strict=True):
                if before != after:
                    raise InputChangedError(owner.module, item)
        return output


class InputChangedError(RuntimeError):
    """Raised if a block writes to its input or parameters and therefore cannot be recomputed."""

    def __init__(self, module: nn.Module, item: Any) -> None:
        if isinstance(item, nn.Parameter):
            problem, remedy = "changes its parameters", "Change them between steps"
        elif isinstance(item, Tensor):
            problem = "changes its input in place"
            remedy = "Make its first operation out-of-place (ReLU(inplace=False))"
        else:
            problem = f"writes to the {type(item).__name__} that it receives"
            remedy = "Train without it (use_cache=False for a cache)"
        super().__init__(
            f"{type(module).__name__} {problem}, so it cannot be recomputed. {remedy}, or leave it "
            "out of ActivationCheckpointing(modules=[...])."
        )
        self.module = module


def contents_of(objects: Iterable[Any]) -> list[Any]:
    """Return a description of each object's contents, to detect changes by comparison."""
    return [_contents(item, MAX_DEPTH) for item in objects]


def _contents(value: Any, depth: int) -> Any:
    if isinstance(value, Tensor):
        return id(value), value._version, value.shape
    if isinstance(value, PLAIN_TYPES):
        return value if isinstance(value, (bool, int, str)) else repr(type(value))
    parts = parts_of(value)
    return id(value), [_contents(part, depth - 1) for part in parts] if depth else len(parts)


def parts_of(value: Any) -> Collection[Any]:
    """Return the items of a container, or the attribute values of any other object."""
    if isinstance(value, Mapping):
        return value.values()
    if isinstance(value, (list, tuple, set, frozenset)):
        return value
    return getattr(value, "__dict__", {}).values()  # such as a dataclass, a cache or a graph


def disable_caches(model: nn.Module, until: ExitStack) -> None:
    """Run models of ``transformers`` with ``use_cache=False`` in training, until a stack is closed.

    Their decoders pass one key-value cache to every block, and a recomputation would write to it
    again. Training does not need the cache; ``transformers`` disables it for its own checkpointing
    too.
    """
    for module in model.modules():
        uses_cache = getattr(getattr(module, "config", None), "use_cache", False)
        if uses_cache and "use_cache" in inspect.signature(type(module).forward).parameters:
            hook = module.register_forward_pre_hook(_without_cache, with_kwargs=True)
            until.callback(hook.remove)


def _without_cache(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return args, {**kwargs, "use_cache": False} if module.training else kwargs


class Offload:
    """Runs a step under torch's ``save_on_cpu``, except for parameters, buffers and the batch.

    Moving these tensors would free no memory.

    Attributes:
        nbytes: Bytes that the latest step moved.
    """

    def __init__(self) -> None:
        self.nbytes = 0

    def around(self, model: nn.Module, step: Callable[..., Any]) -> Callable[..., Any]:
        on_host = save_on_cpu(pin_memory=True)

        @wraps(step)
        def offloading(*args: Any, **kwargs: Any) -> Any:
            kept = (*model.parameters(), *model.buffers(), *tensors_of((args, kwargs)))
            # Storages, not addresses: freed memory may be reused for another tensor.
            stay = WeakSet(storage for tensor in kept for storage in storages_of(tensor))
            self.nbytes = 0

            def pack(tensor: Tensor) -> Any:
                if tensor.layout is not torch.strided:
                    return tensor
                storages = list(storages_of(tensor))
                # A broadcast tensor has more elements than its storage.
                is_small = sum(storage.nbytes() for storage in storages) < tensor.nbytes
                if is_small or any(storage in stay for storage in storages):
                    return tensor
                self.nbytes += tensor.nbytes
                return on_host.pack_hook(tensor)

            def unpack(packed: Any) -> Tensor:
                return packed if isinstance(packed, Tensor) else on_host.unpack_hook(packed)

            with saved_tensors_hooks(pack, unpack):
                return step(*args, **kwargs)

        return offloading
