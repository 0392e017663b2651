"""What is measured of gradients and weights for a health report, on their own device.

Nothing in this module waits for a device except :func:`read_together`, which a report calls once.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_opt.core.norms import GradientStep
from lightning_opt.core.scalars import wide_dtype
from lightning_opt.core.sharding import Groups, combine_shards, local_part, wants_host

SAMPLE = 8192
"""Weights a tensor, at least, that an update is measured on where there are more."""

BLOCK = 256
"""Steps after which a window's norms are summed up, so that no schedule makes it large."""


def digest_norms(norms: Tensor, totals: Tensor) -> Tensor:
    """Sum up the norms of some steps, without reading them.

    Args:
        norms: Shape ``(steps, tensors)``, float64 where the device has it.
        totals: Shape ``(steps,)``.

    Returns:
        Shape ``(steps + 7 * tensors,)``: the totals; then for each tensor the number, the mean and
        the summed squared deviation of its finite norms, how many were NaN, how many infinite, the
        index of the first that was not finite (0 if none), and the norm at the step with the
        largest finite total.
    """
    finite = norms.isfinite()
    count = finite.sum(0).to(norms.dtype)
    mean = torch.where(finite, norms, 0.0).sum(0) / count.clamp(min=1)
    spread = torch.where(finite, norms - mean, 0.0).square().sum(0)
    nan, inf = norms.isnan().sum(0), norms.isinf().sum(0)
    first = finite.logical_not().to(torch.int8).argmax(0)
    peak = torch.where(totals.isfinite(), totals, -math.inf).argmax()
    return torch.cat(
        [totals, count, mean, spread, nan, inf, first, norms.index_select(0, peak[None])[0]]
    )


@dataclass(slots=True)
class NormDigest:
    """What :func:`digest_norms` found of one block of steps, on the host.

    Attributes:
        names: The tensors, in the order of the lists.
        first_step: The number of the block's first step.
        totals: The total norm of each step.
        columns: The seven lists of :func:`digest_norms`.
    """

    names: list[str]
    first_step: int
    totals: list[float]
    columns: list[list[float]]

    @classmethod
    def unpack(cls, names: list[str], first_step: int, packed: list[float]) -> NormDigest:
        """Return the digest that :func:`digest_norms` packed into one row."""
        n = len(names)
        steps = len(packed) - 7 * n
        columns = [packed[start : start + n] for start in range(steps, len(packed), n)] if n else []
        return cls(list(names), first_step, packed[:steps], columns)


class NormWindow:
    """The norms of the steps since the last report: kept as they come, summed up when asked.

    A step costs two list entries on the host, and nothing on a device.
    """

    def __init__(self) -> None:
        self._parameters: list[Tensor] = []
        self._names: list[str] = []
        self._first_step = 0
        self._norms: list[Any] = []
        self._totals: list[Any] = []
        self._packed: list[tuple[list[str], int, Tensor]] = []

    def append(self, step: GradientStep, number: int) -> None:
        """Take in the norms of step ``number``; the numbers of a run follow each other."""
        parameters = step.gradients.parameters
        if (
            len(parameters) != len(self._parameters)
            or not all(map(operator.is_, parameters, self._parameters))
            or len(self._totals) >= BLOCK
        ):
            self._close()
            self._parameters = parameters
            self._names = [step.names[parameter] for parameter in parameters]
        if not self._totals:
            self._first_step = number
        self._norms.append(step.norms.per_tensor)
        self._totals.append(step.norms.total)

    def _close(self) -> None:
        if self._totals and self._names:
            totals, norms = _stacked(self._totals), _stacked(self._norms)
            self._packed.append((self._names, self._first_step, digest_norms(norms, totals)))
        self._norms, self._totals = [], []

    def take(self) -> list[tuple[list[str], int, Tensor]]:
        """Return names, first step and packed digest of each block, and start anew."""
        self._close()
        packed, self._packed = self._packed, []
        return packed

    def clear(self) -> None:
        """Forget everything, the parameters too."""
        self.__init__()  # type: ignore[misc]


def _stacked(values: list[Any]) -> Tensor:
    if isinstance(values[0], Tensor):
        return torch.stack(values)
    return torch.tensor(values, dtype=torch.float64)


@dataclass(slots=True)
class GradientTable:
    """What :func:`measure_gradients` measured: one column a tensor, still on the device.

    Attributes:
        names: The tensors, in the order of the columns.
        values: Shape ``(5, tensors)``: norm; largest finite magnitude (without the loss scale);
            whether there is a NaN, and an Inf (above 0 if so); how many elements are not zero.
        numels: How many elements each tensor has; None where ``counts`` says it.
        counts: Shape ``(2, tensors)`` for shards: elements, and the ranks that hold a gradient.
    """

    names: list[str]
    values: Tensor
    numels: list[int] | None = None
    counts: Tensor | None = None

    def tensors(self) -> list[Tensor]:
        """Return what has to be read to the host."""
        return [self.values] if self.counts is None else [self.values, self.counts]

    def unpack(self, read: Sequence[list[float]]) -> dict[str, dict[str, float]]:
        """Return the columns by name, from what was read of :meth:`tensors`."""
        n = len(self.names)
        rows = [read[0][i * n : (i + 1) * n] for i in range(5)]
        if self.counts is None:
            rows += [[float(count) for count in self.numels or []], [1.0] * n]
        else:
            rows += [read[1][:n], read[1][n:]]
        fields = ("norm", "max", "nan", "inf", "nonzero", "numel", "present")
        return {
            name: dict(zip(fields, column, strict=True))
            for name, column in zip(self.names, zip(*rows, strict=True), strict=True)
        }


@torch.no_grad()
def measure_gradients(step: GradientStep) -> GradientTable:
    """Measure more of a step's gradients than their norms, of whole tensors where they are sharded.

    All ranks call it together: shards are combined with one sum and one maximum a process group.
    """
    gradients = step.gradients
    names = [step.names[parameter] for parameter in gradients.parameters]
    tensors = gradients.tensors
    device = tensors[0].device if tensors else torch.device("cpu")
    wide = wide_dtype(device)
    if not tensors:
        return GradientTable([], torch.zeros(5, 0, dtype=wide), [])
    largest = _largest(tensors).to(wide)
    nan, inf = largest.isnan(), largest.isinf()
    largest = torch.where(nan | inf, 0.0, largest) / step.grad_scale
    sums = torch.stack([nan.to(wide), inf.to(wide), _nonzeros(tensors).to(wide)])
    counts = None
    if gradients.groups:
        present = [float(parameter.grad is not None) for parameter in gradients.parameters]
        numels = [float(local_part(p.detach()).numel()) for p in gradients.parameters]
        counts = torch.tensor([numels, present], dtype=wide, device=device)
        whole = combine_shards(torch.cat([sums, counts]), gradients.groups)
        sums, counts = whole[:3], whole[3:]
        largest = combine_shards(largest[None], gradients.groups, torch.distributed.ReduceOp.MAX)[0]
    norms = step.norms.per_tensor
    norms = norms if isinstance(norms, Tensor) else torch.tensor(norms, dtype=wide, device=device)
    values = torch.cat([norms[None].to(wide), largest[None], sums])
    return GradientTable(names, values, [tensor.numel() for tensor in tensors], counts)


def _largest(tensors: list[Tensor]) -> Tensor:
    """Return the largest magnitude of each tensor, NaN where it has one."""
    # The maximum of nothing is an error; a shard may be empty.
    tensors = [tensor if tensor.numel() else tensor.new_zeros(1) for tensor in tensors]
    if not wants_host(tensors[0].device):
        return norms_of(tensors, math.inf)
    extremes = [torch.aminmax(tensor) for tensor in tensors]  # 20 times the speed of the inf-norm
    low, high = (torch.stack([pair[i].double() for pair in extremes]) for i in (0, 1))
    return torch.maximum(-low, high)


def _nonzeros(tensors: list[Tensor]) -> Tensor:
    """Return how many elements of each tensor are not zero; NaN counts as one."""
    if wants_host(tensors[0].device):
        return torch.stack([torch.count_nonzero(tensor) for tensor in tensors])  # twice the speed
    return norms_of(tensors, 0)


def norms_of(tensors: list[Tensor], order: float) -> Tensor:
    """Return the norm of each tensor as one tensor on the first one's device, shape ``(n,)``."""
    dtypes = {tensor.dtype for tensor in tensors}
    dtype = torch.float64 if torch.float64 in dtypes else torch.float32
    device = tensors[0].device
    return torch.stack([n.to(device) for n in torch._foreach_norm(tensors, order, dtype)])


class UpdateProbe:
    """Compares the weights before and after one update, on a sample of each tensor.

    A copy of all weights for the sake of one ratio might be what a run has no memory for. The
    sample is every k-th weight of what this rank holds; a tensor of fewer than 16,384 weights is
    compared in full.

    Args:
        names: What the parameters are called.
        parameters: The parameters, before the update.
        groups: As in :class:`~lightning_opt.core.norms.Gradients`.
    """

    def __init__(self, names: list[str], parameters: list[Tensor], groups: list[Groups]) -> None:
        self.names = names
        self._parameters, self._groups = parameters, groups
        self._before = [_sample(parameter).clone() for parameter in parameters]

    @torch.no_grad()
    def compare(self) -> Tensor:
        """Return the summed squares of the update and of the weights before, shape ``(2, n)``.

        All ranks call it together.
        """
        before, self._before = self._before, []
        after = [_sample(parameter) for parameter in self._parameters]
        change = torch.stack(
            [norms_of(torch._foreach_sub(after, before), 2), norms_of(before, 2)]  # type: ignore[arg-type]
        )
        squares = change.to(wide_dtype(change.device)).square()
        return combine_shards(squares, self._groups) if self._groups else squares


def _sample(parameter: Tensor) -> Tensor:
    flat = local_part(parameter.detach()).reshape(-1)
    stride = max(flat.numel() // SAMPLE, 1)
    while math.gcd(stride, flat.numel()) > 1:  # else it would stay within some of the columns
        stride += 1
    return flat[::stride]


def read_together(tensors: Sequence[Tensor]) -> list[list[float]]:
    """Read several tensors to the host as flat lists, waiting for the device once."""
    if not tensors:
        return []
    device = tensors[0].device
    flat = [tensor.detach().to(device, wide_dtype(device)).reshape(-1) for tensor in tensors]
    values = torch.cat(flat).tolist()  # the one read of a report
    ends = [0]
    for tensor in flat:
        ends.append(ends[-1] + tensor.numel())
    return [values[start:end] for start, end in itertools.pairwise(ends)]
