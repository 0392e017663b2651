"""Clipping rules by name, their tally per optimizer, and a clipper for plain PyTorch loops."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn

from lightning_opt.core.arguments import check_one_of
from lightning_opt.core.modules.sharding import flat_parameter_groups
from lightning_opt.core.numerics.norms import GradientStep, collect_gradients, measure_norms
from lightning_opt.core.numerics.scalars import Scalar, read_scalars, stack_scalars, to_plain
from lightning_opt.gradients.clipping.norm_rules import (
    Clip,
    ClippingRule,
    FixedNorm,
    MeanStd,
    Percentile,
    Robust,
    ZClip,
)
from lightning_opt.gradients.clipping.tensor_rules import FixedValue, PerParameter, UnitWise
from lightning_opt.gradients.gradient_callback import plain_name

RULES: dict[str, type[ClippingRule]] = {
    "robust": Robust,
    "fixed_norm": FixedNorm,
    "fixed_value": FixedValue,
    "mean_std": MeanStd,
    "percentile": Percentile,
    "zclip": ZClip,
    "unit_wise": UnitWise,
    "per_parameter": PerParameter,
}
"""Rules by name, with their default settings."""


def resolve_rule(rule: str | ClippingRule) -> ClippingRule:
    """Return ``rule`` itself, or the rule of that name with its default settings.

    Raises:
        ValueError: If ``rule`` is neither a name nor a rule; the message lists all names.
    """
    if isinstance(rule, ClippingRule):
        return rule
    return RULES[check_one_of("rule", rule, sorted(RULES))]()


MAX_UNCOUNTED = 1024
"""Steps that are added to the counts at once. Adding each step would cost kernel launches."""


class ClipTally:
    """The state and the counts of a rule for one optimizer.

    Attributes:
        state: The rule's state.
        steps: Number of steps.
        nonfinite: Steps with a NaN or infinite norm, which were not clipped.
        clipped: Sum over the other steps of the share that was clipped.
        last: ``norm`` of the latest step, and ``threshold`` and ``coefficient`` if the rule has
            them.
    """

    def __init__(self, rule: ClippingRule) -> None:
        self.state = rule.init()
        self.steps = 0
        self.nonfinite: Scalar = 0
        self.clipped: Scalar = 0.0
        self.last: dict[str, Scalar] = {}
        self._uncounted: list[tuple[Scalar, Scalar]] = []

    def apply(self, rule: ClippingRule, step: GradientStep) -> None:
        """Clip one step's gradients in place, and count the step. There must be gradients."""
        norm, clip = step.norms.total, rule.clip(step, self.state)
        if step.gradients.on_host:
            clip = Clip(*map(to_plain, (clip.clipped, clip.threshold, clip.coefficient)))
        self.steps += 1
        last = {"norm": norm, "threshold": clip.threshold, "coefficient": clip.coefficient}
        self.last = {name: value for name, value in last.items() if value is not None}
        if clip.clipped is not None:
            self.clipped = self.clipped + clip.clipped
        coefficient = self.last.get("coefficient", 1.0)
        self._uncounted.append((norm, coefficient if clip.clipped is None else 1.0))
        if len(self._uncounted) >= MAX_UNCOUNTED:
            self._add_uncounted()

    def _add_uncounted(self) -> None:
        """Add the steps since the last sum to the counts, without waiting for the device."""
        if self._uncounted:
            norms, coefficients = map(stack_scalars, zip(*self._uncounted, strict=True))
            self._uncounted = []
            self.nonfinite = self.nonfinite + (~(norms < math.inf)).sum()
            self.clipped = self.clipped + (coefficients < 1.0).sum(dtype=norms.dtype)

    def read(self) -> dict[str, float]:
        """Return the latest values and the counts as floats. Waits for the device once."""
        if not self.last:
            return {}
        self._add_uncounted()
        values = {**self.last, "clipped": self.clipped, "nonfinite": self.nonfinite}
        read = dict(zip(values, read_scalars(list(values.values())), strict=True))
        read["fraction"] = read.pop("clipped") / max(self.steps - read["nonfinite"], 1.0)
        return read

    def state_dict(self) -> dict[str, Any]:
        """Return the rule's state and the counts as plain types. Waits for the device."""
        self._add_uncounted()
        return {
            "rule": to_plain(self.state),
            "steps": self.steps,
            "nonfinite": to_plain(self.nonfinite),
            "clipped": to_plain(self.clipped),
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore the result of :meth:`state_dict`."""
        self.state = to_plain(state_dict["rule"])
        self.steps, self.nonfinite = state_dict["steps"], state_dict["nonfinite"]
        self.clipped = state_dict["clipped"]


class GradientClipper:
    """Adaptive gradient clipping for a plain PyTorch loop.

    Call :meth:`clip` between ``backward()`` and ``optimizer.step()``. Under a
    :class:`torch.amp.GradScaler` call ``scaler.unscale_(optimizer)`` first.

    Args:
        module: The model whose gradients are clipped, already wrapped if it is sharded.
        rule: A name (see :func:`resolve_rule`) or a rule.
        parameters: The parameters to clip together; all of the model's by default. With several
            optimizers use one clipper for each.

    Raises:
        ValueError: For an unknown rule, parameters of another module, and ``UnitWise`` under FSDP1.

    Example:
        >>> import torch
        >>> model = torch.nn.Linear(4, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> clipper = GradientClipper(model, FixedNorm(1.0))
        >>> model(torch.full((8, 4), 100.0)).sum().backward()
        >>> round(clipper.clip()["norm"])
        1600
        >>> optimizer.step()
        >>> round(torch.nn.utils.get_total_norm([p.grad for p in model.parameters()]).item(), 3)
        1.0
    """

    def __init__(
        self,
        module: nn.Module,
        rule: str | ClippingRule = "robust",
        parameters: Iterable[Tensor] | None = None,
    ) -> None:
        self.rule = resolve_rule(rule)
        self._names: dict[Tensor, str] = {p: plain_name(n) for n, p in module.named_parameters()}
        self._parameters = list(self._names if parameters is None else parameters)
        if any(parameter not in self._names for parameter in self._parameters):
            raise ValueError("Every parameter given must be one of the module's.")
        self._flat = flat_parameter_groups(module)
        if self._flat and self.rule.needs_whole_tensors:
            raise ValueError(f"{type(self.rule).__name__} cannot clip FSDP1's flat gradients.")
        self.rule.attach(module)
        self._tally = ClipTally(self.rule)

    def clip(self) -> dict[str, Scalar]:
        """Clip the gradients in place.

        Returns:
            ``norm`` before clipping, and ``threshold`` and ``coefficient`` if the rule has them:
            floats on a CPU, 0-dimensional tensors on a device.
        """
        gradients = collect_gradients(self._parameters, self._flat)
        if not gradients.tensors:
            return {"norm": 0.0}
        step = GradientStep(gradients, measure_norms(gradients), 1.0, self._names)
        self._tally.apply(self.rule, step)
        return dict(self._tally.last)

    def state_dict(self) -> dict[str, Any]:
        """Return the rule's state and the counts as plain types. Waits for the device."""
        return self._tally.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore the result of :meth:`state_dict`."""
        self._tally.load_state_dict(state_dict)
