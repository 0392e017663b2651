"""What a person reads of a run's gradients: a verdict, its issues, and the layers worst first."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any, NamedTuple

from lightning_opt.gradients.health.issues import CRITICAL, Issue
from lightning_opt.gradients.health.vitals import LayerVitals


class HealthSummary(NamedTuple):
    """A verdict on a run.

    Attributes:
        status: ``"healthy"``, ``"warning"`` or ``"critical"``.
        sentence: Why.
    """

    status: str
    sentence: str

    def __str__(self) -> str:
        return f"{self.status}: {self.sentence}"


def summarise(
    issues: Sequence[Issue], steps: int, reports: int, nonfinite: int = 0
) -> HealthSummary:
    """Return one word and one sentence on what the issues mean.

    Args:
        issues: The worst first.
        steps: Optimizer steps seen.
        reports: Reports made of them.
        nonfinite: Steps whose gradients were NaN or infinite.
    """
    if issues:
        worst = issues[0]
        status = "critical" if worst.severity == CRITICAL else "warning"
        rest = f"; {len(issues) - 1} more" if len(issues) > 1 else ""
        sentence = f"{worst.type} at {worst.where}: {worst.detail}{rest}"
        return HealthSummary(status, sentence)
    if nonfinite:
        sentence = f"no issue now, but {nonfinite} of {steps} steps had gradients of NaN or Inf"
        return HealthSummary("warning", sentence)
    if not reports:
        return HealthSummary("healthy", f"nothing was found yet; no report in {steps} steps")
    return HealthSummary("healthy", f"no issue in {steps} steps")


def layer_rows(layers: Sequence[LayerVitals], issues: Sequence[Issue]) -> list[dict[str, Any]]:
    """Return one row a layer, the worst first.

    Worst are layers with critical issues, then with others, then those whose gradient is furthest,
    in orders of magnitude, from the median of all.

    Args:
        layers: In forward order.
        issues: What is wrong.
    """
    flows = [layer.flow for layer in layers if layer.trained and layer.flow]
    middle = math.log(statistics.median(flows)) if flows else 0.0

    def badness(layer: LayerVitals) -> tuple[int, int, int, float]:
        mine = [issue for issue in issues if layer.name in (issue.place, *issue.others)]
        distance = abs(math.log(layer.flow) - middle) if layer.trained and layer.flow else 0.0
        critical = sum(issue.severity == CRITICAL for issue in mine)
        named = sum(layer.name == issue.place for issue in mine)
        return (-critical, -len(mine), -named, -distance)

    rows = []
    for layer in sorted(layers, key=badness):
        state = ", ".join(i.type for i in issues if layer.name in (i.place, *i.others))
        rows.append(
            {
                "layer": layer.name,
                "elements": sum(p.numel for p in layer.parameters),
                "rms": layer.flow if layer.trained else None,
                "max": layer.max,
                "zeros": None if layer.zeros is None else f"{layer.zeros:.1%}",
                "update": layer.update,
                "noise": layer.noise if layer.trained else None,
                "state": state or ("ok" if layer.trained else layer.status),
            }
        )
    return rows
