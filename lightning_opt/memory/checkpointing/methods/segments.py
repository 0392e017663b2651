"""Recomputing several blocks that ran one after the other as one.

``torch.utils.checkpoint.checkpoint`` takes one function. A model that loops over its blocks calls
them one by one, and what happens between two calls is its own business, so a stretch of them cannot
be handed to it. A :class:`Segment` is the same non-reentrant idea for a list of calls: saved
tensors are replaced by placeholders while a block runs, and the first placeholder that the backward
pass asks for runs all calls of the segment again.
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
from lightning_opt.memory.checkpointing.methods.offloading import fetched, put_away

Function = Callable[..., Any]


class _Placeholder:
    """Stands in the graph for a saved tensor, and holds it from the recomputation to its use."""

    tensor: Tensor | None = None


class _OutputOf(NamedTuple):
    """Stands among the inputs of a call for an output of an earlier call of the segment."""

    call: int
    place: int


class _Input:
    """A tensor from outside, held without its graph, for the graph leads back to the segment."""

    def __init__(self, tensor: Tensor) -> None:
        self.held, self.version = put_away(tensor), tensor._version
        self.requires_grad = tensor.requires_grad

    def get(self) -> Tensor:
        # Autograd checks no versions of what it has not saved.
        if isinstance(self.held, Tensor) and self.held._version != self.version:
            raise RuntimeError(
                f"An input of a checkpointed block, of shape {tuple(self.held.shape)}, was changed "
                "in place after the block had run, so the block cannot be recomputed. Use an "
                "out-of-place operation there, or leave this block out."
            )
        return fetched(self.held).detach().requires_grad_(self.requires_grad)


class _Output:
    """Recognises an output of a call among the inputs of a later one."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = ref(tensor)
        self.version = tensor._version

    def is_still(self, value: Any) -> bool:
        """Return whether ``value`` is this very tensor, not written since."""
        tensor = self.tensor()
        return tensor is not None and tensor is value and tensor._version == self.version


class _EnoughError(Exception):
    """Ends a recomputation as soon as every saved tensor is there again."""


class _Call(NamedTuple):
    function: Function
    leaves: list[Any]
    spec: TreeSpec

    def repeat(self, outputs: list[list[Tensor]]) -> Any:
        leaves = [
            leaf.get()
            if isinstance(leaf, _Input)
            else outputs[leaf.call][leaf.place]
            if isinstance(leaf, _OutputOf)
            else leaf
            for leaf in self.leaves
        ]
        args, kwargs = tree_unflatten(leaves, self.spec)
        return self.function(*args, **kwargs)


class Segment:
    """The calls of one forward pass that are recomputed together.

    Of the inputs, those that are outputs of an earlier call of the segment are not kept.
    """

    def __init__(self) -> None:
        self._calls: list[_Call] = []
        self._outputs: list[list[_Output]] = []
        self._saved: list[tuple[ref[_Placeholder], torch.Size, torch.dtype]] = []
        self._refilled = 0

    def __len__(self) -> int:
        return len(self._calls)

    def continues(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Return whether an input is an output of the latest call, unchanged."""
        return any(
            output.is_still(leaf)
            for leaf in tree_flatten((args, kwargs))[0]
            for output in self._outputs[-1]
        )

    def run(
        self, function: Function, repeat: Function, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Call ``function``, and ``repeat`` when it is recomputed."""
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
            for place, output in enumerate(outputs):
                if output.is_still(leaf):
                    return _OutputOf(call, place)
        return _Input(leaf)

    def _pack(self, tensor: Tensor) -> _Placeholder:
        placeholder = _Placeholder()
        self._saved.append((ref(placeholder), tensor.shape, tensor.dtype))
        return placeholder

    def _unpack(self, placeholder: _Placeholder) -> Tensor:
        if placeholder.tensor is None:  # never recomputed, or used by an earlier backward pass
            self._recompute()
        tensor, placeholder.tensor = placeholder.tensor, None
        assert tensor is not None
        return tensor

    def _recompute(self) -> None:
        self._refilled = 0
        outputs: list[list[Tensor]] = []
        try:
            with torch.enable_grad(), saved_tensors_hooks(self._refill, lambda tensor: tensor):
                for call in self._calls:
                    outputs.append(list(tensors_of(call.repeat(outputs))))
        except _EnoughError:
            return
        raise RuntimeError(
            f"A recomputed segment saved {self._refilled} tensors, {len(self._saved)} the first "
            "time: its blocks do not compute the same twice. Leave them out."
        )

    def _refill(self, tensor: Tensor) -> Tensor:
        tensor = tensor.detach()
        index = self._refilled
        reference, shape, dtype = self._saved[index]
        self._refilled += 1
        if (tensor.shape, tensor.dtype) != (shape, dtype):
            raise RuntimeError(
                f"Saved tensor {index} of a recomputed segment is {tensor.dtype} of shape "
                f"{tuple(tensor.shape)}; the first time it was {dtype} of "
                f"{tuple(shape)}. Its blocks do not compute the same twice."
            )
        placeholder = reference()
        if placeholder is not None:  # its node may have been freed in the meantime
            placeholder.tensor = tensor
        if self._refilled == len(self._saved):
            raise _EnoughError
        return tensor


class Chain:
    """Joins calls that follow one another into segments of at most ``limit`` calls."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._open: ref[Segment] | None = None  # weak: the graph alone keeps a segment alive

    def segment_for(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Segment:
        """Return the segment that a call with these inputs belongs to."""
        segment = self._open() if self._open is not None else None
        if segment is None or len(segment) >= self.limit or not segment.continues(args, kwargs):
            segment = Segment()
            self._open = ref(segment)
        return segment

    def __reduce__(self) -> tuple[type[Chain], tuple[int]]:
        return Chain, (self.limit,)
