"""Statistics of the gradients of each parameter and layer since the last report, on the host."""

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
from lightning_opt.gradients.gradient_callback import plain_name

TRAINED, FROZEN, NO_GRADIENT = "trained", "frozen", "no gradient"

ABSENT = -1.0
"""Stands for the norm of a parameter that had no gradient at that step."""

ROOT = "(root)"
"""Layer name of the model's own parameters."""


@dataclass(slots=True)
class ParameterStats:
    """One parameter since the last report.

    Attributes:
        name: Its name in the model.
        numel: Elements of the whole tensor.
        matrix: Whether it has at least two dimensions, as weights do and biases do not.
        status: ``"trained"``, ``"frozen"``, ``"no gradient"`` or ``"in no optimizer"``.
        count: Steps with a finite gradient.
        mean, variance: Of the L2 norms of those steps.
        nan, inf: Steps whose norm was NaN or infinite.
        first: Number of the first such step; 0 if there was none.
        peak: Its norm at the step with the largest total norm.
        norm, max: L2 norm and largest finite magnitude at the reported step.
        zeros: Share of elements that were exactly zero at the reported step.
        update: Ratio of L2 norms of one update and the weights.
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
    def of(cls, name: str, parameter: Tensor, status: str = TRAINED) -> ParameterStats:
        return cls(name, as_real(parameter.detach()).numel(), parameter.ndim >= 2, status)

    @property
    def square(self) -> float:
        return self.mean**2 + self.variance

    @property
    def active(self) -> float:
        """Non-zero elements; all elements if the share of zeros is unknown or 1."""
        return self.numel * (1.0 - (self.zeros or 0.0)) or float(self.numel)


@dataclass
class LayerStats:
    """A module with the parameters that it holds itself, since the last report.

    Properties are cached: the parameters are complete when the first one is read.

    Attributes:
        name: The module's name; ``"(root)"`` for the model's own parameters.
        parameters: Its parameters.
    """

    name: str
    parameters: list[ParameterStats] = field(default_factory=list)

    @cached_property
    def trained(self) -> list[ParameterStats]:
        return [p for p in self.parameters if p.status == TRAINED]

    @property
    def status(self) -> str:
        """``"trained"`` if any parameter is; otherwise the status of the parameters."""
        kinds = {p.status for p in self.parameters}
        return TRAINED if TRAINED in kinds or not kinds else min(kinds)

    @cached_property
    def has_matrix(self) -> bool:
        return any(p.matrix for p in self.trained)

    @cached_property
    def weights(self) -> list[ParameterStats]:
        """The trained parameters of at least two dimensions; all trained ones if there are none."""
        return [p for p in self.trained if p.matrix] or self.trained

    @cached_property
    def flow(self) -> float:
        """RMS over steps and non-zero elements of the weights' gradients.

        Zeros do not count, so that an embedding of which a batch uses a few rows is comparable with
        other layers.
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


def group_layers(
    parameters: Iterable[ParameterStats], order: Mapping[str, int]
) -> list[LayerStats]:
    """Group parameters by module, in forward order; modules without a position come last."""
    layers: dict[str, LayerStats] = {}
    for parameter in parameters:
        name = parameter.name.rpartition(".")[0] or ROOT
        layers.setdefault(name, LayerStats(name)).parameters.append(parameter)
    return sorted(layers.values(), key=lambda layer: order.get(layer.name, len(order)))


def stats_without_optimizer(module: nn.Module, held: Collection[Tensor]) -> list[ParameterStats]:
    """Return the stats of parameters that are not among those ``held`` by an optimizer."""
    return [
        ParameterStats.of(plain_name(name), own, "in no optimizer" if own.requires_grad else FROZEN)
        for name, own in module.named_parameters()
        if own not in held
    ]


def stats_of_norms(
    parameters: Mapping[str, Tensor], blocks: Sequence[tuple[list[str], NDArray[Any]]], first: int
) -> tuple[dict[str, ParameterStats], list[float]]:
    """Compute the stats of each parameter from the norms of a window; return the total norms too.

    Args:
        parameters: By name.
        blocks: As :meth:`NormWindow.blocks` returns them, read to the host.
        first: The number of the window's first step.
    """
    places = {name: place for place, name in enumerate(parameters)}
    stats = {name: ParameterStats.of(name, own) for name, own in parameters.items()}
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
        "inf": np.isinf(norms).sum(0),
        "first": np.where(bad.any(0), bad.argmax(0) + first, 0),
        "peak": norms[np.where(np.isfinite(totals), totals, -np.inf).argmax()],
    }
    for key, column in table.items():
        for found, value in zip(stats.values(), column.tolist(), strict=True):
            setattr(found, key, value)
    return stats, totals.tolist()


def add_gradients(
    stats: Mapping[str, ParameterStats], names: Sequence[str], table: NDArray[Any]
) -> None:
    """Add the measurements of the reported step, a table of ``measure_gradients``."""
    for name, column in zip(names, table.T, strict=True):
        if name not in stats:
            continue
        found = stats[name]
        norm, largest, nan, inf, nonzero, numel, present = column.tolist()
        found.numel = int(numel)  # a shard has only a part of them
        if not present:
            # Norms of a sharded parameter without a gradient on any rank were recorded as zeros.
            found.count, found.nan, found.inf, found.first = 0, 0, 0, 0
            continue
        found.norm, found.max = norm, largest
        found.zeros = 1.0 - nonzero / numel if numel else None
        if not found.mean and largest:
            found.mean = largest  # the squares underflowed in float32, the elements did not
        if math.isinf(norm) and not inf and not nan:
            found.inf -= 1  # the squares overflowed, the elements did not
            found.count, found.mean = max(found.count, 1), max(found.mean, largest)
            if not found.inf and not found.nan:
                found.first = 0


def add_updates(
    stats: Mapping[str, ParameterStats], names: Sequence[str], squares: NDArray[Any]
) -> None:
    """Add update-to-weight ratios from the summed squares of updates and weights, a ``(2, n)``."""
    for name, change, weight in zip(names, *squares.tolist(), strict=False):
        found = stats.get(name)
        if found is not None and found.count and weight > 0 and math.isfinite(change + weight):
            found.update, found.weight = math.sqrt(change / weight), math.sqrt(weight)
