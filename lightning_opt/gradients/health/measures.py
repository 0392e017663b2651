"""Measure gradients, weights and activations for a health report, on their own device.

Only :func:`read_together` waits for a device.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lightning_opt.core.modules.batches import tensors_of
from lightning_opt.core.modules.compiling import has_compiled_parts
from lightning_opt.core.modules.patching import takes_hooks
from lightning_opt.core.modules.sharding import Groups, combine_shards, local_part, reads_are_free
from lightning_opt.core.numerics.norms import GradientStep, as_real, is_same
from lightning_opt.core.numerics.scalars import stack_scalars, wide_dtype
from lightning_opt.gradients.health.diagnosis import CRITICAL, WARNING, Issue

TARGET_SAMPLE = 8192
"""Target number of sampled weights per tensor; smaller tensors are compared in full."""


class NormWindow:
    """The gradient norms of the steps since the last report.

    Each step adds one list entry on the host, and no work on a device.
    """

    def __init__(self) -> None:
        self._parameters: list[Tensor] = []
        self._names: list[str] = []
        self._steps: list[tuple[list[str], Any, Any]] = []

    def append(self, step: GradientStep) -> None:
        parameters = step.gradients.parameters
        if not is_same(parameters, self._parameters):
            self._parameters = parameters
            self._names = [step.names[parameter] for parameter in parameters]
        self._steps.append((self._names, step.norms.total, step.norms.per_tensor))

    def blocks(self) -> list[tuple[list[str], Tensor]]:
        """Return one block for each run of consecutive steps with the same tensors.

        A block is the tensors' names and a tensor of norms on their device, of shape
        ``(steps, 1 + names)``. The first column is the total norm.
        """
        blocks = []
        for _, run in itertools.groupby(self._steps, lambda step: (id(step[0]), type(step[1]))):
            names, totals, norms = zip(*run, strict=True)
            stack = torch.stack if isinstance(totals[0], Tensor) else torch.DoubleTensor
            rows = torch.cat([stack(totals)[:, None], stack(norms)], 1)
            blocks.append((names[0], rows))
        return blocks

    def move_to_host(self) -> list[tuple[list[str], NDArray[Any]]]:
        """Move the norms to the host, drop references to the parameters, and return the blocks."""
        blocks = self.blocks()
        read = read_together([rows for _, rows in blocks])
        on_host = [(names, rows) for (names, _), rows in zip(blocks, read, strict=True)]
        self.restore([(names, rows.tolist()) for names, rows in on_host])
        return on_host

    def restore(self, blocks: Sequence[tuple[list[str], Sequence[Sequence[float]]]]) -> None:
        self._parameters = []
        self._steps = [(names, total, norms) for names, rows in blocks for total, *norms in rows]


@torch.no_grad()
def measure_gradients(step: GradientStep) -> Tensor:
    """Measure the gradients of whole parameters, also if they are sharded.

    All ranks must call this: one sum and one maximum per process group combine the shards.

    Returns:
        A table on the device with one column per gradient: largest magnitude (without the loss
        scale, 0 if not finite); non-zero elements; elements; and number of ranks with a gradient.
    """
    gradients = step.gradients
    if not gradients.tensors:
        return torch.zeros(4, 0)
    tensors = gradients.summed()
    device, wide = tensors[0].device, wide_dtype(tensors[0].device)
    largest = torch.stack([largest_magnitude(t).to(device, wide) for t in tensors])
    largest = largest.nan_to_num_(0.0, 0.0) / step.grad_scale
    # A shard without a gradient is an empty tensor, so count the parameter's elements.
    numels = [float(as_real(local_part(p.detach())).numel()) for p in gradients.parameters]
    present = [float(parameter.grad is not None) for parameter in gradients.parameters]
    nonzero = torch.stack([torch.count_nonzero(tensor).to(device) for tensor in tensors])
    counts = torch.tensor([numels, present], dtype=wide, device=device)
    sums = torch.cat([nonzero[None].to(wide), counts])
    if gradients.groups:
        sums = combine_shards(sums, gradients.groups)
        largest = combine_shards(largest, gradients.groups, torch.distributed.ReduceOp.MAX)
    return torch.cat([largest[None], sums])


def largest_magnitude(tensor: Tensor) -> Tensor:
    """Return the largest magnitude in a tensor: NaN if an element is NaN, 0 for no elements."""
    if not tensor.numel():
        return tensor.new_zeros(())
    if not reads_are_free(tensor.device):
        largest: Tensor = torch.linalg.vector_norm(tensor, math.inf)  # one kernel
        return largest
    low, high = torch.aminmax(tensor)  # 20 times as fast as the inf-norm
    return torch.maximum(-low, high)


class UpdateProbe:
    """Compares the weights before and after one update, on a sample of each tensor.

    A copy of all weights could exceed the memory. The sample is every k-th weight on this rank. A
    tensor of fewer than 16,384 weights is compared in full.

    Args:
        parameters: The parameters, before the update.
        groups: As in :class:`~lightning_opt.core.numerics.norms.Gradients`.
    """

    def __init__(self, parameters: list[Tensor], groups: list[Groups]) -> None:
        self._parameters, self._groups = parameters, groups
        self._before = [_sample(parameter).clone() for parameter in parameters]

    @torch.no_grad()
    def compare(self) -> Tensor:
        """Return the squared norms of updates and of earlier weights, shape ``(2, n)``.

        All ranks must call this.
        """
        if not self._before:
            return torch.zeros(2, 0)
        after = [_sample(parameter) for parameter in self._parameters]
        update = [new - old for new, old in zip(after, self._before, strict=True)]
        norms = [torch.linalg.vector_norm(part) for part in (*update, *self._before)]
        device = norms[0].device
        squares = torch.stack([norm.to(device, wide_dtype(device)) for norm in norms]).square()
        squares = squares.view(2, len(update))
        return combine_shards(squares, self._groups) if self._groups else squares


def _sample(parameter: Tensor) -> Tensor:
    flat = as_real(local_part(parameter.detach())).reshape(-1)
    stride = max(flat.numel() // TARGET_SAMPLE, 1)
    while math.gcd(stride, flat.numel()) > 1:  # a common factor would never sample some columns
        stride += 1
    return flat[::stride].to(torch.promote_types(flat.dtype, torch.float32))


def read_together(tensors: Sequence[Tensor]) -> list[NDArray[Any]]:
    """Return several tensors as arrays of float64, waiting for the device once."""
    if not tensors:
        return []
    device = tensors[0].device
    flat = [tensor.detach().to(device, wide_dtype(device)).reshape(-1) for tensor in tensors]
    values = torch.cat(flat).numpy(force=True)  # the only read of a report
    ends = itertools.accumulate(tensor.numel() for tensor in tensors)
    parts = np.split(values.astype(np.float64), list(ends)[:-1])
    return [part.reshape(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]


class ActivationWatch:
    """Finds the first non-finite output of a leaf module.

    Each module output costs one reduction. Only :meth:`take` reads results. Compiled models and
    functional calls are not watched.
    """

    def __init__(self) -> None:
        self._handles: list[RemovableHandle] = []
        self._outputs: list[tuple[str, Tensor]] = []  # names and magnitudes of this batch
        self._batches: list[tuple[int, int, tuple[str, ...], Tensor]] = []
        self._batch: tuple[int, int] | None = None  # the epoch and number of a batch that runs

    def __deepcopy__(self, memo: dict[int, Any]) -> ActivationWatch:
        return ActivationWatch()  # a copy of the model keeps its hooks, and nobody reads them

    def watch(self, model: nn.Module) -> bool:
        """Add the hooks. Return False if there are none, as for a compiled model."""
        self.stop()
        if has_compiled_parts(model):
            return False
        for name, module in model.named_modules():
            if name and next(module.children(), None) is None and takes_hooks(module):
                self._handles.append(module.register_forward_hook(partial(self._measure, name)))
        return bool(self._handles)

    def stop(self) -> None:
        """Remove the hooks and reset all state."""
        for handle in self._handles:
            handle.remove()
        self.__init__()  # type: ignore[misc]

    def start_batch(self, epoch: int, batch: int) -> None:
        self._batch = (epoch, batch)

    @torch.no_grad()
    def _measure(self, name: str, module: nn.Module, inputs: Any, output: Any) -> None:
        for tensor in () if self._batch is None else tensors_of(output):
            # Sparse tensors have no maximum. One of `torch.vmap` cannot be read after the call.
            is_readable = tensor.layout in (torch.strided, torch.jagged)
            is_open = not torch._C._functorch.is_functorch_wrapped_tensor(tensor)
            if is_readable and is_open and tensor.is_floating_point():
                # Each rank checks its own part of a DTensor.
                own = tensor.values() if tensor.is_nested else local_part(tensor.detach())
                largest = largest_magnitude(own)
                self._outputs.append((name, largest.to(wide_dtype(tensor.device))))

    def end_batch(self) -> None:
        """Deactivate the hooks, and locate the batch's first bad output on the device."""
        batch, self._batch = self._batch, None
        if batch is None or not self._outputs:
            return
        names, magnitudes = zip(*self._outputs, strict=True)
        self._outputs = []
        values = stack_scalars(magnitudes)
        bad = values.isfinite().logical_not()
        first = bad.to(torch.int8).argmax()[None]
        is_nan = values.index_select(0, first).isnan()  # `values[first]` would wait
        found = torch.cat([bad.any()[None], first, is_nan])
        self._batches.append((*batch, names, found))

    def take(self, *, scaled: bool) -> tuple[Issue, ...]:
        """Return the first bad output since the last call, if any. Waits for the device.

        Args:
            scaled: Whether a loss scaler skips bad steps. They are then not critical.
        """
        batches, self._batches = self._batches, []
        rows = read_together([found for *_, found in batches])
        for (epoch, index, names, _), row in zip(batches, rows, strict=True):
            bad, place, is_nan = map(int, row)
            if bad:
                kind = "nan" if is_nan else "inf"
                detail = (
                    f"the first {kind.upper()} came out of this module, or entered it from code "
                    f"between modules, at epoch {epoch}, batch {index}"
                )
                return (Issue(kind, WARNING if scaled else CRITICAL, names[place], detail),)
        return ()
