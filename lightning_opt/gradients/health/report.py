"""What a person reads of a run's gradients: a verdict, its issues, and the layers worst first."""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Mapping, Sequence
from typing import IO, Any, NamedTuple

from lightning_opt.core.report import Report
from lightning_opt.gradients.health.findings import CRITICAL, Issue
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


class HealthReport(Report):
    """A verdict, the issues with their advice, and a table of layers.

    Prints as text, renders in a notebook, and gives markdown or JSON.

    Attributes:
        summary: The verdict.
        issues: What is wrong, the worst first.
        rows: One a layer (or parameter): gradient RMS over its non-zero elements, largest
            magnitude, share of zeros, update-to-weight ratio, noise (deviation of its norm over
            steps, relative to the mean), and what is wrong with it.
    """

    def __init__(
        self,
        summary: HealthSummary,
        issues: Sequence[Issue],
        rows: Sequence[Mapping[str, Any]],
        notes: Sequence[str] = (),
    ) -> None:
        super().__init__(f"Gradient health: {summary}", rows, notes)
        self.summary = summary
        self.issues = list(issues)

    def to_dict(self) -> dict[str, Any]:
        """Return verdict, issues, rows and notes as plain types."""
        return {
            "status": self.summary.status,
            "issues": [issue.to_dict() for issue in self.issues],
            **super().to_dict(),
        }

    def to_text(self) -> str:
        """Return the verdict, the issues and the table as plain text."""
        title, *table = super().to_text().split("\n")
        return "\n".join([title, *self._issue_lines("  "), *table])

    def to_markdown(self) -> str:
        """Return the verdict, the issues as a list and the table as markdown."""
        title, _, table = super().to_markdown().partition("\n")
        lines = [
            f"- **{issue.type}** at `{issue.place}`{_more(issue)} ({issue.severity}): "
            f"{issue.detail}. *{issue.advice}*"
            for issue in self.issues
        ]
        return "\n".join([title, "", *lines, table] if lines else [title, table])

    def print(self, file: IO[str] | None = None) -> None:
        """Print the report; the table with rich on a terminal that has it."""
        file = sys.stdout if file is None else file
        if not file.isatty():
            super().print(file)
            return
        file.write("\n".join([self.title, *self._issue_lines("  "), ""]))
        Report("Layers, worst first", self.rows, self.notes).print(file)

    def _issue_lines(self, indent: str) -> list[str]:
        return [
            line
            for issue in self.issues
            for line in (f"{indent}{issue}", f"{indent}    -> {issue.advice}")
        ]


def _more(issue: Issue) -> str:
    return f" and {len(issue.others)} more" if issue.others else ""


def summarise(issues: Sequence[Issue], steps: int, reports: int) -> HealthSummary:
    """Return one word and one sentence on what the issues mean.

    Args:
        issues: The worst first.
        steps: Optimizer steps seen.
        reports: Reports made of them.
    """
    if not reports:
        return HealthSummary("healthy", f"nothing was found yet; no report in {steps} steps")
    if not issues:
        return HealthSummary("healthy", f"no issue in {steps} steps")
    worst = issues[0]
    status = "critical" if worst.severity == CRITICAL else "warning"
    rest = f"; {len(issues) - 1} more" if len(issues) > 1 else ""
    sentence = f"{worst.type} at {worst.place}{_more(worst)}: {worst.detail}{rest}"
    return HealthSummary(status, sentence)


def layer_rows(
    layers: Sequence[LayerVitals], issues: Sequence[Issue], *, by: str = "layer"
) -> list[dict[str, Any]]:
    """Return one row a layer or parameter, the worst first.

    Worst are layers with critical issues, then with others, then those whose gradient is furthest,
    in orders of magnitude, from the median of all.

    Args:
        layers: In forward order.
        issues: What is wrong.
        by: ``"layer"`` or ``"parameter"``.
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
        if by == "layer":
            rows.append(_layer_row(layer, state or ("ok" if layer.trained else layer.status)))
        else:
            rows += [
                {
                    "parameter": p.name,
                    "elements": p.numel,
                    "rms": math.sqrt(p.square / p.active) if p.count else None,
                    "norm": p.norm,
                    "max": p.max,
                    "zeros": _percent(p.zeros),
                    "update": p.update,
                    "noise": math.sqrt(p.spread / p.count) / p.mean if p.mean else None,
                    "state": state or "ok" if p.status == "trained" else p.status,
                }
                for p in layer.parameters
            ]
    return rows


def _layer_row(layer: LayerVitals, state: str) -> dict[str, Any]:
    trained = bool(layer.trained)
    return {
        "layer": layer.name,
        "elements": sum(p.numel for p in layer.parameters),
        "rms": layer.flow if trained else None,
        "max": layer.max,
        "zeros": _percent(layer.zeros),
        "update": layer.update,
        "noise": layer.noise if trained else None,
        "state": state,
    }


def _percent(share: float | None) -> str | None:
    return None if share is None else f"{share:.1%}"
