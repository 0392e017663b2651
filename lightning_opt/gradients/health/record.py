"""The health of the parameters of one optimizer, from step to step and from report to report."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lightning_opt.core.norms import GradientStep
from lightning_opt.core.scalars import Scalar
from lightning_opt.gradients.health.diagnosis import OVERFLOW_STREAK, diagnose
from lightning_opt.gradients.health.findings import (
    CRITICAL,
    Finding,
    Issue,
    Limits,
    Persistence,
    Snapshot,
)
from lightning_opt.gradients.health.measures import (
    GradientTable,
    NormDigest,
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
    merge_digests,
)

TIMELINE = 128
"""Reports kept over time; when there are more, every second one goes."""

EARLY = 10
"""Steps whose norms say where the run started."""


class OptimizerHealth:
    """What is known of one optimizer's gradients, and what was wrong in them.

    Each step goes through :meth:`observe`. On a step that is due, :meth:`measure` comes before the
    update, :meth:`updated` after it, and :meth:`complete` reads and diagnoses.

    Attributes:
        steps: Optimizer steps seen.
        nonfinite: Steps whose gradients were NaN or infinite, without those below.
        overflows: Such steps that the loss scaler brought about and skipped.
        first_nonfinite: The first of the former; 0 if there is none.
        layers: What the last report measured, in forward order.
        issues: What the last report found.
        timeline: One entry a report: step, low, median and high of the total norm, RMS by layer.
    """

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._window = NormWindow()
        self._digests: list[NormDigest] = []  # of a window that a checkpoint cut in two
        self._persistence = Persistence(limits.dead_after)
        self._table: GradientTable | None = None
        self._probe: UpdateProbe | None = None
        self._changes: Tensor | None = None
        self._scale: Tensor | None = None
        self._early: list[float] = []
        self._seen: set[str] = set()
        self._streak = 0
        self._half = False
        self._measured = 0
        self.steps = 0
        self.reported_step = 0
        self.nonfinite = 0
        self.overflows = 0
        self.first_nonfinite = 0
        self.median_norm = math.nan
        self.peak_norm = math.nan
        self.layers: list[LayerVitals] = []
        self.issues: list[Issue] = []
        self.timeline: list[dict[str, Any]] = []

    @property
    def is_measured(self) -> bool:
        """Whether a report has been measured and waits to be completed."""
        return self._table is not None

    def observe(self, step: GradientStep) -> None:
        """Take in one step, reading nothing."""
        self.steps += 1
        if step.gradients.tensors:
            self._window.append(step, self.steps)

    def measure(self, step: GradientStep, loss_scale: Scalar | None) -> None:
        """Measure what only reports have, before the update. All ranks call it together."""
        self._table = measure_gradients(step)
        self._measured = self.steps
        gradients = step.gradients
        self._probe = UpdateProbe(self._table.names, gradients.parameters, gradients.groups)
        self._changes = None
        self._half = any(tensor.dtype == torch.float16 for tensor in gradients.tensors)
        self._scale = None
        if loss_scale is not None:
            scale = torch.as_tensor(loss_scale)
            self._scale = scale.clone().reshape(1)  # the scaler changes its own in place

    def updated(self) -> None:
        """Measure what the update changed. All ranks call it together."""
        if self._probe is not None and self._changes is None:
            self._changes = self._probe.compare()
            self._probe = None

    def complete(
        self,
        parameters: Mapping[str, Tensor],
        order: Mapping[str, int],
        *,
        scaled: bool,
        extra: tuple[Finding, ...] = (),
    ) -> None:
        """Read what was measured since the last report, and diagnose it.

        Args:
            parameters: The optimizer's parameters by name.
            order: The place of each module in the forward pass.
            scaled: Whether a loss scaler skips steps that overflow.
            extra: What was found elsewhere, in activations.
        """
        vitals, totals, scale = self._read(parameters)
        self._count(totals, scaled)
        self.layers = group_layers(vitals.values(), order)
        if self._half and scale is None:
            scale = 1.0
        bad = [total for _, total in totals if not math.isfinite(total)]
        snapshot = Snapshot(
            layers=self.layers,
            totals=totals,
            overflows=bool(bad) and scaled and self._streak < OVERFLOW_STREAK,
            early=statistics.median(self._early) if len(self._early) >= EARLY else None,
            typical=statistics.median(e["median"] for e in self.timeline)
            if self.timeline
            else None,
            before=self.timeline[-1]["flow"] if self.timeline else {},
            loss_scale=scale,
        )
        findings = [*diagnose(snapshot, self._limits), *extra]
        self._persistence.update(findings, self.steps)
        self.issues = self._persistence.issues(order)
        self._note(snapshot)
        self.reported_step = self.steps

    def _read(
        self, parameters: Mapping[str, Tensor]
    ) -> tuple[dict[str, ParameterVitals], list[tuple[int, float]], float | None]:
        blocks = self._window.take()
        tensors = [packed for _, _, packed in blocks]
        tensors += self._table.tensors() if self._table is not None else []
        tensors += [tensor for tensor in (self._changes, self._scale) if tensor is not None]
        read = read_together(tensors)
        digests = self._digests + [
            NormDigest.unpack(names, first, read.pop(0)) for names, first, _ in blocks
        ]
        self._digests = []
        vitals = {
            name: ParameterVitals(name, parameter.numel(), parameter.ndim >= 2)
            for name, parameter in parameters.items()
        }
        totals = merge_digests(vitals, digests)
        if self._table is not None:
            count = len(self._table.tensors())
            rows = self._table.unpack(read[:count])
            del read[:count]
            for name, row in rows.items():
                if name in vitals:
                    _enter(vitals[name], row)
            broken = any(row["nan"] or row["inf"] for row in rows.values())
            for place, (number, total) in enumerate(totals):
                if number == self._measured and math.isinf(total) and not broken:
                    # The squares overflowed, no element did: the norm is at least this large.
                    totals[place] = (number, math.hypot(*(row["max"] for row in rows.values())))
        if self._changes is not None and self._table is not None:
            flat = read.pop(0)
            names = self._table.names
            for name, change, weight in zip(names, flat, flat[len(names) :], strict=False):
                learns = name in vitals and vitals[name].count > 0
                if learns and weight > 0 and math.isfinite(change + weight):
                    vitals[name].update = math.sqrt(change / weight)
                    vitals[name].weight = math.sqrt(weight)
        scale = read.pop(0)[0] if self._scale is not None else None
        for name, parameter in parameters.items():
            vitals[name].status = self._status(vitals[name], parameter)
        self._table = self._probe = self._changes = self._scale = None
        return vitals, totals, scale

    def _status(self, vitals: ParameterVitals, parameter: Tensor) -> str:
        # Of a shard without a gradient only reports know that there was none: its norm is zero.
        known = self._table is not None or vitals.name in self._seen
        if vitals.nan or vitals.inf or (vitals.count and (vitals.mean or known)):
            self._seen.add(vitals.name)
            return TRAINED
        if not parameter.requires_grad:
            return FROZEN
        return STALE if vitals.name in self._seen else UNUSED

    def _count(self, totals: list[tuple[int, float]], scaled: bool) -> None:
        """Count the non-finite steps, and keep the first norms."""
        for step, total in totals:
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
                self.first_nonfinite = self.first_nonfinite or step

    def _note(self, snapshot: Snapshot) -> None:
        """Enter the report into the timeline."""
        finite = [total for _, total in snapshot.totals if math.isfinite(total)]
        if not finite:
            return
        self.median_norm, self.peak_norm = statistics.median(finite), max(finite)
        self.timeline.append(
            {
                "step": self.steps,
                "low": min(finite),
                "median": self.median_norm,
                "high": self.peak_norm,
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
        elements = [(p.zeros, p.numel) for layer in trained for p in layer.trained]
        zeros = sum((share or 0.0) * numel for share, numel in elements)
        critical = sum(issue.severity == CRITICAL for issue in self.issues)
        values = {
            "norm": self.median_norm,
            "peak_norm": self.peak_norm,
            "noise": statistics.median(layer.noise for layer in trained) if trained else math.nan,
            "update": statistics.median(updates) if updates else math.nan,
            "zeros": zeros / max(sum(numel for _, numel in elements), 1),
            "smallest_rms": min(flows, default=math.nan),
            "largest_rms": max(flows, default=math.nan),
            "nonfinite": float(self.nonfinite),
            "overflows": float(self.overflows),
            "critical": float(critical),
            "warnings": float(len(self.issues) - critical),
        }
        return {key: value for key, value in values.items() if not math.isnan(value)}

    def release(self) -> None:
        """Let go of the model: keep what was seen, drop what was being measured."""
        self._keep_window()
        self._table = self._probe = self._changes = self._scale = None
        self._window.clear()

    def _keep_window(self) -> None:
        blocks = self._window.take()
        read = read_together([packed for _, _, packed in blocks])
        self._digests += [
            NormDigest.unpack(names, first, values)
            for (names, first, _), values in zip(blocks, read, strict=True)
        ]

    def pending_nonfinite(self) -> bool:
        """Return whether a step since the last report was not finite. Waits for the device."""
        self._keep_window()
        return any(not math.isfinite(t) for digest in self._digests for t in digest.totals)

    def state_dict(self) -> dict[str, Any]:
        """Return everything that a resumed run needs, as plain types. Waits for the device."""
        self._keep_window()
        return {
            "steps": self.steps,
            "reported_step": self.reported_step,
            "nonfinite": self.nonfinite,
            "overflows": self.overflows,
            "first_nonfinite": self.first_nonfinite,
            "median_norm": self.median_norm,
            "peak_norm": self.peak_norm,
            "streak": self._streak,
            "early": list(self._early),
            "seen": sorted(self._seen),
            "timeline": [dict(entry) for entry in self.timeline],
            "window": [dataclasses.asdict(digest) for digest in self._digests],
            "persistence": self._persistence.state_dict(),
            "layers": [dataclasses.asdict(layer) for layer in self.layers],
            "issues": [issue.to_dict() for issue in self.issues],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned."""
        for name in ("steps", "reported_step", "nonfinite", "overflows", "first_nonfinite"):
            setattr(self, name, state[name])
        self.median_norm, self.peak_norm = state["median_norm"], state["peak_norm"]
        self._streak, self._early = state["streak"], list(state["early"])
        self._seen = set(state["seen"])
        self.timeline = [dict(entry) for entry in state["timeline"]]
        self._digests = [NormDigest(**digest) for digest in state["window"]]
        self._persistence.load_state_dict(state["persistence"])
        self.layers = [
            LayerVitals(layer["name"], [ParameterVitals(**p) for p in layer["parameters"]])
            for layer in state["layers"]
        ]
        self.issues = [
            Issue(**{**issue, "others": tuple(issue["others"])}) for issue in state["issues"]
        ]


def _enter(vitals: ParameterVitals, row: Mapping[str, float]) -> None:
    """Enter what the reported step was measured to be."""
    vitals.numel = int(row["numel"])  # a shard knows only its own part
    if not row["present"]:
        # A shard whose parameter has no gradient on any rank was measured as zeros.
        vitals.count, vitals.nan, vitals.inf, vitals.first = 0, 0, 0, 0
        return
    vitals.norm, vitals.max = row["norm"], row["max"]
    vitals.zeros = 1.0 - row["nonzero"] / row["numel"] if row["numel"] else None
    if not vitals.mean and row["max"]:
        vitals.mean = row["max"]  # its squares underflowed in float32, its elements did not
    if math.isinf(row["norm"]) and not row["inf"] and not row["nan"]:
        vitals.inf -= 1  # its squares overflowed, its elements did not
        vitals.count, vitals.mean = max(vitals.count, 1), max(vitals.mean, row["max"])
        if not vitals.inf and not vitals.nan:
            vitals.first = 0
