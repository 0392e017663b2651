"""The results of `benchmark` and `compare`: tables with ratios to the first row."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from lightning_opt.core.measure.memory import MB
from lightning_opt.core.numerics.ratios import Ratio, compare_pairs, quartiles
from lightning_opt.core.output.report import Report
from lightning_opt.worker.gate import Step
from lightning_opt.worker.training_process import FitFailed

OFFSET = 0.008
"""Assumed standard deviation of log(ratio) for two equal runs, each in its own process. It was
0.006 including noise in 100 comparisons of equal runs, with two starts each. To measure it again,
run ``comparing_calibration.py``."""

MAX_SMOOTHED = 10
"""Maximum number of steps over which a loss is averaged."""


class Measured:
    """A table of measurements, with ratios to its first row."""

    def __init__(self, report: Report, ratios: Mapping[str, Ratio]) -> None:
        self.report, self.ratios = report, dict(ratios)

    def __str__(self) -> str:
        return str(self.report)

    def _repr_markdown_(self) -> str:
        return self.report.to_markdown()


def verdict_note(ratios: Mapping[str, Ratio], confidence: float, tolerance: float) -> str:
    """Explain the verdicts, and state the smallest detectable difference."""
    margin = max(ratio.high / ratio.value - 1 for ratio in ratios.values())
    return (
        f"Ratios with {100 * confidence:g}% intervals. No difference: the interval contains 1, or "
        f"the ratio is within {100 * tolerance:g}% of it. A difference of less than about "
        f"{100 * max(margin, tolerance):.1f}% would not have been seen here."
    )


def ratio_columns(ratio: Ratio | None) -> dict[str, Any]:
    """Return the table cells for a ratio. None marks the reference row."""
    if ratio is None:
        return {"ratio": 1.0, "low": None, "high": None, "verdict": ""}
    numbers = {"ratio": ratio.value, "low": ratio.low, "high": ratio.high}
    return {**{key: round(value, 4) for key, value in numbers.items()}, "verdict": ratio.verdict}


class Training:
    """The steps of one training of a configuration."""

    def __init__(self, steps: list[Step]) -> None:
        self.steps = steps
        self.turns: dict[int, list[Step]] = {}


class Run:
    """All trainings of one configuration.

    Attributes:
        name: The configuration's name.
        trainings: One training for each start of the process.
        failure: The failure that ended the run, or None.
        peak: Peak memory in bytes; None before the first turn.
        summary: The device, the number of devices and the process ID.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.trainings: list[Training] = []
        self.failure: FitFailed | None = None
        self.peak: int | None = None
        self.summary: dict[str, Any] = {}

    @property
    def timed(self) -> list[Step]:
        return [s for t in self.trainings for turn in t.turns.values() for s in turn]


class Comparison(Measured):
    """The result of :func:`compare`.

    Attributes:
        report: One row per configuration: median and quartiles of the milliseconds per step,
            samples per second, the ratio to the first configuration with its interval and a
            verdict, peak memory, and the loss after equal steps.
        ratios: The ``Ratio`` of each configuration to the first. It excludes the first and the
            failed ones.
        failures: The ``FitFailed`` of each failed configuration.
        runs: All steps of each configuration.
    """

    def __init__(self, runs: Mapping[str, Run], *, confidence: float, tolerance: float) -> None:
        self.runs = dict(runs)
        self.failures = {name: run.failure for name, run in runs.items() if run.failure is not None}
        finished = {name: run for name, run in runs.items() if not run.failure and run.timed}
        timed = [step for run in finished.values() for step in run.timed]
        sizes = {step.samples for step in timed}
        self._per_sample = len(sizes) > 1 and min(sizes) > 0
        first = next(iter(runs))
        ratios: dict[str, Ratio] = {}
        if first in finished:
            for name in [name for name in finished if name != first]:
                pairs = self._pairs(finished[first], finished[name])
                ratio = compare_pairs(
                    pairs, confidence=confidence, offset=OFFSET, tolerance=tolerance
                )
                if ratio is not None:
                    ratios[name] = ratio
        self.ratios = ratios
        losses = _losses_after_equal_steps(finished)
        rows = [self._row(run, name == first, losses.get(name)) for name, run in runs.items()]
        notes = self._notes(finished, first)
        if ratios:
            notes.append(verdict_note(ratios, confidence, tolerance))
        super().__init__(Report("Steps of the Trainer", rows, notes), ratios)

    def _pairs(self, first: Run, other: Run) -> list[list[tuple[float, float]]]:
        return [
            [(self._cost(a.turns[n]), self._cost(b.turns[n])) for n in a.turns if n in b.turns]
            for a, b in zip(first.trainings, other.trainings, strict=False)
        ]

    def _cost(self, steps: Sequence[Step]) -> float:
        """Return the mean seconds per step, or per sample if batches differ in size."""
        total = math.fsum(step.seconds for step in steps)
        return total / (sum(step.samples for step in steps) if self._per_sample else len(steps))

    def _row(self, run: Run, is_first: bool, loss: float | None) -> dict[str, Any]:
        steps = run.timed
        low, middle, high = quartiles([1e3 * step.seconds for step in steps] or [math.nan])
        total = math.fsum(step.seconds for step in steps)
        row: dict[str, Any] = {
            "configuration": run.name,
            "ms/step": _finite(middle),
            "lower quartile": _finite(low),
            "upper quartile": _finite(high),
            "samples/s": sum(step.samples for step in steps) / total if total else None,
        }
        if run.failure is not None:
            row |= dict.fromkeys(("ratio", "low", "high"))
            row["verdict"] = f"failed, {run.failure.kind}: {run.failure.message}"
        elif is_first or run.name in self.ratios:
            row |= ratio_columns(self.ratios.get(run.name))
        else:
            row |= {**dict.fromkeys(("ratio", "low", "high")), "verdict": "nothing to compare with"}
        row["peak MB"] = None if run.peak is None else round(run.peak / MB, 1)
        row["loss, equal steps"] = loss
        return row

    def _notes(self, finished: Mapping[str, Run], first: str) -> list[str]:
        starts = max((len(run.trainings) for run in finished.values()), default=0)
        turns = max((len(t.turns) for run in finished.values() for t in run.trainings), default=0)
        each = "1 start in a process of its own"
        each = f"{starts} starts, each in a process of its own" if starts > 1 else each
        notes = [f"{each}, up to {turns} turns in each."]
        if self._per_sample:
            notes.append("Batches differ in size, so ratios are of seconds per sample.")
        if any(run.peak is not None for run in finished.values()):
            devices = {str(run.summary.get("device", "cpu")) for run in finished.values()}
            memory = "allocated on the device" if devices != {"cpu"} else "resident memory"
            several = any(run.summary.get("devices", 1) > 1 for run in finished.values())
            rank = ", of rank 0" if several else ""
            notes.append(f"Peak: {memory}, above the level before the model was created{rank}.")
        notes.append("Losses are of training batches, from one seed.")
        if first not in finished and len(self.runs) > 1:
            notes.append(f"{first!r}, the reference of the ratios, has failed.")
        return notes

    def to_json(self) -> str:
        """Return the report, all failures, and the seconds and losses of every step as JSON."""
        details = {
            name: [
                {
                    "seconds": [[s.seconds for s in turn] for turn in t.turns.values()],
                    "losses": [_finite(s.loss) for s in t.steps],
                }
                for t in run.trainings
            ]
            for name, run in self.runs.items()
        }
        failures = {
            name: {"kind": failure.kind, "message": failure.message, "details": failure.details}
            for name, failure in self.failures.items()
        }
        content = {**json.loads(self.report.to_json()), "trainings": details, "failures": failures}
        return json.dumps(content, indent=2)


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _losses_after_equal_steps(runs: Mapping[str, Run]) -> dict[str, float | None]:
    """Return each run's loss at the last step that all runs have reached."""
    found: dict[str, list[float]] = {name: [] for name in runs}
    for trainings in zip(*(run.trainings for run in runs.values()), strict=False):
        count = min(len(training.steps) for training in trainings)
        last = slice(count - max(1, min(MAX_SMOOTHED, count // 4)), count)
        for name, training in zip(runs, trainings, strict=True):
            found[name].append(statistics.fmean(step.loss for step in training.steps[last]))
    return {name: _finite(statistics.fmean(values)) for name, values in found.items() if values}
