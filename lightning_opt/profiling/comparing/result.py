"""What a comparison of configurations has found: per configuration, and beside the first."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from lightning_opt.core.measure.memory import MB
from lightning_opt.core.numerics.ratios import Ratio, compare_pairs, quartiles
from lightning_opt.core.output.report import Report
from lightning_opt.profiling.comparing.measured import Measured, ratio_columns, verdict_note
from lightning_opt.worker.gate import Step
from lightning_opt.worker.training_process import FitFailed

OFFSET = 0.008
"""By how much two equal trainings in processes of their own differ for good, as a rule: the
standard deviation of the logarithm of the ratio of their times. In 100 comparisons of equal ones,
of two starts each, the ratios spread by 0.006, noise included: ``compare_calibration.py``."""

SMOOTHED = 10
"""Over how many steps at most a loss is averaged."""


class Training:
    """The steps of one training, from its start.

    Attributes:
        steps: All of them.
        turns: By the number of the turn, the steps of it that count for time.
    """

    def __init__(self) -> None:
        self.steps: list[Step] = []
        self.turns: dict[int, list[Step]] = {}


class Run:
    """What one configuration has done, over all its trainings.

    Attributes:
        name: Of the configuration.
        trainings: One a start of its process.
        failure: How it has failed, or None.
        peak: Bytes, or None where nobody knows.
        summary: Of the training: model, device, strategy, precision.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.trainings: list[Training] = []
        self.failure: FitFailed | None = None
        self.peak: int | None = None
        self.summary: dict[str, Any] = {}

    @property
    def timed(self) -> list[Step]:
        """All steps that count for time."""
        return [s for t in self.trainings for turn in t.turns.values() for s in turn]

    def begin(self, summary: Mapping[str, Any]) -> None:
        """Begin a training."""
        self.summary = dict(summary)
        self.trainings.append(Training())

    def add(self, steps: Sequence[Step], wanted: int, turn: int | None = None) -> None:
        """Take steps; of those of a turn all but the first count for time.

        Raises:
            FitFailed: If they are fewer than was asked for.
        """
        training = self.trainings[-1]
        training.steps += steps
        if len(steps) < wanted:
            raise FitFailed(
                "error",
                f"The training ended after {len(training.steps)} steps, by its own limits "
                "(max_steps, max_epochs, early stopping) or the end of its data.",
            )
        if turn is not None:
            training.turns[turn] = list(steps[1:])

    def pace(self) -> float:
        """Return the seconds of a step, as far as warming up tells."""
        return min(step.seconds for step in self.trainings[-1].steps)


class Comparison(Measured):
    """The result of :func:`compare`.

    Attributes:
        report: A row a configuration: median and quartiles of the milliseconds of a step, samples a
            second, the ratio to the first with its interval and a verdict, the peak of memory, and
            the loss after equal steps.
        ratios: For each configuration but the first, and but those that failed, its
            ``Ratio`` to the first.
        failures: For each that failed its ``FitFailed``.
        runs: All steps of each.
    """

    def __init__(self, runs: Mapping[str, Run], *, confidence: float, tolerance: float) -> None:
        self.runs = dict(runs)
        self.failures = {name: run.failure for name, run in runs.items() if run.failure is not None}
        whole = {name: run for name, run in runs.items() if run.failure is None and run.timed}
        self._by_sample = len({s.samples for run in whole.values() for s in run.timed}) > 1 and all(
            s.samples > 0 for run in whole.values() for s in run.timed
        )
        first = next(iter(runs))
        self.ratios: dict[str, Ratio] = {}
        for name, run in whole.items():
            if name != first and first in whole:
                ratio = compare_pairs(
                    self._pairs(whole[first], run),
                    confidence=confidence,
                    offset=OFFSET,
                    tolerance=tolerance,
                )
                if ratio is not None:
                    self.ratios[name] = ratio
        losses = _losses_after_steps(whole)
        rows = [self._row(run, name == first, losses.get(name)) for name, run in runs.items()]
        notes = self._notes(whole, first)
        if self.ratios:
            notes.append(verdict_note(self.ratios, confidence, tolerance))
        super().__init__(Report("Steps of the Trainer", rows, notes), self.ratios)

    def _pairs(self, first: Run, other: Run) -> list[list[tuple[float, float]]]:
        return [
            [(self._cost(a.turns[n]), self._cost(b.turns[n])) for n in a.turns if n in b.turns]
            for a, b in zip(first.trainings, other.trainings, strict=False)
        ]

    def _cost(self, steps: Sequence[Step]) -> float:
        total = math.fsum(step.seconds for step in steps)
        return total / (sum(step.samples for step in steps) if self._by_sample else len(steps))

    def _row(self, run: Run, is_first: bool, loss: float | None) -> dict[str, Any]:
        steps = run.timed
        row: dict[str, Any] = {"configuration": run.name}
        low, middle, high = quartiles([1e3 * step.seconds for step in steps] or [math.nan])
        total = math.fsum(step.seconds for step in steps)
        row |= {"ms/step": _finite(middle)}
        row |= {"lower quartile": _finite(low), "upper quartile": _finite(high)}
        row["samples/s"] = sum(step.samples for step in steps) / total if total else None
        if run.failure is not None:
            row |= dict.fromkeys(("ratio", "low", "high"))
            row["verdict"] = f"failed, {run.failure.kind}: {run.failure.message}"
        elif is_first:
            row |= ratio_columns(None)
        elif run.name in self.ratios:
            row |= ratio_columns(self.ratios[run.name])
        else:
            row |= {**dict.fromkeys(("ratio", "low", "high")), "verdict": "nothing to compare with"}
        row["peak MB"] = None if run.peak is None else round(run.peak / MB, 1)
        row["loss, equal steps"] = loss
        return row

    def _notes(self, whole: Mapping[str, Run], first: str) -> list[str]:
        starts = max((len(run.trainings) for run in whole.values()), default=0)
        turns = max((len(t.turns) for run in whole.values() for t in run.trainings), default=0)
        each = "1 start in a process of its own"
        each = f"{starts} starts, each in a process of its own" if starts > 1 else each
        notes = [f"{each}, up to {turns} turns in each."]
        if self._by_sample:
            notes.append("Batches differ in size, so ratios are of seconds for a sample.")
        if any(run.peak is not None for run in whole.values()):
            devices = {str(run.summary.get("device", "cpu")) for run in whole.values()}
            what = "allocated on the device" if devices != {"cpu"} else "resident memory"
            several = any(run.summary.get("devices", 1) > 1 for run in whole.values())
            rank = ", of rank 0" if several else ""
            notes.append(f"Peak: {what} above that before the model was made{rank}.")
        notes.append("Losses are of training batches, from one seed.")
        if first not in whole and len(self.runs) > 1:
            notes.append(f"{first!r}, with which others are compared, has failed.")
        return notes

    def to_json(self) -> str:
        """Return report, ratios and the seconds and losses of every step as JSON."""
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


def _losses_after_steps(runs: Mapping[str, Run]) -> dict[str, float | None]:
    """Return the loss when each has taken as many steps as the one that took the fewest."""
    found: dict[str, list[float]] = {name: [] for name in runs}
    for trainings in zip(*(run.trainings for run in runs.values()), strict=False):
        count = min(len(training.steps) for training in trainings)
        last = slice(count - max(1, min(SMOOTHED, count // 4)), count)
        for name, training in zip(runs, trainings, strict=True):
            found[name].append(statistics.fmean(step.loss for step in training.steps[last]))
    return {name: _finite(statistics.fmean(values)) for name, values in found.items() if values}
