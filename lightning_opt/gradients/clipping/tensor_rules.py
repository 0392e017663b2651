"""Rules that clip per tensor, per unit or per element."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from lightning_opt.core.arguments import check_at_least, check_fraction, check_positive
from lightning_opt.core.modules.sharding import (
    UNSHARDED,
    Groups,
    is_dtensor,
    local_part,
    mesh_groups,
    reduce_each,
)
from lightning_opt.core.numerics.norms import GradientStep, as_real, by_kind
from lightning_opt.core.numerics.scalars import constant, move, stack_scalars, wide_dtype
from lightning_opt.core.numerics.statistics import State
from lightning_opt.gradients.clipping.norm_rules import Clip, ClippingRule
from lightning_opt.gradients.gradient_callback import plain_name

TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)

MAX_STACKED_ELEMENTS = 2**20
"""On a GPU, tensors of the same shape with at most this many elements are stacked.

One kernel then measures the units of all of them. A larger tensor keeps the GPU busy by itself,
so stacking would only cost a copy.
"""


class FixedValue(ClippingRule):
    """Clamps each element to ``[-max_value, max_value]``, as ``clip_grad_value_`` does.

    This changes the direction of the gradient. If any gradient has a NaN or an infinity, all stay
    unchanged, so that a guard or a loss scaler still finds it.

    ``Clip.clipped`` is the share of tensors with an element over the bound. With sharded gradients
    it counts only this rank's shards.

    Args:
        max_value: The largest magnitude of an element, above 0.
    """

    def __init__(self, max_value: float = 1.0) -> None:
        self.max_value = check_positive("max_value", max_value)

    def clip(self, step: GradientStep, state: State) -> Clip:
        """Clamp the elements of every gradient in place."""
        both = zip(step.gradients.tensors, step.gradients.summed(), strict=True)
        pairs = [(tensor, whole) for tensor, whole in both if tensor.numel()]
        if not pairs:
            return Clip(0.0)
        tensors = [tensor for tensor, whole in pairs if whole is tensor]
        partial_pairs = [(tensor, whole) for tensor, whole in pairs if whole is not tensor]
        device = pairs[0][0].device
        norms = torch._foreach_norm([whole for _, whole in pairs], math.inf)
        largest = torch.stack([move(norm, device) for norm in norms])
        # 0 times a non-finite norm is NaN. The limit then becomes infinite and clamps nothing.
        limit = constant(step.norms.total * 0.0 + self.max_value * step.grad_scale, device)
        limit.nan_to_num_(math.inf)
        over = largest > limit
        if not step.gradients.on_host or over.any():
            for (group_device, dtype), indices in by_kind(tensors).items():
                group = [tensors[index] for index in indices]
                high = move(limit, group_device).to(dtype)
                torch._foreach_clamp_max_(group, [high] * len(group))
                torch._foreach_clamp_min_(group, [-high] * len(group))
            for tensor, whole in partial_pairs:
                tensor.mul_((limit / whole.abs()).clamp_(max=1.0))
        return Clip(over.mean(dtype=wide_dtype(device)))


class PerParameter(ClippingRule):
    """AdaGC: limits each tensor's norm to ``factor`` times its own average so far.

    For the first ``warmup`` steps the total norm is limited to ``warmup_norm``, and each tensor's
    average is the smallest of its clipped norms. After that it is the exponential average of the
    clipped norms.

    There are two differences from the paper. First, a norm of zero never enters an average:
    a limit of zero would keep the gradient at zero for good. Second, if a tensor first has a
    gradient after the warm-up, its average starts from its own norm.

    ``Clip.clipped`` is the share of tensors that were clipped.

    Args:
        factor: Largest ratio of a tensor's norm to its average (lambda_rel), above 0.
        decay: Share of the average that is kept at each step (beta), in [0, 1).
        warmup: Steps that use the global bound, at least 1.
        warmup_norm: The global bound (lambda_abs), above 0.

    References:
        Wang, Li, Chen, Zeng, Yang, Yu, Ma and Shen (2025), *AdaGC: Improving Training Stability for
        Large Language Model Pretraining*.
    """

    def __init__(
        self, factor: float = 1.05, decay: float = 0.98, warmup: int = 100, warmup_norm: float = 1.0
    ) -> None:
        self.factor, self.decay = check_positive("factor", factor), check_fraction("decay", decay)
        self.warmup = check_at_least("warmup", warmup, 1)
        self.warmup_norm = check_positive("warmup_norm", warmup_norm)

    def init(self) -> State:
        """Return the state before any step: the number of steps, and the averages by name."""
        return {"count": 0, "averages": {}}

    def clip(self, step: GradientStep, state: State) -> Clip:
        """Scale each gradient in place by its own coefficient."""
        tensors = step.gradients.tensors
        norms = constant(step.norms.per_tensor, tensors[0].device)
        total = torch.as_tensor(step.norms.total, dtype=norms.dtype)
        names = [step.names[parameter] for parameter in step.gradients.parameters]
        # Averages start at infinity, so a new tensor is not clipped.
        known = [state["averages"].get(name, math.inf) for name in names]
        average = stack_scalars(known).to(norms.device)
        finite = total < math.inf
        warming_up = torch.as_tensor(state["count"] < self.warmup, device=norms.device)
        limit = torch.where(warming_up, norms * (self.warmup_norm / total), self.factor * average)
        over = (norms > limit) & finite
        coefficient = (limit / norms).masked_fill_(over.logical_not(), 1.0)
        clipped_norms = norms * coefficient
        next_average = average.lerp(clipped_norms, 1.0 - self.decay)
        starting = warming_up | (average == math.inf)
        updated = torch.where(starting, torch.minimum(average, clipped_norms), next_average)
        average = torch.where(finite & (clipped_norms > 0), updated, average)
        state["averages"].update(zip(names, average.unbind(), strict=True))
        state["count"] = state["count"] + finite

        if not step.gradients.on_host or over.any():  # `any` is read only on a CPU
            pairs = zip(coefficient.unbind(), tensors, strict=True)
            torch._foreach_mul_(tensors, [move(factor, tensor.device) for factor, tensor in pairs])
        return Clip(over.mean(dtype=norms.dtype), coefficient=coefficient.min())


class UnitWise(ClippingRule):
    """AGC: limits the gradient norm of each unit to ``clip_factor`` times its weights' norm.

    A unit holds the weights of one output: a row of a linear layer, or a filter of a convolution.
    The outputs are the first dimension; in a transposed convolution they are the second. A tensor
    with at most one dimension larger than 1, such as a bias or a gain, is one unit.

    ``Clip.clipped`` is the share of units that were clipped.

    Args:
        clip_factor: Largest ratio of gradient to weight norm, above 0. The paper uses 0.01 for
            large batches of images.
        eps: Lower bound of weight norms. Without it a zero-initialised layer would stay at zero.
        exclude: Parameters that are not clipped. ``"final_linear"`` excludes the linear layer that
            the model registers last: the paper excludes the output layer. A list such as
            ``["head.*"]`` excludes parameters whose names match a pattern. ``None`` excludes none.

    References:
        Brock, De, Smith and Simonyan (2021), *High-Performance Large-Scale Image Recognition
        Without Normalization*.
    """

    needs_whole_tensors: ClassVar[bool] = True

    def __init__(
        self,
        clip_factor: float = 0.01,
        eps: float = 1e-3,
        exclude: Literal["final_linear"] | list[str] | None = "final_linear",
    ) -> None:
        self.clip_factor = check_positive("clip_factor", clip_factor)
        self.eps = check_positive("eps", eps)
        if isinstance(exclude, Sequence) and not isinstance(exclude, str):
            exclude = list(exclude)  # such as OmegaConf's ListConfig
        patterns = isinstance(exclude, list) and all(isinstance(name, str) for name in exclude)
        if exclude is not None and exclude != "final_linear" and not patterns:
            raise ValueError(
                f"exclude must be 'final_linear', a list of patterns of parameter names or None; "
                f"got {exclude!r}. For one pattern write ['head.*']."
            )
        self.exclude = exclude
        self._linear_layers, self._transposed = list[set[Tensor]](), set[Tensor]()

    def attach(self, module: nn.Module) -> None:
        """Find the linear layers and the transposed convolutions.

        Raises:
            ValueError: If a pattern of ``exclude`` matches no parameter.
        """
        modules = list(module.modules())
        self._transposed = {part.weight for part in modules if isinstance(part, TRANSPOSED)}
        self._linear_layers = [set(p.parameters()) for p in modules if isinstance(p, nn.Linear)]
        if isinstance(self.exclude, list):
            names = [plain_name(name) for name, _ in module.named_parameters()]
            for pattern in self.exclude:
                if not any(fnmatchcase(name, pattern) for name in names):
                    raise ValueError(
                        f"UnitWise(exclude=...): no parameter name matches {pattern!r}. The first "
                        f"names are {names[:8]}."
                    )

    def detach(self) -> None:
        """Drop references to the model."""
        self._linear_layers, self._transposed = [], set()

    @torch.no_grad()
    def clip(self, step: GradientStep, state: State) -> Clip:
        """Scale each unit's gradient in place by its own coefficient."""
        finite = step.norms.total < math.inf
        if not isinstance(finite, Tensor):
            if not finite:
                return Clip(0.0)
            size = step.norms.total * step.grad_scale
            if size > 1e18:  # squares may overflow float32 on a CPU
                step.gradients.scale_(1e18 / size)
        excluded = self._excluded(step)
        collected = step.gradients
        chosen = [
            (gradient, whole, _local_real(parameter), *self._unit(parameter))
            for parameter, gradient, whole in zip(
                collected.parameters, collected.tensors, collected.summed(), strict=True
            )
            # A sparse gradient holds only some rows, so its shape differs.
            if parameter not in excluded and gradient.shape == _local_real(parameter).shape
        ]
        if not chosen:
            return Clip(0.0)
        gradients, wholes, weights, dims, groups = map(list, zip(*chosen, strict=True))
        weight_norms = _combine_over_ranks(_unit_norms(weights, dims), groups)
        gradient_norms = _combine_over_ranks(_unit_norms(wholes, dims), groups)

        device = finite.device if isinstance(finite, Tensor) else gradients[0].device
        norm, weight = (
            torch.cat([move(n, device).flatten() for n in norms])
            for norms in (gradient_norms, weight_norms)
        )
        if not norm.numel():
            return Clip(0.0)  # this rank has no elements of these parameters
        limit = weight.clamp_(min=self.eps) * (self.clip_factor * step.grad_scale)
        over = norm > limit
        if isinstance(finite, Tensor):
            over &= finite
        elif not over.any():  # `any` is read only on a CPU
            return Clip(0.0, coefficient=1.0)
        coefficient = (limit / norm).masked_fill_(over.logical_not(), 1.0)
        parts = coefficient.split([part.numel() for part in gradient_norms])
        factors = [
            move(part, gradient.device).view_as(like)
            for part, gradient, like in zip(parts, gradients, gradient_norms, strict=True)
        ]
        torch._foreach_mul_(gradients, factors)
        return Clip(over.mean(dtype=wide_dtype(device)), coefficient=coefficient.min())

    def _excluded(self, step: GradientStep) -> set[Tensor]:
        trained = set(step.gradients.parameters)
        if self.exclude == "final_linear":
            layers = reversed(self._linear_layers)
            return next((layer for layer in layers if trained & layer), set())
        return {
            parameter
            for parameter in trained
            if any(fnmatchcase(step.names[parameter], pattern) for pattern in self.exclude or ())
        }

    def _unit(self, parameter: Tensor) -> tuple[tuple[int, ...], Groups]:
        """Return the dimensions that a unit spans, and the process groups that shard a unit."""
        dims = tuple(range(parameter.ndim))
        if sum(size > 1 for size in parameter.shape) > 1:
            axis = 1 if parameter in self._transposed else 0
            dims = tuple(dim for dim in dims if dim != axis)
        if parameter.is_complex():
            dims = (*dims, parameter.ndim)  # real and imaginary parts
        if not is_dtensor(parameter):
            return dims, UNSHARDED
        return dims, mesh_groups(
            parameter, lambda p: not p.is_replicate() and p.dim % parameter.ndim in dims
        )


def _local_real(parameter: Tensor) -> Tensor:
    """Return this rank's part of a parameter. Complex numbers become pairs of real ones."""
    return as_real(local_part(parameter.detach()))


def _unit_norms(tensors: Sequence[Tensor], dims: Sequence[tuple[int, ...]]) -> list[Tensor]:
    """Return the L2 norms of each tensor's units. The reduced dimensions keep size 1."""
    alike: dict[object, list[int]] = {}
    for index, (tensor, unit_dims) in enumerate(zip(tensors, dims, strict=True)):
        key: object = (tensor.device, tensor.dtype, tensor.shape, unit_dims)
        if tensor.is_cpu or not unit_dims or not 0 < tensor.numel() <= MAX_STACKED_ELEMENTS:
            key = index  # measured alone
        alike.setdefault(key, []).append(index)
    norms = list(tensors)
    for indices in alike.values():
        first, unit_dims = tensors[indices[0]], dims[indices[0]]
        dtype = torch.promote_types(first.dtype, torch.float32)
        if len(indices) == 1:
            norms[indices[0]] = torch.linalg.vector_norm(first, 2, unit_dims, True, dtype=dtype)
            continue
        stacked = torch.stack([tensors[index] for index in indices])
        shifted = tuple(dim + 1 for dim in unit_dims)
        measured = torch.linalg.vector_norm(stacked, 2, shifted, True, dtype=dtype)
        for index, norm in zip(indices, measured.unbind(), strict=True):
            norms[index] = norm
    return norms


def _combine_over_ranks(norms: list[Tensor], groups: Sequence[Groups]) -> list[Tensor]:
    """Combine the ranks' norms of sharded units. A collective if any unit is sharded."""
    if not any(groups):
        return norms
    squares = reduce_each(list(torch._foreach_mul(norms, norms)), groups)
    return list(torch._foreach_sqrt(squares))
