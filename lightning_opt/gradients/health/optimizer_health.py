"""The health of the parameters of one optimizer, from step to step and from report to report."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from typing import Any, NamedTuple

from numpy.typing import NDArray
from torch import Tensor

from lightning_opt.core.numerics.norms import GradientStep
from lightning_opt.gradients.health.diagnosis import OVERFLOW_STREAK, Evidence, diagnose
from lightning_opt.gradients.health.issues import CRITICAL, Issue, Persistence
from lightning_opt.gradients.health.measures import (
    NormWindow,
    UpdateProbe,
    measure_gradients,
    read_together,
)
from lightning_opt.gradients.health.vitals import (
    FROZEN,
    STALE,
    TRAINED,
    UNUSED,
    LayerVitals,
    ParameterVitals,
    group_layers,
    window_vitals,
)

LONGEST_WINDOW = 1024
"""Steps after which there is a report, whatever the schedule: a window must not grow for ever."""

TIMELINE = 128
"""Reports kept over time; when there are more, every second one goes."""

EARLY = 10
"""Steps whose norms say where the run started."""

COUNTS = ("steps", "reported_step", "nonfinite", "overflows")


class Measured(NamedTuple):
    """What was measured at the step of a report, still on the device.

    Attributes:
        step: Its number.
        names: Of the tensors.
        table: See :func:`~lightning_opt.gradients.health.measures.measure_gradients`.
        probe: Waits for the update.
    """

    step: int
    names: list[str]
    table: Tensor
    probe: UpdateProbe


class OptimizerHealth:
    """What is known of one optimizer's gradients, and what was wrong in them.

    Each step goes through :meth:`observe`. On a step that is due, :meth:`measure` comes before the
    update, and :meth:`complete`, after it, reads and diagnoses.

    Args:
        exploding: See :class:`lightning_opt.GradientHealth`.
        vanishing: The same.

    Attributes:
        steps: Optimizer steps seen.
        reported_step: That of the last report.
        nonfinite: Steps whose gradients were NaN or infinite, without those below.
        overflows: Such steps that the loss scaler brought about and skipped.
        measured: What waits for the update to be completed; None between reports.
        layers: What the last report measured, in forward order.
        issues: What the last report found.
        timeline: One entry a report: step, low, median and high of the total norm, RMS by layer.
    """

    def __init__(self, exploding: float, vanishing: float) -> None:
        self._exploding, self._vanishing = exploding, vanishing
        self._window = NormWindow()
        self._first = 1  # step of the window
        self.measured: Measured | None = None
        self._persistence = Persistence()
        self._early: list[float] = []
        self._seen: set[str] = set()
        self._streak = 0
        self.steps = self.reported_step = 0
        self.nonfinite = self.overflows = 0
        self.layers: list[LayerVitals] = []
        self.issues: list[Issue] = []
        self.timeline: list[dict[str, Any]] = []

    @property
    def is_full(self) -> bool:
        """Whether there has been no report for so long that it must be made."""
        return self.steps - self._first >= LONGEST_WINDOW

    def observe(self, step: GradientStep) -> None:
        """Take in one step, reading nothing."""
        self.steps += 1
        self._window.append(step)

    def measure(self, step: GradientStep) -> None:
        """Measure what only reports have, before the update. All ranks call it together."""
        gradients = step.gradients
        table = measure_gradients(step)
        probe = UpdateProbe(gradients.parameters, gradients.groups)
        names = [step.names[parameter] for parameter in gradients.parameters]
        self.measured = Measured(self.steps, names, table, probe)

    def complete(
        self,
        parameters: Mapping[str, Tensor],
        order: Mapping[str, int],
        *,
        scaled: bool,
        extra: tuple[Issue, ...] = (),
    ) -> None:
        """Read what was measured since the last report, and diagnose it.

        All ranks call it together if a report was measured.

        Args:
            parameters: The optimizer's parameters by name.
            order: The place of each module in the forward pass.
            scaled: Whether a loss scaler skips steps that overflow.
            extra: What was found elsewhere, in activations.
        """
        blocks, measured = self._window.blocks(), self.measured
        names = [block_names for block_names, _ in blocks]
        rest = [] if measured is None else [measured.table, measured.probe.compare()]
        read = read_together([*rest, *(rows for _, rows in blocks)])
        known = list(zip(names, read[len(rest) :], strict=True))
        vitals, norms = window_vitals(parameters, known, self._first)
        totals = list(enumerate(norms, self._first))
        if measured is not None:
            _enter_table(vitals, measured, read[0], totals)
            _enter_changes(vitals, measured.names, read[1])
        for name, parameter in parameters.items():
            vitals[name].status = self._status(vitals[name], parameter)
        self._window, self.measured, self._first = NormWindow(), None, self.steps + 1
        self._count(totals, scaled)
        self.layers = group_layers(vitals.values(), order)
        medians = [entry["median"] for entry in self.timeline]
        bad = any(not math.isfinite(total) for _, total in totals)
        evidence = Evidence(
            layers=self.layers,
            totals=totals,
            overflows=bad and scaled and self._streak < OVERFLOW_STREAK,
            early=statistics.median(self._early) if len(self._early) >= EARLY else None,
            typical=statistics.median(medians) if medians else None,
            before=self.timeline[-1]["flow"] if self.timeline else {},
        )
        findings = [*diagnose(evidence, self._exploding, self._vanishing), *extra]
        self._persistence.update(findings, self.steps)
        self.issues = self._persistence.issues(order)
        self._note(evidence.finite())
        self.reported_step = self.steps

    def _status(self, vitals: ParameterVitals, parameter: Tensor) -> str:
        # Of a shard without a gradient only reports know that there was none: its norm is zero.
        known = self.measured is not None or vitals.name in self._seen
        if vitals.nan or vitals.inf or (vitals.count and (vitals.mean or known)):
            self._seen.add(vitals.name)
            return TRAINED
        if not parameter.requires_grad:
            return FROZEN
        return STALE if vitals.name in self._seen else UNUSED

    def _count(self, totals: list[tuple[int, float]], scaled: bool) -> None:
        """Count the non-finite steps, and keep the first norms."""
        for _, total in totals:
            if math.isfinite(total):
                self._streak = 0
                if len(self._early) < EARLY:
                    self._early.append(total)
                continue
            self._streak += 1
            if scaled and self._streak < OVERFLOW_STREAK:
                self.overflows += 1
            else:
                self.nonfinite += 1

    def _note(self, finite: list[float]) -> None:
        """Enter the report into the timeline."""
        if finite:
            self.timeline.append(
                {
                    "step": self.steps,
                    "low": min(finite),
                    "median": statistics.median(finite),
                    "high": max(finite),
                    "flow": {layer.name: layer.flow for layer in self.layers if layer.trained},
                }
            )
        if len(self.timeline) > TIMELINE:
            del self.timeline[1::2]

    def scalars(self) -> dict[str, float]:
        """Return what a report logs, by key; what is not known is left out."""
        trained = [layer for layer in self.layers if layer.trained]
        flows = [layer.flow for layer in trained]
        updates = [layer.update for layer in trained if layer.update is not None]
        whole = LayerVitals("", [p for layer in trained for p in layer.trained])
        critical = sum(issue.severity == CRITICAL for issue in self.issues)
        values: dict[str, float] = {
            "zeros": whole.zeros or 0.0,
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
        """Let go of the model: keep what was seen, drop what was being measured."""
        self._keep_window()
        self.measured = None

    def _keep_window(self) -> list[tuple[list[str], NDArray[Any]]]:
        """Read the window to the host and keep it there."""
        blocks = self._window.blocks()
        read = read_together([rows for _, rows in blocks])
        kept = [(names, rows) for (names, _), rows in zip(blocks, read, strict=True)]
        self._window.fill([(names, rows.tolist()) for names, rows in kept])
        return kept

    def pending_nonfinite(self) -> bool:
        """Return whether a step since the last report was not finite. Waits for the device."""
        return any(
            not math.isfinite(total) for _, rows in self._keep_window() for total in rows[:, 0]
        )

    def state_dict(self) -> dict[str, Any]:
        """Return everything that a resumed run needs, as plain types. Waits for the device."""
        return {
            **{name: getattr(self, name) for name in COUNTS},
            "first": self._first,
            "streak": self._streak,
            "early": list(self._early),
            "seen": sorted(self._seen),
            "timeline": [dict(entry) for entry in self.timeline],
            "window": [[list(names), rows.tolist()] for names, rows in self._keep_window()],
            "persistence": self._persistence.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned."""
        for name in COUNTS:
            setattr(self, name, state[name])
        self._first, self._streak, self._early = state["first"], state["streak"], [*state["early"]]
        self._seen = set(state["seen"])
        self.timeline = [dict(entry) for entry in state["timeline"]]
        self._window.fill(state["window"])
        self._persistence.load_state_dict(state["persistence"])
        self.issues = self._persistence.issues({})


def _enter_table(
    vitals: Mapping[str, ParameterVitals],
    measured: Measured,
    table: NDArray[Any],
    totals: list[tuple[int, float]],
) -> None:
    """Enter what the gradients of the reported step were measured to be."""
    norms, largest, nan, inf, nonzero, numels, present = table
    for place, name in enumerate(measured.names):
        found = vitals.get(name)
        if found is None:
            continue
        found.numel = int(numels[place])  # a shard knows only its own part
        if not present[place]:
            # A shard whose parameter has no gradient on any rank was measured as zeros.
            found.count, found.nan, found.inf, found.first = 0, 0, 0, 0
            continue
        found.norm, found.max = float(norms[place]), float(largest[place])
        found.zeros = 1.0 - float(nonzero[place] / numels[place]) if numels[place] else None
        if not found.mean and found.max:
            found.mean = found.max  # its squares underflowed in float32, its elements did not
        if math.isinf(found.norm) and not inf[place] and not nan[place]:
            found.inf -= 1  # its squares overflowed, its elements did not
            found.count, found.mean = max(found.count, 1), max(found.mean, found.max)
            if not found.inf and not found.nan:
                found.first = 0
    for place, (number, total) in enumerate(totals):
        if number == measured.step and math.isinf(total) and not (nan.any() or inf.any()):
            # The squares overflowed, no element did: the norm is at least this large.
            totals[place] = (number, math.hypot(*largest.tolist()))


def _enter_changes(
    vitals: Mapping[str, ParameterVitals], names: list[str], changes: NDArray[Any]
) -> None:
    """Enter what one update changed, and the weights, from their summed squares."""
    for name, change, weight in zip(names, *changes.tolist(), strict=False):
        found = vitals.get(name)
        if found is not None and found.count and weight > 0 and math.isfinite(change + weight):
            found.update, found.weight = math.sqrt(change / weight), math.sqrt(weight)
