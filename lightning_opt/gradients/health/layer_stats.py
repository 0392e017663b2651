"""Statistics of the gradients of each parameter and layer since the last report, on the host."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from lightning_opt.core.numerics.norms import as_real

TRAINED, FROZEN, NO_GRADIENT = "trained", "frozen", "no gradient"

ABSENT = -1.0
"""Norm of a parameter without a gradient at that step."""

ROOT = "(root)"
"""Layer name of the model's own parameters."""


@dataclass(slots=True)
class ParameterStats:
    """Statistics of one parameter since the last report.

    Attributes:
        name: Its name in the model.
        numel: Elements of the whole tensor.
        matrix: Whether it has at least two dimensions, as weights do. Biases have one.
        status: ``"trained"``, ``"frozen"`` or ``"no gradient"``.
        count: Steps with a finite gradient.
        mean, variance: Mean and variance of the gradient's L2 norm over steps with a finite norm.
        nan: Number of steps whose norm was NaN.
        first: The first step with a non-finite norm; 0 if there was none.
        max: Largest magnitude at the reported step; 0 if not finite.
        zeros: Share of elements that were exactly zero at the reported step.
        update: L2 norm of one update divided by the L2 norm of the weights.
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
    first: int = 0
    max: float | None = None
    zeros: float | None = None
    update: float | None = None
    weight: float | None = None

    def set_status(self, parameter: Tensor, *, is_measured: bool) -> None:
        # Recorded norms are 0 for a gradient of zeros and for a shard without a gradient. Only a
        # measured report distinguishes them.
        if self.first or (self.count and (self.mean or is_measured)):
            self.status = TRAINED
        else:
            self.status = NO_GRADIENT if parameter.requires_grad else FROZEN

    @property
    def square(self) -> float:
        return self.mean**2 + self.variance

    @property
    def active(self) -> float:
        """Non-zero elements; all elements if the share of zeros is unknown or 1."""
        return self.numel * (1.0 - (self.zeros or 0.0)) or float(self.numel)


@dataclass
class LayerStats:
    """Statistics of a module's own parameters since the last report.

    Some properties are cached, so add all parameters before you read one.

    Attributes:
        name: The module's name; ``"(root)"`` for the model's own parameters.
        parameters: Its parameters.
    """

    name: str
    parameters: list[ParameterStats] = field(default_factory=list)

    @cached_property
    def trained(self) -> list[ParameterStats]:
        return [p for p in self.parameters if p.status == TRAINED]

    @cached_property
    def weights(self) -> list[ParameterStats]:
        """The trained parameters with at least two dimensions; without any, all trained ones."""
        return [p for p in self.trained if p.matrix] or self.trained

    @cached_property
    def flow(self) -> float:
        """RMS of the weights' gradients over steps and non-zero elements.

        Zeros are excluded, so that an embedding, of which a batch uses only a few rows, can be
        compared with other layers.
        """
        elements = sum(p.active for p in self.weights)
        return math.sqrt(sum(p.square for p in self.weights) / elements) if elements else 0.0

    @cached_property
    def norm(self) -> float:
        """L2 norm of all gradients, RMS over steps."""
        return math.sqrt(sum(p.square for p in self.trained))

    @property
    def noise(self) -> float:
        """Standard deviation over steps of the gradients' norms, relative to their mean."""
        mean = sum(p.mean**2 for p in self.trained)
        return math.sqrt(sum(p.variance for p in self.trained) / mean) if mean else 0.0

    @property
    def max(self) -> float | None:
        return max((p.max for p in self.trained if p.max is not None), default=None)

    @property
    def zeros(self) -> float | None:
        known = [(p.zeros, p.numel) for p in self.trained if p.zeros is not None]
        elements = sum(numel for _, numel in known)
        return sum(zeros * numel for zeros, numel in known) / elements if elements else None

    @property
    def update(self) -> float | None:
        known = [(p.update, p.weight) for p in self.weights if p.update is not None and p.weight]
        weight = math.hypot(*(weight for _, weight in known))
        return math.hypot(*(update * w for update, w in known)) / weight if weight else None


def group_layers(parameters: Iterable[ParameterStats]) -> list[LayerStats]:
    """Group parameters by module, in the order of each module's first parameter."""
    layers: dict[str, LayerStats] = {}
    for parameter in parameters:
        name = parameter.name.rpartition(".")[0] or ROOT
        layers.setdefault(name, LayerStats(name)).parameters.append(parameter)
    return list(layers.values())


def stats_of_norms(
    parameters: Mapping[str, Tensor], blocks: Sequence[tuple[list[str], NDArray[Any]]], first: int
) -> tuple[dict[str, ParameterStats], list[float]]:
    """Return the stats of each parameter by name, and the total norm of each step.

    Args:
        parameters: The parameters by name.
        blocks: The result of :meth:`NormWindow.blocks`, read to the host.
        first: The number of the window's first step.
    """
    places = {name: place for place, name in enumerate(parameters)}
    stats = {
        name: ParameterStats(name, as_real(own.detach()).numel(), own.ndim >= 2)
        for name, own in parameters.items()
    }
    if not blocks:
        return stats, []
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
        "first": np.where(bad.any(0), bad.argmax(0) + first, 0),
    }
    for key, column in table.items():
        for found, value in zip(stats.values(), column.tolist(), strict=True):
            setattr(found, key, value)
    return stats, totals.tolist()


def add_measurements(
    stats: Mapping[str, ParameterStats], names: Sequence[str], tables: Sequence[NDArray[Any]]
) -> None:
    """Add the measurements of the reported step.

    ``tables`` holds the results of ``measure_gradients`` and ``UpdateProbe.compare``.
    """
    for name, column in zip(names, np.concatenate(tables).T.tolist(), strict=True):
        if name not in stats:
            continue
        found = stats[name]
        largest, nonzero, numel, present, change, weight = column
        found.numel = int(numel)  # summed over shards
        if not present:
            # A sharded parameter without a gradient on any rank. Its recorded norms are zeros.
            found.count, found.nan, found.first = 0, 0, 0
            continue
        found.max = largest
        found.zeros = 1.0 - nonzero / numel if numel else None
        if not found.mean and largest:
            found.mean = largest  # the squares underflowed in float32
        if found.count and weight > 0 and math.isfinite(change + weight):
            found.update, found.weight = math.sqrt(change / weight), math.sqrt(weight)
