"""Consecutive blocks that are recomputed together, so that only the first one's inputs are kept.

torch's ``checkpoint`` cannot do this: it takes one function, and a model calls its blocks one by
one.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from lightning_opt.core.modules.batches import tensors_of

if TYPE_CHECKING:
    from lightning_opt.memory.checkpointing.forward import Run


ADVICE = "Its blocks do not compute the same twice: do not checkpoint them."


class _Placeholder:
    """Replaces a saved tensor in the graph; holds the recomputed tensor until it is used."""

    tensor: Tensor | None = None


class _Input(NamedTuple):
    """Replaces a tensor in the arguments of a call.

    It is an output of an earlier call of the segment, or, if ``call`` is None, a kept tensor.
    """

    call: int | None
    position: int
    requires_grad: bool = False


class _Keep(torch.autograd.Function):
    """Saves tensors with autograd, which checks that nothing writes to them."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors)
        return torch.empty(0)


class _Call(NamedTuple):
    run: Run
    leaves: list[Any]
    kept: Any  # the output of `_Keep`; None if no tensor comes from outside the segment
    autocast: list[dict[str, Any]]

    def repeat(self, outputs: list[list[Tensor]]) -> Any:
        kept = () if self.kept is None else self.kept.grad_fn.saved_tensors
        leaves = list(self.leaves)
        for index, leaf in enumerate(leaves):
            if isinstance(leaf, _Input):
                leaves[index] = (
                    kept[leaf.position].detach().requires_grad_(leaf.requires_grad)
                    if leaf.call is None
                    else outputs[leaf.call][leaf.position]
                )
        with ExitStack() as stack:
            for settings in self.autocast:
                stack.enter_context(torch.autocast(**settings))
            stack.enter_context(self.run)
            return self.run(*leaves)


def _autocast_settings(devices: Iterable[torch.device]) -> list[dict[str, Any]]:
    return [
        {
            "device_type": device_type,
            "enabled": torch.is_autocast_enabled(device_type),
            "dtype": torch.get_autocast_dtype(device_type),
            "cache_enabled": torch.is_autocast_cache_enabled(),
        }
        for device_type in {"cpu", *(device.type for device in devices)}
        if torch.amp.is_autocast_available(device_type)
    ]


class _StopRecomputationError(Exception):
    """Ends a recomputation once every saved tensor is available again."""


class Segment:
    """The calls of one forward pass that are recomputed together."""

    def __init__(self) -> None:
        self._calls: list[_Call] = []
        self._outputs: list[list[tuple[ref[Tensor], int]]] = []  # with their versions
        self._saved: list[tuple[ref[_Placeholder], torch.Size, torch.dtype]] = []
        self._restored = 0

    def __len__(self) -> int:
        return len(self._calls)

    def continues(self, leaves: list[Any]) -> bool:
        """Return whether an input is an unchanged output of the latest call."""
        last = len(self) - 1
        found = (self._find(leaf) for leaf in leaves if isinstance(leaf, Tensor))
        return any(place is not None and place.call == last for place in found)

    def run(self, run: Run, leaves: list[Any]) -> Any:
        """Call a block, and record the call for the recomputation."""
        places = list(leaves)
        kept: list[Tensor] = []
        for index, leaf in enumerate(leaves):
            if isinstance(leaf, Tensor):
                places[index] = self._find(leaf)
                if places[index] is None:
                    places[index] = _Input(None, len(kept), leaf.requires_grad)
                    kept.append(leaf.detach())  # its graph may reference this segment
        keeper = None
        if kept:
            anchor = torch.empty(0, requires_grad=True)  # makes autograd create a node
            # Hold the output tensor: up to torch 2.11, a node held alone frees its saved tensors.
            keeper = _Keep.apply(anchor, *kept)  # type: ignore[no-untyped-call]
        self._calls.append(_Call(run, places, keeper, _autocast_settings(run.devices)))
        with saved_tensors_hooks(self._pack, self._unpack):
            output = run(*leaves)
        self._outputs.append([(ref(tensor), tensor._version) for tensor in tensors_of(output)])
        return output

    def _find(self, tensor: Tensor) -> _Input | None:
        for call, outputs in enumerate(self._outputs):
            for position, (output, version) in enumerate(outputs):
                if output() is tensor and tensor._version == version:
                    return _Input(call, position)
        return None

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
        raise RuntimeError(f"A recomputed segment saved fewer tensors than before. {ADVICE}")

    def _restore(self, tensor: Tensor) -> Tensor:
        if tensor.requires_grad:
            tensor = tensor.detach()
        index = self._restored
        reference, shape, dtype = self._saved[index]
        self._restored += 1
        if (tensor.shape, tensor.dtype) != (shape, dtype):
            raise RuntimeError(
                f"Tensor {index} saved by a recomputed segment is {tensor.dtype} of shape "
                f"{tuple(tensor.shape)}; before it was {dtype} of shape {tuple(shape)}. {ADVICE}"
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

    def run(self, run: Run, leaves: list[Any]) -> Any:
        """Call a block in the open segment if its inputs continue it, else in a new one."""
        segment = self._open() if self._open is not None else None
        if segment is None or len(segment) >= self.limit or not segment.continues(leaves):
            segment = Segment()
            self._open = ref(segment)
        return segment.run(run, leaves)

    def __reduce__(self) -> tuple[type[Chain], tuple[int]]:
        return Chain, (self.limit,)
