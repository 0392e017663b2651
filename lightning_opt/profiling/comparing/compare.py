"""Compares step time, memory and loss of Trainer configurations that train in turns."""

from __future__ import annotations

import contextlib
import json
import math
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from lightning_opt.core.arguments import check_at_least, check_positive
from lightning_opt.core.measure.memory import MB
from lightning_opt.core.measure.timing import rotated, take_turns
from lightning_opt.core.numerics.ratios import Ratio, compare_pairs
from lightning_opt.core.output.report import Report, finite
from lightning_opt.worker.gate import Step
from lightning_opt.worker.recipes import Factory, Settings, check_settings
from lightning_opt.worker.training_process import FitFailed, TrainingProcess

MIN_TURN_SECONDS = 0.1
"""Minimum duration of a turn if ``steps`` is None."""

OFFSET = 0.008
"""Assumed standard deviation of log(ratio) for two equal runs, each in its own process. In 100
comparisons of equal runs with two starts each it was 0.006, including noise.
``comparing_calibration.py`` measures it."""

TOLERANCE = 0.01
"""Smaller differences count as no difference."""

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


def verdict_note(ratios: Mapping[str, Ratio]) -> str:
    """Explain the verdicts, and state the smallest detectable difference."""
    margin = max(ratio.high / ratio.value - 1 for ratio in ratios.values())
    limit = f"Differences of less than about {max(margin, TOLERANCE):.1%} cannot be detected here."
    if margin > 1:
        limit = "Differences cannot be detected here: there are too few turns. Measure longer."
    return (
        "Ratios with 95% intervals. No difference: the interval contains 1, or the ratio is within "
        f"{TOLERANCE:.0%} of it. {limit}"
    )


def ratio_columns(ratio: Ratio | None) -> dict[str, Any]:
    """Return the table cells for a ratio. None marks the reference row."""
    if ratio is None:
        return {"ratio": 1.0, "low": None, "high": None, "verdict": ""}
    numbers = {"ratio": ratio.value, "low": ratio.low, "high": ratio.high}
    return {**{key: round(value, 4) for key, value in numbers.items()}, "verdict": ratio.verdict}


@dataclass
class Training:
    """The steps of one training of a configuration."""

    steps: list[Step]
    turns: list[list[Step]] = field(default_factory=list)


@dataclass
class Run:
    """All trainings of one configuration.

    Attributes:
        name: The configuration's name.
        trainings: One training for each start of the process.
        failure: The failure that ended the run, or None.
        peak: Peak memory in bytes; None before the first turn.
    """

    name: str
    trainings: list[Training] = field(default_factory=list)
    failure: FitFailed | None = None
    peak: int | None = None

    @property
    def timed(self) -> list[Step]:
        return [s for t in self.trainings for turn in t.turns for s in turn]


class Comparison(Measured):
    """The result of :func:`compare`.

    Attributes:
        report: One row per configuration: median milliseconds per step, samples per second, the
            ratio to the first configuration with its interval and a verdict, peak memory, and the
            loss after equal steps.
        ratios: The ``Ratio`` of each other configuration to the first, without failed ones.
        failures: The ``FitFailed`` of each failed configuration.
        runs: All steps of each configuration.
    """

    def __init__(self, runs: Mapping[str, Run]) -> None:
        self.runs = dict(runs)
        self.failures = {name: run.failure for name, run in runs.items() if run.failure is not None}
        finished = {name: run for name, run in runs.items() if not run.failure and run.timed}
        sizes = {step.samples for run in finished.values() for step in run.timed}
        self._per_sample = len(sizes) > 1 and min(sizes) > 0
        first = next(iter(runs))
        ratios: dict[str, Ratio] = {}
        if first in finished:
            for name in [name for name in finished if name != first]:
                pairs = self._pairs(finished[first], finished[name])
                if ratio := compare_pairs(pairs, offset=OFFSET, tolerance=TOLERANCE):
                    ratios[name] = ratio
        self.ratios = ratios
        losses = _losses_after_equal_steps(finished)
        rows = [self._row(run, name == first, losses.get(name)) for name, run in runs.items()]
        starts = max((len(run.trainings) for run in finished.values()), default=0)
        turns = max((len(t.turns) for run in finished.values() for t in run.trainings), default=0)
        notes = [f"Starts of each configuration: {starts}, with up to {turns} turns per start."]
        if self._per_sample:
            notes.append("Batches differ in size, so ratios are of seconds per sample.")
        if ratios:
            notes.append(verdict_note(ratios))
        super().__init__(Report("Steps of the Trainer", rows, notes), ratios)

    def _pairs(self, first: Run, other: Run) -> list[list[tuple[float, float]]]:
        return [
            [(self._cost(x), self._cost(y)) for x, y in zip(a.turns, b.turns, strict=False)]
            for a, b in zip(first.trainings, other.trainings, strict=False)
        ]

    def _cost(self, steps: Sequence[Step]) -> float:
        """Return the mean seconds per step, or per sample if batches differ in size."""
        total = math.fsum(step.seconds for step in steps)
        return total / (sum(step.samples for step in steps) if self._per_sample else len(steps))

    def _row(self, run: Run, is_first: bool, loss: float | None) -> dict[str, Any]:
        steps = run.timed
        total = math.fsum(step.seconds for step in steps)
        row: dict[str, Any] = {
            "configuration": run.name,
            "ms/step": 1e3 * statistics.median(step.seconds for step in steps) if steps else None,
            "samples/s": sum(step.samples for step in steps) / total if total else None,
        }
        row |= ratio_columns(self.ratios.get(run.name))
        if run.failure is not None:
            row |= {"ratio": None, "verdict": f"failed, {run.failure.kind}: {run.failure.message}"}
        elif not is_first and run.name not in self.ratios:
            row |= {"ratio": None, "verdict": "nothing to compare with"}
        row["peak MB"] = None if run.peak is None else round(run.peak / MB, 1)
        row["loss, equal steps"] = loss
        return row

    def to_json(self) -> str:
        """Return the report, all failures, and the seconds and losses of every step as JSON."""
        details = {
            name: [
                {
                    "seconds": [[s.seconds for s in turn] for turn in t.turns],
                    "losses": [finite(s.loss) for s in t.steps],
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


def _losses_after_equal_steps(runs: Mapping[str, Run]) -> dict[str, float | None]:
    """Return each run's loss at the last step that all runs have reached."""
    found: dict[str, list[float]] = {name: [] for name in runs}
    for trainings in zip(*(run.trainings for run in runs.values()), strict=False):
        count = min(len(training.steps) for training in trainings)
        last = slice(count - max(1, min(MAX_SMOOTHED, count // 4)), count)
        for name, training in zip(runs, trainings, strict=True):
            found[name].append(statistics.fmean(step.loss for step in training.steps[last]))
    return {name: finite(statistics.fmean(values)) for name, values in found.items() if values}


def compare(
    model: Factory,
    data: Factory,
    configurations: Mapping[str, Settings],
    *,
    steps: int | None = None,
    rounds: int = 12,
    starts: int = 3,
    warmup: int = 3,
    seed: int = 0,
    seconds: float | None = None,
    timeout: float = 120.0,
) -> Comparison:
    """Train under several Trainer configurations in turns, and test whether they differ.

    Each configuration is a real run in its own process. All processes are alive at once and take
    turns of a few steps, in rotating order, so that a slow minute of the machine affects all of
    them. All processes are started ``starts`` times, because one process can stay a little faster
    than another with the same settings. If a configuration fails, its row states the failure, and
    the other configurations continue.

    ``"no difference"`` means that the 95% interval of the ratio to the first configuration
    contains 1, or that the ratio is within 1% of 1. It does not prove that the two are equal.
    The interval, and a note below the table, give the smallest detectable difference.

    A step is one batch. Its time runs from the end of the previous batch to its own end, so it
    includes data and callbacks. Validation and checkpoints are included only if the settings enable
    them. Loggers write nothing. Loader workers pause between turns, and the first step after a
    pause is not timed. Ratios are medians over turns of the turns' means. So work that happens
    every few steps counts, but work that is missing from most turns does not.

    Args:
        model: A function without arguments that makes the LightningModule, or its import path
            ``"package.module:attribute"`` or ``"path/to/file.py:attribute"``.
        data: The same for a LightningDataModule or a DataLoader.
        configurations: Trainer arguments by configuration name, or functions that return them
            (called for each run, so that callbacks are new). The first is the reference.
        steps: Timed steps per start. None: enough for turns of at least 0.1 seconds and at least
            2 steps.
        rounds: Turns per start.
        starts: Starts of each configuration's process.
        warmup: First steps after each start, which are not timed.
        seed: Seed of all random numbers; the same for all runs, so that losses are comparable.
        seconds: Time limit. The result then contains the measurements so far, but at least two
            turns of each run.
        timeout: Maximum seconds for the start of a run, and for each turn.

    Raises:
        TypeError: If model, data or settings are not factories.
        ValueError: If there are no configurations, or a number is out of range.

    Example:
        >>> result = lo.compare(  # doctest: +SKIP
        ...     Model, make_data, {"plain": {}, "bf16": {"precision": "bf16-mixed"}}
        ... )
        >>> print(result)  # doctest: +SKIP
    """
    if not isinstance(configurations, Mapping) or not configurations:
        raise ValueError(
            "configurations must be a dict from names to Trainer arguments with at least one "
            f"entry, got {configurations!r}."
        )
    checked_settings = {
        str(name): check_settings(f"The configuration {name!r}", settings)
        for name, settings in configurations.items()
    }
    check_at_least("rounds", rounds, 1)
    check_at_least("starts", starts, 1)
    check_at_least("warmup", warmup, 1)
    if steps is not None and check_at_least("steps", steps, 1) < rounds:
        raise ValueError(
            f"There must be at least one step per turn: steps is {steps} and rounds {rounds}."
        )
    if seconds is not None:
        check_positive("seconds", seconds)
    end = math.inf if seconds is None else time.monotonic() + seconds
    runs = {name: Run(name) for name in checked_settings}
    recipe = {"model": model, "data": data, "seed": seed, "timeout": timeout}
    for start in range(starts):
        alive = {name: s for name, s in checked_settings.items() if runs[name].failure is None}
        now = time.monotonic()
        deadline = now + max(0.0, end - now) / (starts - start)
        _train_in_turns(recipe, alive, runs, start, steps, rounds, warmup, deadline)
        if time.monotonic() >= end:
            break
    return Comparison(runs)


def _train_in_turns(
    recipe: Mapping[str, Any],
    settings: Mapping[str, Settings],
    runs: Mapping[str, Run],
    start: int,
    steps: int | None,
    rounds: int,
    warmup: int,
    end: float,
) -> None:
    with contextlib.ExitStack() as stack:
        processes: dict[str, TrainingProcess] = {}
        paces: list[float] = []
        for name in rotated(list(settings), start):
            with _failure_recorded(runs[name], processes):
                processes[name] = process = stack.enter_context(
                    TrainingProcess(**recipe, settings=settings[name])
                )
                paces.append(min(step.seconds for step in process.advance(warmup)))
                runs[name].trainings.append(Training(process.steps))
        lengths = _turn_lengths(steps, rounds, paces)

        def take_turn(name: str) -> float:
            run, process, taken = runs[name], processes[name], []
            turns = run.trainings[-1].turns
            with _failure_recorded(run, timers):
                taken = process.advance(1 + lengths[len(turns)])[1:]
                turns.append(taken)
                run.peak = max(run.peak or 0, process.peak_bytes)
            return math.fsum(step.seconds for step in taken)

        timers = {name: partial(take_turn, name) for name in settings if name in processes}
        for rounds_taken, _ in enumerate(take_turns(timers, first=start), start=1):
            if rounds_taken == rounds or (rounds_taken >= 2 and time.monotonic() >= end):
                break
        for process in processes.values():
            process.ask_to_end()  # processes end in parallel; the stack then waits for each


@contextlib.contextmanager
def _failure_recorded(run: Run, running: dict[str, Any]) -> Iterator[None]:
    try:
        yield
    except FitFailed as failure:
        run.failure = failure
        running.pop(run.name, None)


def _turn_lengths(steps: int | None, rounds: int, paces: list[float]) -> list[int]:
    if steps is None:
        slowest = max(paces, default=1.0)
        steps = rounds * max(2, math.ceil(MIN_TURN_SECONDS / max(slowest, 1e-6)))
    return [steps // rounds + (turn_index < steps % rounds) for turn_index in range(rounds)]
