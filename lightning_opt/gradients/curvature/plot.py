"""The figure of a run's curvature. Measures nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from lightning_opt.core.figures import new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LINE, EDGE = "#1f4e79", "#c62828"


def draw_curvature(history: Sequence[Mapping[str, float]]) -> Figure:
    """Draw sharpness with its edge of stability, and trace with its standard error, by step.

    Args:
        history: One entry a look: ``step``, ``sharpness``, ``trace``, ``trace_error`` and, for SGD,
            ``edge``, the sharpness as a share of the edge.

    Raises:
        ImportError: Without matplotlib; the message names the extra.
    """
    figure = new_figure("CurvatureMonitor", figsize=(10, 6), dpi=110, layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True)
    steps = [entry["step"] for entry in history]
    above.plot(steps, [e["sharpness"] for e in history], color=LINE, marker="o", ms=3)
    edges = [(e["step"], e["sharpness"] / e["edge"]) for e in history if e.get("edge")]
    if edges:
        above.plot(*zip(*edges, strict=True), color=EDGE, ls="--", label="edge of stability")
        above.legend(fontsize=8)
    above.set_title("Sharpness: the largest eigenvalue of the Hessian", loc="left", fontsize=11)
    below.errorbar(steps, [e["trace"] for e in history], [e["trace_error"] for e in history],
                   color=LINE, marker="o", ms=3, capsize=2)  # fmt: skip
    below.set_title("Trace, with its standard error", loc="left", fontsize=11)
    below.set_xlabel("step")
    for axes in (above, below):
        axes.grid(alpha=0.25)
    return figure
