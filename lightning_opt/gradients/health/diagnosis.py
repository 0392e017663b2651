"""From measured layers to findings: pure functions of plain numbers.

What is normal is taken from the run's own history and from the other layers, since norms of healthy
models differ by many orders of magnitude.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from lightning_opt.gradients.health.issues import CRITICAL, WARNING, Issue
from lightning_opt.gradients.health.vitals import STALE, UNUSED, LayerVitals

OVERFLOW_STREAK = 20
"""Overflows in a row that a loss scaler explains; by then its usual first scale is below 1."""

FACTOR = 100.0
"""Between neighbouring layers, or a layer and the median of all, from which they are at odds."""


@dataclass
class Evidence:
    """What one report knows of one optimizer.

    Attributes:
        layers: In forward order.
        totals: Step number and total norm of each step since the last report.
        overflows: Whether a loss scaler explains the non-finite ones.
        early: Median of the run's first norms; None before they are known.
        typical: Median of the medians of earlier reports; None in the first.
        before: ``flow`` of each layer in the report before.
    """

    layers: list[LayerVitals]
    totals: list[tuple[int, float]]
    overflows: bool = False
    early: float | None = None
    typical: float | None = None
    before: Mapping[str, float] = field(default_factory=dict)

    @cached_property
    def flows(self) -> dict[str, float]:
        """RMS by layer, in forward order: of layers with a weight matrix if there are three.

        Gains and biases of normalisation layers are on another scale than weights.
        """
        live = [layer for layer in self.layers if layer.trained and layer.flow]
        weights = [layer for layer in live if layer.has_matrix]
        return {layer.name: layer.flow for layer in (weights if len(weights) >= 3 else live)}

    def finite(self) -> list[float]:
        """Return the finite totals."""
        return [total for _, total in self.totals if math.isfinite(total)]


def diagnose(evidence: Evidence, exploding: float, vanishing: float) -> list[Issue]:
    """Return everything that one report sees, given the limits of :class:`GradientHealth`."""
    return [
        *find_nonfinite(evidence),
        *find_exploding(evidence, exploding),
        *find_vanishing(evidence, vanishing),
        *find_dead(evidence, vanishing),
        *find_bottleneck(evidence),
        *find_imbalance(evidence),
        *find_stale(evidence),
    ]


def find_nonfinite(evidence: Evidence) -> list[Issue]:
    """Find steps whose gradients were NaN or infinite, unless a loss scaler explains them."""
    bad = [(step, total) for step, total in evidence.totals if not math.isfinite(total)]
    if not bad or evidence.overflows:
        return []
    start = bad[0][0]
    layers = [layer for layer in evidence.layers if layer.trained]
    hit = [layer for layer in layers if any(p.first == start for p in layer.parameters)]
    nan = math.isnan(bad[0][1]) or any(p.nan for layer in hit for p in layer.parameters)
    kind = "nan" if nan else "inf"
    steps = f"step {start}" if len(bad) == 1 else f"{len(bad)} steps from step {start}"
    if not hit or len(hit) == len(layers):
        detail = f"every gradient was {kind.upper()} at {steps}, so the loss itself was not finite"
        return [Issue(kind, CRITICAL, "all layers", detail)]
    # The backward pass runs from the loss to the input: the first it hit is the last in order.
    place = hit[-1].name
    detail = f"{kind.upper()} gradients in {len(hit)} of {len(layers)} layers at {steps}"
    if len(hit) > 1:
        detail += "; this one is nearest to the loss, where the backward pass met it first"
    return [Issue(kind, CRITICAL, place, detail)]


def find_exploding(evidence: Evidence, limit: float) -> list[Issue]:
    """Find norms above the limit, or far above what the run had."""
    finite = evidence.finite()
    layers = [layer for layer in evidence.layers if layer.trained]
    if not finite or not layers:
        return []
    median = statistics.median(finite)
    known = [value for value in (evidence.early, evidence.typical) if value]
    growth = median / max(known) if known else 1.0
    worst = max(layers, key=lambda layer: layer.norm)
    flows = list(evidence.flows.values())
    amplified = max(flows) / flows[-1] if flows else 1.0
    if median > limit or growth > limit:
        detail = f"total norm {median:.3g}"
        if growth >= 2:
            detail += f", {growth:.3g} times what it was"
        if amplified >= 100:
            detail += f"; it grows {amplified:.3g}-fold from the loss to the inputs"
        if median > limit:
            worse = growth >= 10 or amplified >= 100 or median > 1000 * limit
        else:
            worse = growth > 100 * limit
        return [Issue("exploding", CRITICAL if worse else WARNING, worst.name, detail)]
    # A single spike; those of the first ten steps are the start of training.
    step, high = max(
        ((s, t) for s, t in evidence.totals if s > 10 and math.isfinite(t)),
        key=lambda pair: pair[1], default=(0, 0.0),
    )  # fmt: skip
    if high > limit and high > 10 * median:
        worst = max(layers, key=lambda layer: sum(p.peak**2 for p in layer.trained))
        detail = (
            f"a spike at step {step}: total norm {high:.3g}, {high / median:.3g} times the median"
        )
        return [Issue("exploding", WARNING, worst.name, detail)]
    return []


def find_vanishing(evidence: Evidence, limit: float) -> list[Issue]:
    """Find layers whose gradient's RMS is below the limit while other layers have a gradient."""
    flows = evidence.flows
    if not flows:
        return []
    largest = max(flows.values())
    if largest < limit:
        # Nothing to compare with: a model that has converged looks the same from here.
        if (
            evidence.typical is None
            or not evidence.early
            or evidence.typical < 0.1 * evidence.early
        ):
            return []
        detail = f"the largest gradient RMS of any layer is {largest:.3g}, since the start"
        return [Issue("vanishing", WARNING, "all layers", detail)]
    small = {
        name: flow
        for name, flow in flows.items()
        # A layer on its way up, as behind a zero-initialised one, is left in peace.
        if flow < limit and flow < 1e-3 * largest and flow <= 3 * evidence.before.get(name, flow)
    }
    strongest = max(flows, key=flows.__getitem__)
    seen = {
        name: f"gradient RMS {flow:.2g}, {flow / largest:.2g} times that at {strongest}"
        for name, flow in small.items()
    }
    seen |= {
        layer.name: f"the gradient has underflowed to zero; at {after.name} it is still "
        f"{after.flow:.2g}, {after.flow / largest:.2g} times that at {strongest}"
        for layer, after in _dead_layers(evidence)
        if after is not None and after.name in small
    }
    severity = CRITICAL if 4 * len(seen) >= len(flows) else WARNING
    return [
        Issue("vanishing", severity, name, detail, largest / small.get(name, 1e-300))
        for name, detail in seen.items()
    ]


def find_dead(evidence: Evidence, vanishing: float) -> list[Issue]:
    """Find trained layers all of whose gradients were zero at every step.

    Zeros behind a layer whose gradient vanishes have underflowed, and are found there.
    """
    detail = "every gradient was exactly zero at every step"
    return [
        # The nearest to the loss is where the gradient ends; those before it only get none.
        Issue("dead", CRITICAL, layer.name, detail, badness)
        for badness, (layer, after) in enumerate(_dead_layers(evidence))
        if after is None or not 0 < after.flow < vanishing
    ]


def _dead_layers(evidence: Evidence) -> list[tuple[LayerVitals, LayerVitals | None]]:
    """Return the layers without any gradient, each with the next after it that has one."""
    dead: list[tuple[LayerVitals, LayerVitals | None]] = []
    after = None
    for layer in reversed(evidence.layers):
        if any(p.count for p in layer.trained):
            if layer.norm:
                after = layer
            else:
                dead.append((layer, after))
    return dead[::-1]


def find_bottleneck(evidence: Evidence) -> list[Issue]:
    """Find where the gradient, on its way to the inputs, drops from one layer to the next.

    The three layers on either side have to differ too, or one odd layer would be called one.
    """
    flows = list(evidence.flows.items())
    found = []
    for i in range(1, len(flows)):
        drop = flows[i][1] / flows[i - 1][1]
        before = statistics.median(flow for _, flow in flows[max(i - 3, 0) : i])
        after = statistics.median(flow for _, flow in flows[i : i + 3])
        if drop > FACTOR and after / before > FACTOR:
            detail = f"gradients are {drop:.3g} times smaller here than in {flows[i][0]} after it"
            found.append(Issue("bottleneck", WARNING, flows[i - 1][0], detail, drop))
    return found


def find_imbalance(evidence: Evidence) -> list[Issue]:
    """Find layers that learn, or weigh in the total norm, out of proportion to all others."""
    layers = [layer for layer in evidence.layers if layer.name in evidence.flows]
    if len(layers) < 3:
        return []
    found = []
    total = sum(layer.norm**2 for layer in layers)
    flow = statistics.median(layer.flow for layer in layers)
    update = statistics.median(layer.update or 0.0 for layer in layers)
    for layer in layers:
        share = layer.norm**2 / total
        if layer.update is not None and 0 < FACTOR * update < layer.update and layer.update > 0.01:
            detail = f"one step changes it by {layer.update:.1%}, other layers by {update:.2g}"
            found.append(Issue("imbalance", WARNING, layer.name, detail, layer.update / update))
        elif share > 0.99 and layer.flow > FACTOR * flow:
            detail = f"it holds {share:.2%} of the squared norm, {layer.flow / flow:.3g} times the "
            detail += "median RMS of all layers"
            found.append(Issue("imbalance", WARNING, layer.name, detail, layer.flow / flow))
    return found


def find_stale(evidence: Evidence) -> list[Issue]:
    """Find parameters that should be trained and got no gradient since the last report."""
    found = []
    for layer in evidence.layers:
        missing = [p for p in layer.parameters if p.status in (UNUSED, STALE)]
        if missing:
            never = all(p.status == UNUSED for p in missing)
            names = ", ".join(p.name.rpartition(".")[2] for p in missing)
            detail = f"no gradient {'at any step' if never else 'since the last report'} ({names})"
            found.append(Issue("stale", WARNING, layer.name, detail, len(missing)))
    return found
