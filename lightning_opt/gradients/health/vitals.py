"""What is known of each parameter and each layer since the last report, as plain numbers."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from torch import Tensor, nn

from lightning_opt.gradients.health.measures import NormDigest

TRAINED, FROZEN, UNUSED, STALE = "trained", "frozen", "unused", "stale"
"""Has gradients; needs none; never had one; had some, but none since the last report."""


ROOT = "(root)"
"""What the model itself is called where modules are listed."""

WRAPPERS = ("_fsdp_wrapped_module.", "_orig_mod.", "_checkpoint_wrapped_module.")


def plain_name(name: str) -> str:
    """Return the name that a module or parameter had before FSDP1 or torch.compile wrapped it."""
    for wrapper in WRAPPERS:
        name = name.replace(wrapper, "").removesuffix(wrapper[:-1]).rstrip(".")
    return name


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
        mean, spread: Mean of those steps' L2 norms, and summed squared deviation from it.
        nan, inf: Steps whose norm was NaN, and infinite.
        first: Number of the first such step; 0 if there was none.
        peak: Its norm at the step with the largest total norm.
        norm, max: L2 norm and largest finite magnitude at the reported step.
        zeros: Share of its elements that were exactly zero there.
        update: What one update changed, relative to the weights: ratio of L2 norms.
    """

    name: str
    numel: int
    matrix: bool
    status: str = TRAINED
    count: float = 0.0
    mean: float = 0.0
    spread: float = 0.0
    nan: int = 0
    inf: int = 0
    first: int = 0
    peak: float = 0.0
    norm: float | None = None
    max: float | None = None
    zeros: float | None = None
    update: float | None = None
    weight: float | None = None

    def merge(self, digest: NormDigest, place: int) -> None:
        """Take in another block of steps (Chan et al. 1979: means and deviations add up)."""
        count, mean, spread, nan, inf, first, _ = (column[place] for column in digest.columns)
        both = self.count + count
        if both:
            delta = mean - self.mean
            self.spread += spread + delta * delta * self.count * count / both
            self.mean += delta * count / both
        self.count = both
        self.nan, self.inf = self.nan + int(nan), self.inf + int(inf)
        if not self.first and nan + inf:
            self.first = digest.first_step + int(first)

    @property
    def square(self) -> float:
        """Mean of the squared norm over steps."""
        return self.mean**2 + (self.spread / self.count if self.count else 0.0)

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
    def flow(self) -> float:
        """RMS over steps and non-zero elements of the weights' gradients; of all if none is 2-d.

        Zeros are left out so that an embedding of which a batch uses a few rows is comparable with
        a layer that is used in full.
        """
        matrices = [p for p in self.trained if p.matrix] or self.trained
        elements = sum(p.active for p in matrices)
        return math.sqrt(sum(p.square for p in matrices) / elements) if elements else 0.0

    @cached_property
    def norm(self) -> float:
        """L2 norm of all its gradients, RMS over steps."""
        return math.sqrt(sum(p.square for p in self.trained))

    @property
    def noise(self) -> float:
        """Standard deviation over steps of its gradients' norms, relative to their mean."""
        mean = sum(p.mean**2 for p in self.trained)
        spread = sum(p.spread / p.count for p in self.trained if p.count)
        return math.sqrt(spread / mean) if mean else 0.0

    @property
    def max(self) -> float | None:
        """Largest magnitude among its gradients at the reported step."""
        return max((p.max for p in self.trained if p.max is not None), default=None)

    @property
    def zeros(self) -> float | None:
        """Share of zeros among its gradients at the reported step."""
        known = [p for p in self.trained if p.zeros is not None]
        elements = sum(p.numel for p in known)
        return sum((p.zeros or 0.0) * p.numel for p in known) / elements if elements else None

    @property
    def update(self) -> float | None:
        """Update-to-weight ratio of its weights (of all parameters if none has two dimensions)."""
        chosen = [p for p in self.trained if p.matrix] or self.trained
        known = [(p.update, p.weight) for p in chosen if p.update is not None and p.weight]
        weight = sum(w**2 for _, w in known if w)
        return (
            math.sqrt(sum((u * w) ** 2 for u, w in known if u and w) / weight) if weight else None
        )

    @property
    def nonfinite(self) -> tuple[int, int, int]:
        """Steps with NaN and with Inf in any parameter (the most of one), and the first of them."""
        firsts = [p.first for p in self.parameters if p.first]
        return (
            max((p.nan for p in self.parameters), default=0),
            max((p.inf for p in self.parameters), default=0),
            min(firsts, default=0),
        )


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
        ParameterVitals(
            plain_name(name),
            parameter.numel(),
            parameter.ndim >= 2,
            "in no optimizer" if parameter.requires_grad else FROZEN,
        )
        for name, parameter in module.named_parameters()
        if parameter not in held
    ]


def merge_digests(
    parameters: Mapping[str, ParameterVitals], digests: Sequence[NormDigest]
) -> list[tuple[int, float]]:
    """Bring the norms of a window into fresh vitals.

    Args:
        parameters: By name; changed in place. Names that are not there are left out.
        digests: The window's blocks, in order.

    Returns:
        Step number and total norm of every step.
    """
    totals: list[tuple[int, float]] = []
    highest = -math.inf
    for digest in digests:
        totals += [(digest.first_step + i, total) for i, total in enumerate(digest.totals)]
        peak = max((t for t in digest.totals if math.isfinite(t)), default=-math.inf)
        for place, name in enumerate(digest.names):
            if name in parameters:
                parameters[name].merge(digest, place)
                if peak > highest:
                    parameters[name].peak = digest.columns[-1][place]
        highest = max(highest, peak)
    return totals
