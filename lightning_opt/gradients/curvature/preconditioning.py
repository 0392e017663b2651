"""Gradients divided by an average of the curvature."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_opt.core.arguments import between, fraction, positive
from lightning_opt.core.numerics.scalars import Scalar

TINY, LARGE = 1e-30, 1e30


class DiagonalPreconditioner:
    r"""Divides gradients by the averaged diagonal of the Hessian, and bounds the result.

    With the exponential average :math:`h` of the estimates (corrected for its start),

    .. math:: g \leftarrow \mathrm{clip}\left(g / (|h|^p + d), \pm c\right).

    A gradient that is not finite becomes one that is not finite, for a guard or a loss scaler to
    find.

    Args:
        beta: Share of the old average that is kept at each estimate, in [0, 1).
        power: :math:`p`, in [0, 1]: 1 is a Newton step along each axis, 0.5 half way.
        damping: :math:`d`, above 0.
        clip: :math:`c`, above 0; None for no bound.
    """

    def __init__(self, beta: float, power: float, damping: float, clip: float | None) -> None:
        self.beta, self.power = fraction("beta", beta), between("power", power, 0.0, 1.0)
        self.damping = positive("damping", damping)
        self.clip = None if clip is None else positive("clip", clip)
        self._average: dict[str, Tensor] = {}
        self._mass: dict[str, Tensor] = {}
        self._factors: dict[str, Tensor] = {}

    @torch.no_grad()
    def update(self, diagonal: Mapping[str, Tensor]) -> None:
        """Let an estimate in, by the parameters' names.

        Where any of it is not finite all averages stay; this is decided on the device.
        """
        estimates = [part.float() for part in diagonal.values()]
        finite = torch.stack([torch.isfinite(part).all() for part in estimates]).all()
        for name, new in zip(diagonal, estimates, strict=True):
            old, mass = self._of(name, new)
            # A weight of zero alone would let NaN in.
            self._average[name] = old.lerp(torch.where(finite, new, old), 1.0 - self.beta)
            self._mass[name] = mass.lerp(torch.where(finite, torch.ones_like(mass), mass),
                                         1.0 - self.beta)  # fmt: skip
        self._factors = {}

    @torch.no_grad()
    def apply(self, names: Sequence[str], gradients: Sequence[Tensor], scale: Scalar = 1.0) -> None:
        """Precondition ``gradients`` in place; one of which nothing is known is only bounded.

        Args:
            names: Of the parameters.
            gradients: Multiplied with ``scale``.
            scale: What a loss scaler has multiplied them with; the result is again.
        """
        for name, gradient in zip(names, gradients, strict=True):
            largest = torch.linalg.vector_norm(gradient, torch.inf)
            if name not in self._factors:
                self._factors[name] = self._factor(name, gradient)
            gradient.mul_(self._factors[name])
            if self.clip is not None:
                # A bound makes infinity look sound; 0 x infinity is NaN, and so is then the bound.
                bound = self.clip * scale + 0.0 * largest
                gradient.clamp_(-bound, bound)

    def average(self) -> dict[str, Tensor]:
        """Return the average by name, in float32, corrected for its start at zero."""
        return {
            name: part / self._mass[name].clamp_min(TINY) for name, part in self._average.items()
        }

    def _of(self, name: str, like: Tensor) -> tuple[Tensor, Tensor]:
        """Return average and mass of a parameter on its device, zeros at first."""
        if name not in self._average:
            self._average[name] = torch.zeros_like(like, dtype=torch.float32)
            self._mass[name] = torch.zeros((), device=like.device)
        return self._average[name].to(like.device), self._mass[name].to(like.device)

    def _factor(self, name: str, like: Tensor) -> Tensor:
        average, mass = self._of(name, like)
        divisor = (average / mass.clamp_min(TINY)).abs_().pow_(self.power).add_(self.damping)
        factor = torch.where(mass > 0, divisor.reciprocal_().clamp_max_(LARGE), 1.0)
        return factor.to(like.dtype)

    def state_dict(self) -> dict[str, Any]:
        """Return the averages and their masses."""
        return {"average": dict(self._average), "mass": dict(self._mass)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned."""
        self._average, self._mass = dict(state_dict["average"]), dict(state_dict["mass"])
        self._factors = {}
