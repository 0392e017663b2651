"""What is known of each parameter and each layer since the last report, as plain numbers."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from lightning_opt.core.numerics.norms import as_real
from lightning_opt.gradients.health.measures import ABSENT
from lightning_opt.gradients.names import plain_name

TRAINED, FROZEN, UNUSED, STALE = "trained", "frozen", "unused", "stale"
"""Has gradients; needs none; never had one; had some, but none since the last report."""

ROOT = "(root)"
"""What the model itself is called where modules are listed."""


def module_of(parameter: str) -> str:
    """Return the name of the module that holds a parameter."""
    return parameter.rpartition(".")[0] or ROOT


@dataclass(slots=True)
class ParameterVitals:
    """One parameter since the last report.

    Attributes:
        name: Its name in the model.
        numel: Elements of the whole tensor.
        matrix: Whether it has two dimensions or more, as a weight has and a bias has not.
        status: ``"trained"``, ``"frozen"``, ``"unused"`` or ``"stale"``.
        count: Steps with a finite gradient.
        mean, variance: Of those steps' L2 norms.
        nan, inf: Steps whose norm was NaN, and infinite.
        first: Number of the first such step; 0 if there was none.
        peak: Its norm at the step with the largest total norm.
        norm, max: L2 norm and largest finite magnitude at the reported step.
        zeros: Share of its elements that were exactly zero there.
        update: What one update changed, relative to the weights: ratio of L2 norms.
        weight: L2 norm of the weights, or of a sample of them.
    """

    name: str
    numel: int
    matrix: bool
    status: str = TRAINED
    count: float = 0.0
    mean: float = 0.0
    variance: float = 0.0
    nan: int = 0
    inf: int = 0
    first: int = 0
    peak: float = 0.0
    norm: float | None = None
    max: float | None = None
    zeros: float | None = None
    update: float | None = None
    weight: float | None = None

    @classmethod
    def of(cls, name: str, parameter: Tensor, status: str = TRAINED) -> ParameterVitals:
        """Return the vitals of a parameter of which nothing has been measured."""
        return cls(name, as_real(parameter.detach()).numel(), parameter.ndim >= 2, status)

    @property
    def square(self) -> float:
        """Mean of the squared norm over steps."""
        return self.mean**2 + self.variance

    @property
    def active(self) -> float:
        """Elements that are not zero, of which the RMS is taken; all where that is not known."""
        return self.numel * (1.0 - (self.zeros or 0.0)) or float(self.numel)


@dataclass
class LayerVitals:
    """One module with the parameters that it holds itself, since the last report.

    What is asked for often is computed once: the parameters are complete by then.

    Attributes:
        name: The module's name; ``"(root)"`` for the model's own parameters.
        parameters: Its parameters.
    """

    name: str
    parameters: list[ParameterVitals] = field(default_factory=list)

    @cached_property
    def trained(self) -> list[ParameterVitals]:
        """The parameters that have gradients."""
        return [p for p in self.parameters if p.status == TRAINED]

    @property
    def status(self) -> str:
        """The parameters' status if they share one, else that of those that are trained."""
        kinds = {p.status for p in self.parameters}
        return TRAINED if TRAINED in kinds or not kinds else min(kinds)

    @cached_property
    def has_matrix(self) -> bool:
        """Whether a weight of two dimensions or more has gradients here."""
        return any(p.matrix for p in self.trained)

    @cached_property
    def weights(self) -> list[ParameterVitals]:
        """Those of two dimensions or more that have gradients; all if there are none."""
        return [p for p in self.trained if p.matrix] or self.trained

    @cached_property
    def flow(self) -> float:
        """RMS over steps and non-zero elements of the weights' gradients.

        Zeros are left out so that an embedding of which a batch uses a few rows is comparable with
        a layer that is used in full.
        """
        elements = sum(p.active for p in self.weights)
        return math.sqrt(sum(p.square for p in self.weights) / elements) if elements else 0.0

    @cached_property
    def norm(self) -> float:
        """L2 norm of all its gradients, RMS over steps."""
        return math.sqrt(sum(p.square for p in self.trained))

    @property
    def noise(self) -> float:
        """Standard deviation over steps of its gradients' norms, relative to their mean."""
        mean = sum(p.mean**2 for p in self.trained)
        return math.sqrt(sum(p.variance for p in self.trained) / mean) if mean else 0.0

    @property
    def max(self) -> float | None:
        """Largest magnitude among its gradients at the reported step."""
        return max((p.max for p in self.trained if p.max is not None), default=None)

    @property
    def zeros(self) -> float | None:
        """Share of zeros among its gradients at the reported step."""
        known = [(p.zeros, p.numel) for p in self.trained if p.zeros is not None]
        elements = sum(numel for _, numel in known)
        return sum(zeros * numel for zeros, numel in known) / elements if elements else None

    @property
    def update(self) -> float | None:
        """Update-to-weight ratio of its weights."""
        known = [(p.update, p.weight) for p in self.weights if p.update is not None and p.weight]
        weight = math.hypot(*(weight for _, weight in known))
        return math.hypot(*(update * w for update, w in known)) / weight if weight else None


def group_layers(
    parameters: Iterable[ParameterVitals], order: Mapping[str, int]
) -> list[LayerVitals]:
    """Group parameters by module, in forward order; modules without a place keep theirs at the end.

    Args:
        parameters: In the order of registration.
        order: The place of each module.
    """
    layers: dict[str, LayerVitals] = {}
    for parameter in parameters:
        name = module_of(parameter.name)
        layers.setdefault(name, LayerVitals(name)).parameters.append(parameter)
    return sorted(layers.values(), key=lambda layer: order.get(layer.name, len(order)))


def unheld_vitals(module: nn.Module, held: Collection[Tensor]) -> list[ParameterVitals]:
    """Return the parameters of ``module`` that are not among those ``held`` by an optimizer."""
    return [
        ParameterVitals.of(
            plain_name(name), own, "in no optimizer" if own.requires_grad else FROZEN
        )
        for name, own in module.named_parameters()
        if own not in held
    ]


def window_vitals(
    parameters: Mapping[str, Tensor], blocks: Sequence[tuple[list[str], NDArray[Any]]], first: int
) -> tuple[dict[str, ParameterVitals], list[float]]:
    """Return what the norms of a window say of each parameter, and the total norms.

    Args:
        parameters: By name.
        blocks: What was read of :meth:`NormWindow.blocks`.
        first: The number of the window's first step.
    """
    places = {name: place for place, name in enumerate(parameters)}
    vitals = {name: ParameterVitals.of(name, own) for name, own in parameters.items()}
    if not blocks:
        return vitals, []
    totals = np.concatenate([rows[:, 0] for _, rows in blocks])
    norms = np.full((len(totals), len(places)), ABSENT)
    start = 0
    for names, rows in blocks:
        known = [place for place, name in enumerate(names) if name in places]
        columns = [places[names[place]] for place in known]
        norms[start : start + len(rows), columns] = rows[:, 1:][:, known]
        start += len(rows)
    bad = ~np.isfinite(norms)
    counted = ~bad & (norms != ABSENT)
    count = counted.sum(0)
    mean = np.where(counted, norms, 0.0).sum(0) / np.maximum(count, 1)
    deviation = np.where(counted, norms, mean) - mean
    table = {
        "count": count,
        "mean": mean,
        "variance": np.square(deviation).sum(0) / np.maximum(count, 1),
        "nan": np.isnan(norms).sum(0),
        "inf": np.isinf(norms).sum(0),
        "first": np.where(bad.any(0), bad.argmax(0) + first, 0),
        "peak": norms[np.where(np.isfinite(totals), totals, -np.inf).argmax()],
    }
    for key, column in table.items():
        for found, value in zip(vitals.values(), column.tolist(), strict=True):
            setattr(found, key, value)
    return vitals, totals.tolist()
