"""Find gradient issues in the measurements of a report.

Norms of healthy models differ by many orders of magnitude. Measurements are therefore compared with
the run's own history and with the other layers. Most findings must appear in several reports in a
row before they become an issue. An issue is dropped at the first report without the finding.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

from lightning_opt.gradients.health.layer_stats import NO_GRADIENT, LayerStats

CRITICAL, WARNING = "critical", "warning"

ADVICE = {
    "nan": "Look for log, sqrt, division or acos at the edge of their domain; activations=True "
    "names the source module of a NaN. NonFiniteGuard skips such steps.",
    "inf": "Look for exp, division by small numbers, or too high a learning rate; under 16-mixed, "
    "use bf16-mixed. NonFiniteGuard skips such steps.",
    "exploding": "Add AdaptiveClipping(), lower the learning rate or lengthen its warm-up; check "
    "initialisation and normalisation of the named layer, and that the loss is a mean, not a sum.",
    "vanishing": "Replace sigmoid or tanh by ReLU, GELU or SiLU, add residual connections or "
    "normalisation, and initialise for the activation in use (He, Xavier).",
    "dead": "No gradient reaches this layer. Its ReLU may never fire (lower the learning rate, "
    "use LeakyReLU or GELU, re-initialise), or its output is detached or multiplied by zero.",
    "bottleneck": "Check the operations between the two layers, and this one's input: a "
    "saturated activation, a small constant factor, a normalisation with a large denominator. A "
    "residual connection helps.",
    "stale": "Nothing in the loss depends on it: does forward() skip it, is it detached, or is it "
    "used only in some batches? If intended, set requires_grad=False or remove it from the "
    "optimizer.",
}

REPORTS_NEEDED = {"vanishing": 2, "dead": 3, "bottleneck": 2, "stale": 2}
"""Reports in a row before a finding becomes an issue; 1 for other types."""

OVERFLOW_STREAK = 20
"""After this many non-finite steps in a row, they no longer count as loss-scaler overflows.

The scaler halves its scale at each overflow. After 20 halvings its default scale is below 1.
"""

BOTTLENECK = 100.0
"""Ratio between the gradient RMS of neighbouring layers above which there is a bottleneck."""


@dataclass(frozen=True, slots=True)
class Issue:
    """A fault, its place and advice.

    Attributes:
        type: ``nan``, ``inf``, ``exploding``, ``vanishing``, ``dead``, ``bottleneck`` or ``stale``.
        severity: ``"critical"``: training fails or makes no progress. ``"warning"``: worth a check.
        place: The affected layer, or ``"all layers"``. With several layers, the worst one.
        detail: The measured values.
        badness: Compares issues of the same type. Larger is worse.
        others: The other affected layers.
    """

    type: str
    severity: str
    place: str
    detail: str
    badness: float = 0.0
    others: tuple[str, ...] = ()

    @property
    def advice(self) -> str:
        return ADVICE[self.type]

    @property
    def where(self) -> str:
        return self.place + (f" and {len(self.others)} more" if self.others else "")

    def __str__(self) -> str:
        return f"[{self.severity}] {self.type} at {self.where}: {self.detail}."


@dataclass
class Evidence:
    """The measurements of one report for one optimizer.

    Attributes:
        layers: The layers' statistics, in the order in which the model registers them.
        totals: Step number and total norm of each step since the last report.
        overflows: Whether the non-finite norms are overflows of the loss scaler.
        early: Median total norm of the first report; None in the first report.
        typical: Median of all earlier reports' median total norms; None in the first report.
    """

    layers: list[LayerStats]
    totals: list[tuple[int, float]]
    overflows: bool = False
    early: float | None = None
    typical: float | None = None

    @cached_property
    def flows(self) -> dict[str, float]:
        """The gradient RMS of each layer, in the order of ``layers``.

        If at least three layers have a weight matrix, the others are omitted: gradients of
        normalisation layers (gains and biases) have another scale.
        """
        live = [layer for layer in self.layers if layer.trained and layer.flow]
        weights = [layer for layer in live if any(p.matrix for p in layer.trained)]
        return {layer.name: layer.flow for layer in (weights if len(weights) >= 3 else live)}

    def finite(self) -> list[float]:
        return [total for _, total in self.totals if math.isfinite(total)]


def diagnose(evidence: Evidence, exploding: float, vanishing: float) -> list[Issue]:
    """Return all findings of one report, given the limits of :class:`GradientHealth`."""
    return [
        *_find_nonfinite(evidence),
        *_find_exploding(evidence, exploding),
        *_find_vanishing(evidence, vanishing),
        *_find_dead(evidence),
        *_find_bottleneck(evidence),
        *_find_stale(evidence),
    ]


def _find_nonfinite(evidence: Evidence) -> list[Issue]:
    bad = [(step, total) for step, total in evidence.totals if not math.isfinite(total)]
    if not bad or evidence.overflows:
        return []
    start = bad[0][0]
    layers = [layer for layer in evidence.layers if layer.trained]
    affected = [layer for layer in layers if any(p.first == start for p in layer.parameters)]
    nan = math.isnan(bad[0][1]) or any(p.nan for layer in affected for p in layer.parameters)
    kind = "nan" if nan else "inf"
    steps = f"step {start}" if len(bad) == 1 else f"{len(bad)} steps from step {start}"
    if not affected or len(affected) == len(layers):
        detail = f"every gradient was {kind.upper()} at {steps}, so the loss itself was not finite"
        return [Issue(kind, CRITICAL, "all layers", detail)]
    # The backward pass reaches the last of these layers first.
    place = affected[-1].name
    detail = f"{kind.upper()} gradients in {len(affected)} of {len(layers)} layers at {steps}"
    return [Issue(kind, CRITICAL, place, detail)]


def _find_exploding(evidence: Evidence, limit: float) -> list[Issue]:
    finite = evidence.finite()
    layers = [layer for layer in evidence.layers if layer.trained]
    if not finite or not layers:
        return []
    median = statistics.median(finite)
    earlier = [value for value in (evidence.early, evidence.typical) if value]
    growth = median / max(earlier) if earlier else 1.0
    if median <= limit and growth <= limit:
        return []
    worst = max(layers, key=lambda layer: layer.norm)
    detail = f"total norm {median:.3g}"
    if growth >= 2:
        detail += f", {growth:.3g} times its earlier level"
    large = median > limit and (growth >= 10 or median > 1000 * limit)
    critical = large or growth > 100 * limit
    return [Issue("exploding", CRITICAL if critical else WARNING, worst.name, detail)]


def _find_vanishing(evidence: Evidence, limit: float) -> list[Issue]:
    flows = evidence.flows
    if not flows:
        return []
    largest = max(flows.values())
    if largest < limit:
        # The gradients of all layers are small, as in a converged model. It is an issue only if
        # they were as small at the start.
        typical, early = evidence.typical, evidence.early
        if typical is None or not early or typical < 0.1 * early:
            return []
        detail = f"the largest gradient RMS of any layer is {largest:.3g}, small since the start"
        return [Issue("vanishing", WARNING, "all layers", detail)]
    small = {name: flow for name, flow in flows.items() if flow < min(limit, 1e-3 * largest)}
    strongest = max(flows, key=flows.__getitem__)
    severity = CRITICAL if 4 * len(small) >= len(flows) else WARNING
    found = []
    for name, flow in small.items():
        detail = f"gradient RMS {flow:.2g}, {flow / largest:.2g} times that at {strongest}"
        found.append(Issue("vanishing", severity, name, detail, largest / flow))
    return found


def _find_dead(evidence: Evidence) -> list[Issue]:
    dead = [
        layer
        for layer in evidence.layers
        if any(parameter.count for parameter in layer.trained) and not layer.norm
    ]
    detail = "every gradient was exactly zero at every step"
    # The dead layer nearest to the loss blocks the gradient, so it is the worst.
    return [Issue("dead", CRITICAL, layer.name, detail, place) for place, layer in enumerate(dead)]


def _find_bottleneck(evidence: Evidence) -> list[Issue]:
    """Find neighbouring layers between which the gradient drops.

    The medians of up to three layers on each side must drop as well. A single odd layer therefore
    does not count.
    """
    flows = list(evidence.flows.items())
    found = []
    for i in range(1, len(flows)):
        drop = flows[i][1] / flows[i - 1][1]
        before = statistics.median(flow for _, flow in flows[max(i - 3, 0) : i])
        after = statistics.median(flow for _, flow in flows[i : i + 3])
        if drop > BOTTLENECK and after / before > BOTTLENECK:
            detail = f"gradients are {drop:.3g} times smaller than in the next layer, {flows[i][0]}"
            found.append(Issue("bottleneck", WARNING, flows[i - 1][0], detail, drop))
    return found


def _find_stale(evidence: Evidence) -> list[Issue]:
    found = []
    for layer in evidence.layers:
        missing = [p.name for p in layer.parameters if p.status == NO_GRADIENT]
        if missing:
            names = ", ".join(name.rpartition(".")[2] for name in missing)
            detail = f"no gradient since the last report ({names})"
            found.append(Issue("stale", WARNING, layer.name, detail, len(missing)))
    return found


class Persistence:
    """Tracks findings over reports. A finding becomes an issue after enough reports in a row."""

    def __init__(self) -> None:
        self.tracks: dict[str, dict[str, Any]] = {}
        """How often each finding was seen in a row, and its issue. Never changed in place."""

    def update(self, findings: Sequence[Issue]) -> None:
        before, self.tracks = self.tracks, {}
        for finding in findings:
            key, issue = self._key(finding), asdict(finding)
            track = before.get(key, {"seen": 0, "issue": issue})
            if key == "nonfinite":
                # NaN weights make every layer's gradient NaN, so only the first place is
                # informative. A critical finding stays critical.
                known = self.tracks.get(key, track)["issue"]["severity"]
                worst = CRITICAL if CRITICAL in (known, finding.severity) else WARNING
                issue = {**track["issue"], "severity": worst}
            self.tracks[key] = {"seen": track["seen"] + 1, "issue": issue}

    def _key(self, finding: Issue) -> str:
        if finding.type in ("nan", "inf"):
            return "nonfinite"
        # A finding that needs several reports must stay in one layer; "exploding" may move.
        lasting = finding.type in REPORTS_NEEDED
        return f"{finding.type}|{finding.place}" if lasting else finding.type

    def issues(self) -> list[Issue]:
        """Return one issue per type, at its worst place: critical ones first, then by type."""
        lasting = [
            Issue(**track["issue"])
            for track in self.tracks.values()
            if track["seen"] >= REPORTS_NEEDED.get(track["issue"]["type"], 1)
        ]
        issues = []
        for kind in ADVICE:
            alike = [issue for issue in lasting if issue.type == kind]
            if alike:
                worst = max(alike, key=lambda issue: (issue.severity == CRITICAL, issue.badness))
                others = tuple(issue.place for issue in alike if issue is not worst)
                issues.append(replace(worst, others=others))
        return sorted(issues, key=lambda issue: issue.severity != CRITICAL)
