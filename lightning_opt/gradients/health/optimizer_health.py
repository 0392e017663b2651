"""The gradient health of one optimizer's parameters, over steps and reports."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from lightning_opt.core.numerics.norms import GradientStep
from lightning_opt.gradients.health.diagnosis import (
    CRITICAL,
    OVERFLOW_STREAK,
    Evidence,
    Issue,
    Persistence,
    diagnose,
)
from lightning_opt.gradients.health.layer_stats import (
    LayerStats,
    add_measurements,
    group_layers,
    stats_of_norms,
)
from lightning_opt.gradients.health.measures import (
    NormWindow,
    UpdateProbe,
    measure_gradients,
    read_together,
)

TIMELINE = 128
"""Maximum number of reports in the timeline. Beyond it, every second one is dropped."""

COUNTS = ("steps", "reported_step", "nonfinite", "overflows")


class OptimizerHealth:
    """The measurements and issues of one optimizer's gradients.

    Call :meth:`observe` at each step. If a report is due, call :meth:`measure` before the update
    and :meth:`complete` after it. Only :meth:`complete` reads the device.

    Attributes:
        steps: Optimizer steps so far.
        reported_step: Step of the last report.
        nonfinite: Steps with NaN or infinite gradients, except ``overflows``.
        overflows: Steps with non-finite gradients that the loss scaler caused and skipped.
        pending: Names, gradients and update probe of the report that :meth:`complete` must finish;
            None if no report is due.
        layers: Stats of the last report.
        issues: Issues of the last report.
        timeline: One entry per report: the step, median and maximum of the total norm, and the
            gradient RMS by layer.
    """

    def __init__(self, exploding: float, vanishing: float) -> None:
        self._exploding, self._vanishing = exploding, vanishing
        self._window = NormWindow()
        self.pending: tuple[list[str], Tensor, UpdateProbe] | None = None
        self._persistence = Persistence()
        self._streak = 0  # consecutive non-finite steps
        self.steps = self.reported_step = self.nonfinite = self.overflows = 0
        self.layers: list[LayerStats] = []
        self.issues: list[Issue] = []
        self.timeline: list[dict[str, Any]] = []

    def observe(self, step: GradientStep) -> None:
        self.steps += 1
        self._window.append(step)

    def measure(self, step: GradientStep) -> None:
        """Measure gradients and weights for a report. All ranks must call this."""
        gradients = step.gradients
        table = measure_gradients(step)
        probe = UpdateProbe(gradients.parameters, gradients.groups)
        names = [step.names[parameter] for parameter in gradients.parameters]
        self.pending = (names, table, probe)

    def complete(
        self, parameters: Mapping[str, Tensor], *, scaled: bool, extra: tuple[Issue, ...]
    ) -> bool:
        """Read the measurements since the last report, and diagnose them.

        All ranks must call this if a report is pending.

        Args:
            parameters: The optimizer's parameters by name.
            scaled: Whether there is a loss scaler.
            extra: Findings in activations. They count only if a gradient was not finite: a module
                may mask with minus infinity, and a metric may be infinite.

        Returns:
            Whether a gradient was not finite.
        """
        totals = self._read(parameters)
        self._window = NormWindow()
        self._count_nonfinite(totals, scaled)
        medians = [entry["median"] for entry in self.timeline]
        evidence = Evidence(
            layers=self.layers,
            totals=totals,
            overflows=scaled and self._streak < OVERFLOW_STREAK,
            early=medians[0] if medians else None,
            typical=statistics.median(medians) if medians else None,
        )
        finite = evidence.finite()
        is_nonfinite = len(finite) < len(totals)
        findings = diagnose(evidence, self._exploding, self._vanishing)
        self._persistence.update([*findings, *(extra if is_nonfinite else ())])
        self.issues = self._persistence.issues()
        self._extend_timeline(finite)
        self.reported_step = self.steps
        return is_nonfinite

    def _read(self, parameters: Mapping[str, Tensor]) -> list[tuple[int, float]]:
        """Read all measurements at once, set ``layers``, and return steps with total norms."""
        pending, self.pending = self.pending, None
        blocks, first = self._window.blocks(), self.reported_step + 1
        extra = [] if pending is None else [pending[1], pending[2].compare()]
        read = read_together([*extra, *(rows for _, rows in blocks)])
        on_host = zip((names for names, _ in blocks), read[len(extra) :], strict=True)
        stats, norms = stats_of_norms(parameters, list(on_host), first)
        if pending is not None:
            add_measurements(stats, pending[0], read[:2])
        for name, parameter in parameters.items():
            stats[name].set_status(parameter, is_measured=pending is not None)
        self.layers = group_layers(stats.values())
        return list(enumerate(norms, first))

    def _count_nonfinite(self, totals: list[tuple[int, float]], scaled: bool) -> None:
        for _, total in totals:
            self._streak = 0 if math.isfinite(total) else self._streak + 1
            if self._streak and scaled and self._streak < OVERFLOW_STREAK:
                self.overflows += 1
            elif self._streak:
                self.nonfinite += 1

    def _extend_timeline(self, finite: list[float]) -> None:
        if finite:
            self.timeline.append(
                {
                    "step": self.steps,
                    "median": statistics.median(finite),
                    "high": max(finite),
                    "flow": {layer.name: layer.flow for layer in self.layers if layer.trained},
                }
            )
        if len(self.timeline) > TIMELINE:
            del self.timeline[1::2]

    def scalars(self) -> dict[str, float]:
        """Return the values that a report logs. Unknown values are omitted."""
        trained = [layer for layer in self.layers if layer.trained]
        flows = [layer.flow for layer in trained]
        updates = [layer.update for layer in trained if layer.update is not None]
        model = LayerStats("", [p for layer in trained for p in layer.trained])
        critical = sum(issue.severity == CRITICAL for issue in self.issues)
        values: dict[str, float] = {
            "zeros": model.zeros or 0.0,
            "nonfinite": self.nonfinite,
            "overflows": self.overflows,
            "critical": critical,
            "warnings": len(self.issues) - critical,
        }
        if self.timeline:
            last = self.timeline[-1]
            values |= {"norm": last["median"], "peak_norm": last["high"]}
        if updates:
            values["update"] = statistics.median(updates)
        if trained:
            values["noise"] = statistics.median(layer.noise for layer in trained)
            values |= {"smallest_rms": min(flows), "largest_rms": max(flows)}
        return {key: float(value) for key, value in values.items()}

    def release(self) -> None:
        """Drop references to the model and the pending report. The norms move to the host."""
        self._window.move_to_host()
        self.pending = None

    def has_unreported_nonfinite(self) -> bool:
        """Return whether any norm since the last report is not finite. Waits for the device."""
        blocks = self._window.move_to_host()
        return any(not math.isfinite(total) for _, rows in blocks for total in rows[:, 0])

    def state_dict(self) -> dict[str, Any]:
        window = self._window.move_to_host()
        return {
            **{name: getattr(self, name) for name in COUNTS},
            "streak": self._streak,
            "timeline": [dict(entry) for entry in self.timeline],
            "window": [[list(names), rows.tolist()] for names, rows in window],
            "persistence": self._persistence.tracks,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name in COUNTS:
            setattr(self, name, state[name])
        self._streak = state["streak"]
        self.timeline = [dict(entry) for entry in state["timeline"]]
        self._window.restore(state["window"])
        self._persistence.tracks = state["persistence"]
        self.issues = self._persistence.issues()
