"""Recomputes several consecutive blocks as one segment.

``torch.utils.checkpoint.checkpoint`` takes one function, but a model that loops over its blocks
calls them one by one. A :class:`Segment` applies the same method to a list of calls:
saved tensors become placeholders while a block runs, and the first placeholder that the backward
pass unpacks runs all calls of the segment again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from lightning_opt.core.modules.batches import tensors_of
from lightning_opt.memory.checkpointing.offloading import pack, unpack

Function = Callable[..., Any]


class _Placeholder:
    """Replaces a saved tensor in the graph; holds the recomputed tensor until it is used."""

    tensor: Tensor | None = None


class _EarlierOutput(NamedTuple):
    """Marks an input that is an output of an earlier call of the segment."""

    call: int
    position: int


class _Input:
    """A tensor from outside the segment, detached: its graph would reference the segment again."""

    def __init__(self, tensor: Tensor) -> None:
        self.packed = pack(tensor)
        self.version = tensor._version
        self.requires_grad = tensor.requires_grad

    def get(self) -> Tensor:
        # Autograd checks the versions only of tensors that it saved itself.
        if isinstance(self.packed, Tensor) and self.packed._version != self.version:
            raise RuntimeError(
                f"An input of a checkpointed block, of shape {tuple(self.packed.shape)}, was "
                "changed in place after the block had run, so the block cannot be recomputed. Use "
                "an out-of-place operation there, or do not checkpoint this block."
            )
        return unpack(self.packed).detach().requires_grad_(self.requires_grad)


class _Output:
    """Identifies an output of a call among the inputs of later calls."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = ref(tensor)
        self.version = tensor._version

    def matches(self, value: Any) -> bool:
        tensor = self.tensor()
        return tensor is not None and tensor is value and tensor._version == self.version


class _StopRecomputationError(Exception):
    """Ends a recomputation once every saved tensor is available again."""


class _Call(NamedTuple):
    function: Function
    leaves: list[Any]
    spec: TreeSpec

    def repeat(self, outputs: list[list[Tensor]]) -> Any:
        leaves = [
            leaf.get()
            if isinstance(leaf, _Input)
            else outputs[leaf.call][leaf.position]
            if isinstance(leaf, _EarlierOutput)
            else leaf
            for leaf in self.leaves
        ]
        args, kwargs = tree_unflatten(leaves, self.spec)
        return self.function(*args, **kwargs)


class Segment:
    """The calls of one forward pass that are recomputed together.

    Inputs that are outputs of an earlier call of the segment are not kept.
    """

    def __init__(self) -> None:
        self._calls: list[_Call] = []
        self._outputs: list[list[_Output]] = []
        self._saved: list[tuple[ref[_Placeholder], torch.Size, torch.dtype]] = []
        self._restored = 0

    def __len__(self) -> int:
        return len(self._calls)

    def continues(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Return whether an input is an unchanged output of the latest call."""
        return any(
            output.matches(leaf)
            for leaf in tree_flatten((args, kwargs))[0]
            for output in self._outputs[-1]
        )

    def run(
        self, function: Function, repeat: Function, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Call ``function`` now, and ``repeat`` in the recomputation."""
        leaves, spec = tree_flatten((args, kwargs))
        kept = [self._keep(leaf) for leaf in leaves]
        self._calls.append(_Call(repeat, kept, spec))
        with saved_tensors_hooks(self._pack, self._unpack):
            output = function(*args, **kwargs)
        self._outputs.append([_Output(tensor) for tensor in tensors_of(output)])
        return output

    def _keep(self, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        for call, outputs in enumerate(self._outputs):
            for position, output in enumerate(outputs):
                if output.matches(leaf):
                    return _EarlierOutput(call, position)
        return _Input(leaf)

    def _pack(self, tensor: Tensor) -> _Placeholder:
        placeholder = _Placeholder()
        self._saved.append((ref(placeholder), tensor.shape, tensor.dtype))
        return placeholder

    def _unpack(self, placeholder: _Placeholder) -> Tensor:
        if placeholder.tensor is None:  # not recomputed yet, or used by an earlier backward pass
            self._recompute()
        tensor = placeholder.tensor
        placeholder.tensor = None
        assert tensor is not None
        return tensor

    def _recompute(self) -> None:
        self._restored = 0
        outputs: list[list[Tensor]] = []
        try:
            with torch.enable_grad(), saved_tensors_hooks(self._restore, lambda tensor: tensor):
                for call in self._calls:
                    outputs.append(list(tensors_of(call.repeat(outputs))))
        except _StopRecomputationError:
            return
        raise RuntimeError(
            f"A recomputed segment saved {self._restored} tensors, {len(self._saved)} the first "
            "time: its blocks do not compute the same twice. Do not checkpoint them."
        )

    def _restore(self, tensor: Tensor) -> Tensor:
        tensor = tensor.detach()
        index = self._restored
        reference, shape, dtype = self._saved[index]
        self._restored += 1
        if (tensor.shape, tensor.dtype) != (shape, dtype):
            raise RuntimeError(
                f"Saved tensor {index} of a recomputed segment is {tensor.dtype} of shape "
                f"{tuple(tensor.shape)}; the first time it was {dtype} of "
                f"{tuple(shape)}. Its blocks do not compute the same twice."
            )
        placeholder = reference()
        if placeholder is not None:  # the graph node may be gone already
            placeholder.tensor = tensor
        if self._restored == len(self._saved):
            raise _StopRecomputationError
        return tensor


class Chain:
    """Joins consecutive calls into segments of at most ``limit`` calls."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._open: ref[Segment] | None = None  # weak, so that only the graph keeps a segment alive

    def segment_for(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Segment:
        """Return the open segment if a call with these inputs continues it, else a new one."""
        segment = self._open() if self._open is not None else None
        if segment is None or len(segment) >= self.limit or not segment.continues(args, kwargs):
            segment = Segment()
            self._open = ref(segment)
        return segment

    def __reduce__(self) -> tuple[type[Chain], tuple[int]]:
        return Chain, (self.limit,)
