"""Present a run's gradient health: summary and table of layers."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any, NamedTuple

from lightning_opt.gradients.health.diagnosis import CRITICAL, Issue
from lightning_opt.gradients.health.layer_stats import LayerStats


class HealthSummary(NamedTuple):
    """The state of a run's gradients.

    ``status`` is ``"healthy"``, ``"warning"`` or ``"critical"``.
    """

    status: str
    sentence: str

    def __str__(self) -> str:
        return f"{self.status}: {self.sentence}"


def summarize(
    issues: Sequence[Issue], steps: int, reports: int, nonfinite: int = 0
) -> HealthSummary:
    """Summarize ``issues`` in a status and one sentence. The worst issue must come first."""
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


def layer_rows(layers: Sequence[LayerStats], issues: Sequence[Issue]) -> list[dict[str, Any]]:
    """Return one row per layer, the worst first.

    Layers with critical issues come first, then layers with other issues. The rest is sorted by the
    distance between the logarithms of the layer's RMS and the median RMS, largest first.
    """
    flows = [layer.flow for layer in layers if layer.trained and layer.flow]
    middle = math.log(statistics.median(flows)) if flows else 0.0

    def rank(layer: LayerStats) -> tuple[int, int, int, float]:
        own = [issue for issue in issues if layer.name in (issue.place, *issue.others)]
        distance = abs(math.log(layer.flow) - middle) if layer.trained and layer.flow else 0.0
        critical = sum(issue.severity == CRITICAL for issue in own)
        named = sum(layer.name == issue.place for issue in own)
        return (-critical, -len(own), -named, -distance)

    rows = []
    for layer in sorted(layers, key=rank):
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
