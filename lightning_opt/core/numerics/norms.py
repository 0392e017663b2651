"""L2 norms of one step's gradients, per tensor and in total.

On a CPU the norms are floats. On an accelerator they stay on the device as tensors, and the host
does not wait. For sharded gradients, one all-reduce per process group yields the norms of the whole
gradients.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from operator import attrgetter, is_

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from lightning_opt.core.modules.sharding import (
    Groups,
    combine_shards,
    is_dtensor,
    local_part,
    pending_groups,
    reads_are_free,
    reduce_each,
    shard_groups,
)
from lightning_opt.core.numerics.scalars import Scalar, move, wide_dtype

HALVES = frozenset({torch.float16, torch.bfloat16})
PLAIN = frozenset({Tensor, nn.Parameter})
DENSE = frozenset({torch.strided})
COMPLEX = frozenset({torch.complex64, torch.complex128})

# `map` with an `attrgetter` takes half the time of a comprehension.
_grad, _layout, _dtype = map(attrgetter, ("grad", "layout", "dtype"))


@dataclass(slots=True)
class Gradients:
    """The gradients of one optimizer as plain, dense, local tensors of real numbers.

    Attributes:
        parameters: The parameters that have a gradient.
        tensors: The gradients on this rank. They share memory with ``Parameter.grad``. To change
            gradients, scale these tensors. To measure gradients, use :meth:`summed`.
        groups: The process groups that hold the other shards of each tensor; empty if no tensor is
            sharded.
        pending: The process groups over which each tensor must still be summed; empty if there are
            none.
    """

    parameters: list[Tensor]
    tensors: list[Tensor]
    groups: list[Groups] = field(default_factory=list)
    pending: list[Groups] = field(default_factory=list)

    @property
    def on_host(self) -> bool:
        """Whether the scalars of these gradients (norms, factors) are Python floats."""
        return not self.tensors or reads_are_free(self.tensors[0].device)

    def summed(self) -> list[Tensor]:
        """Return the tensors, or copies with their pending sums completed. A collective."""
        return reduce_each(self.tensors, self.pending) if self.pending else self.tensors

    def scale_(self, coefficient: Scalar) -> None:
        """Multiply every gradient by ``coefficient`` in place, without waiting for the device."""
        if isinstance(coefficient, Tensor):
            for (device, dtype), indices in by_kind(self.tensors).items():
                # The fused kernel needs a factor of the gradients' dtype. Rounding keeps 1 exact.
                factor = move(coefficient, device).to(dtype)
                torch._foreach_mul_([self.tensors[index] for index in indices], factor)
        elif self.tensors:
            torch._foreach_mul_(self.tensors, coefficient)


@dataclass(slots=True)
class GradientNorms:
    """L2 norms of the true (unscaled, unsharded) gradients of one optimizer at one step.

    ``per_tensor`` is a list of floats on the host, or a tensor of shape ``(n,)`` on a device.
    """

    per_tensor: list[float] | Tensor
    total: Scalar


@dataclass(slots=True)
class GradientStep:
    """The gradients of one optimizer at one step. They may be changed in place.

    The gradients contain the factor ``grad_scale``. The norms have been divided by it.
    """

    gradients: Gradients
    norms: GradientNorms
    grad_scale: Scalar
    names: Mapping[Tensor, str]


def parameters_of(optimizer: Optimizer) -> list[Tensor]:
    """Return the parameters of all groups of ``optimizer``, in order."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def is_same(tensors: list[Tensor], others: list[Tensor]) -> bool:
    """Return whether both lists hold the same objects."""
    return len(tensors) == len(others) and all(map(is_, tensors, others))


def collect_gradients(
    parameters: Iterable[Tensor], flat: Mapping[Tensor, Groups] | None = None
) -> Gradients:
    """Collect the gradients of ``parameters``. Parameters without one are skipped.

    Sparse gradients are coalesced in place and represented by their values, complex gradients by
    their real and imaginary parts. A sharded parameter without a gradient on this rank is not
    skipped. It gets an empty tensor, so that all ranks have lists of the same length.
    """
    parameters = list(parameters)
    plain = PLAIN.issuperset(map(type, parameters))
    if flat or (not plain and any(map(is_dtensor, parameters))):
        return _collect_sharded(parameters, flat)
    tensors = [gradient for gradient in map(_grad, parameters) if gradient is not None]
    if len(tensors) < len(parameters):
        parameters = [parameter for parameter in parameters if parameter.grad is not None]
    if not (DENSE.issuperset(map(_layout, tensors)) and COMPLEX.isdisjoint(map(_dtype, tensors))):
        tensors = list(map(_dense, parameters, tensors))
    return Gradients(parameters, tensors)


def _collect_sharded(parameters: list[Tensor], flat: Mapping[Tensor, Groups] | None) -> Gradients:
    found = Gradients([], [])
    for parameter in parameters:
        gradient = parameter.grad
        # A gradient may have other placements than its parameter.
        source = parameter if gradient is None or not is_dtensor(gradient) else gradient
        groups = shard_groups(source, flat)
        if gradient is None:
            if not groups:
                continue
            gradient = local_part(parameter.detach()).new_empty(0)
        found.parameters.append(parameter)
        found.tensors.append(_dense(parameter, local_part(gradient)))
        found.groups.append(groups)
        found.pending.append(pending_groups(gradient))
    if not any(found.pending):
        found.pending = []
    return found


def _dense(parameter: Tensor, gradient: Tensor) -> Tensor:
    if gradient.layout is not torch.strided:
        if not gradient.is_coalesced():
            gradient = parameter.grad = gradient.coalesce()  # adds values of equal indices
        gradient = gradient.values()
    if gradient.is_conj():
        gradient = parameter.grad = gradient.resolve_conj()
    return as_real(gradient)


def as_real(tensor: Tensor) -> Tensor:
    """Return a complex tensor as real and imaginary parts that share its memory."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def measure_norms(gradients: Gradients, *, grad_scale: Scalar = 1.0) -> GradientNorms:
    """Measure the L2 norm of each gradient and of all together.

    Half-precision gradients are accumulated in float32. The norms of tensors are combined in
    float64, so the total cannot overflow before a tensor's own norm does. The square of a norm
    above about 1.8e19 overflows float32. Such a norm is computed again in float64 on a CPU, and is
    infinite on a device.

    Args:
        gradients: The result of :func:`collect_gradients`.
        grad_scale: The current factor of the gradients, such as a loss scale.

    Returns:
        The norms divided by ``grad_scale``.
    """
    if not gradients.tensors:
        return GradientNorms([], 0.0)
    tensors = gradients.summed()
    if not gradients.on_host:
        return _measure_on_device(tensors, gradients.groups, grad_scale)
    norms = _host_norms(tensors)
    if math.isinf(math.hypot(*norms)):
        norms = _host_norms(tensors, torch.float64)  # the squares of a finite gradient may overflow
    if gradients.groups:
        squares = torch.tensor(norms, dtype=torch.float64).square_()
        norms = combine_shards(squares, gradients.groups).sqrt_().tolist()  # on a CPU
    scale = float(grad_scale)
    if scale != 1.0:
        norms = [norm / scale for norm in norms]
    return GradientNorms(norms, math.hypot(*norms))


@torch.no_grad()  # tensors could keep a graph, floats cannot
def _measure_on_device(
    tensors: list[Tensor], groups: list[Groups], grad_scale: Scalar
) -> GradientNorms:
    device = tensors[0].device
    norms = torch.stack([move(norm, device) for norm in _device_norms(tensors)])
    norms = norms.to(wide_dtype(device))
    if groups:
        norms = combine_shards(norms.square(), groups).sqrt()
    if isinstance(grad_scale, Tensor) or grad_scale != 1.0:
        norms = norms / grad_scale
    return GradientNorms(norms, torch.linalg.vector_norm(norms))


def _host_norms(tensors: list[Tensor], dtype: torch.dtype | None = None) -> list[float]:
    """Return one norm per tensor, for tensors on a CPU."""
    dtypes = set(map(_dtype, tensors))
    if dtype is None and not dtypes.isdisjoint(HALVES):
        dtype = torch.float64 if torch.float64 in dtypes else torch.float32
    return list(map(Tensor.item, torch._foreach_norm(tensors, 2, dtype)))


def _device_norms(tensors: list[Tensor]) -> list[Tensor]:
    """Return one 0-dimensional norm per tensor, with one kernel per (device, dtype)."""
    norms: list[Tensor] = list(tensors)
    for (_, dtype), indices in by_kind(tensors).items():
        kind = [tensors[index] for index in indices]
        measured = torch._foreach_norm(kind, 2, torch.float32 if dtype in HALVES else None)
        for index, norm in zip(indices, measured, strict=True):
            norms[index] = norm
    return norms


def by_kind(tensors: list[Tensor]) -> dict[tuple[torch.device, torch.dtype], list[int]]:
    """Return the indices of the tensors by device and dtype: a foreach kernel takes one of each."""
    indices: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for index, tensor in enumerate(tensors):
        indices.setdefault((tensor.device, tensor.dtype), []).append(index)
    return indices


def nonfinite_names(tensors: Mapping[str, Tensor]) -> list[str]:
    """Return the names of tensors with a NaN or an infinity on this rank. Waits for the device.

    Quantized tensors whose subclass has no norm, and lazy tensors without values, are skipped.
    """
    parts = {n: _stored(local_part(t.detach())) for n, t in tensors.items() if not is_lazy(t)}
    finite: dict[str, Tensor] = {}
    for name, part in parts.items():
        if part.is_floating_point() and part.numel():
            # torch has no norm for float8. bfloat16 represents float8 values exactly.
            wide = part.bfloat16() if part.itemsize == 1 else part
            with suppress(NotImplementedError):
                # A maximum propagates NaN. Unlike a sum of squares it cannot overflow.
                finite[name] = torch.linalg.vector_norm(wide, math.inf).isfinite()
    if not finite:
        return []
    device = next(iter(finite.values())).device
    flags = torch.stack([flag.to(device) for flag in finite.values()]).tolist()
    return [name for name, flag in zip(finite, flags, strict=True) if not flag]


def _stored(tensor: Tensor) -> Tensor:
    """Return a tensor, or the values that a sparse tensor stores, as real numbers."""
    if tensor.layout is torch.strided:
        return as_real(tensor)
    return as_real((tensor.coalesce() if tensor.is_sparse else tensor).values())
