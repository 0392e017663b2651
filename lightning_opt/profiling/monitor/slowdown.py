"""The measurements of a run, their table and verdicts, and the detection of slowdowns."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from lightning_opt.core.numerics.ratios import mann_kendall
from lightning_opt.core.output.loggers import History
from lightning_opt.core.output.report import Report, Verdict
from lightning_opt.profiling.durations import Work

LABELS = {
    "gpu_percent": ("GPU use", "%"),
    "gpu_memory_mb": ("GPU memory", "MB"),
    "gpu_watts": ("GPU power", "W"),
    "gpu_celsius": ("GPU temperature", "°C"),
    "cpu_percent": ("CPU use, with children", "% of a core"),
    "rss_mb": ("resident memory, with children", "MB"),
    "child_processes": ("child processes", ""),
}

MIN_GPU_PERCENT = 70.0
"""Below this percentage of time in which the GPU is busy, the verdict is ``look``."""

MIN_LOSSES = 8
"""Minimum number of losses for a verdict on their trend."""

MAX_POINTS = 96
"""Maximum number of points in a history. Must be even, because points are merged in pairs."""

MIN_BEFORE, MIN_AFTER = 10, 5
"""Minimum number of points before and after the start of a slowdown."""

SIGNIFICANCE, MIN_STANDARD_ERRORS = 0.01, 5.0
"""Significance level of trends, and the minimum drop in standard errors. The minimum is high
because the test is repeated at every report, and the best fit's residuals underestimate the noise.
"""


class Slowdown(NamedTuple):
    """A throughput that has fallen and not recovered.

    Attributes:
        step: The first slow step.
        before: Throughput before that step.
        after: The newest throughput.
    """

    step: int
    before: float
    after: float

    @property
    def drop(self) -> float:
        """Lost throughput, as a share of the earlier throughput."""
        return 1 - self.after / self.before


def find_slowdown(steps: Sequence[int], rates: Sequence[float], min_drop: float) -> Slowdown | None:
    """Return the slowdown of a series, or None.

    A step or ramp downwards is fitted to the series. The series has a slowdown if:

    1. the Mann-Kendall test, which is robust to outliers, finds a decreasing trend,
    2. the newest values are at least ``min_drop`` below the values before the step or ramp,
    3. the difference exceeds the noise. The noise estimate allows for autocorrelation.

    Args:
        steps: The step of each value, increasing.
        rates: Throughput values, all above 0.
        min_drop: Minimum drop that counts as a slowdown, as a share of the throughput.
    """
    if len(rates) < MIN_BEFORE + MIN_AFTER:
        return None
    # Cheap checks first: most reports find nothing.
    top = sorted(rates)[int(0.95 * (len(rates) - 1))]
    if statistics.median(rates[-MIN_AFTER:]) > (1 - min_drop) * top:
        return None
    if mann_kendall([-rate for rate in rates])[1] > SIGNIFICANCE:
        return None
    start, residuals = _fit_slowdown(rates)
    before = statistics.median(rates[:start])
    newest = rates[max(start, len(rates) - max(MIN_AFTER, (len(rates) - start) // 3)) :]
    slowdown = Slowdown(steps[start], before, statistics.median(newest))
    slow_reports = sum(rate < before * (1 - min_drop / 2) for rate in newest)
    if slowdown.drop < min_drop or slow_reports < 0.8 * len(newest):
        return None
    noise = MIN_STANDARD_ERRORS * _standard_error(residuals, start, len(newest))
    return slowdown if before - slowdown.after >= noise else None


def _fit_slowdown(values: Sequence[float]) -> tuple[int, list[float]]:
    """Fit a step or a ramp downwards. Return the start of the best fit, and its residuals."""
    best, best_start, residuals = math.inf, MIN_BEFORE, [0.0] * len(values)
    for start in range(MIN_BEFORE, len(values) - MIN_AFTER + 1):
        level, rest = statistics.median(values[:start]), values[start:]
        lower = statistics.median(rest)
        if lower >= level:
            continue
        slope = statistics.median((value - level) / i for i, value in enumerate(rest, start=1))
        head = [value - level for value in values[:start]]
        for tail in (
            [value - lower for value in rest],
            [value - level - i * slope for i, value in enumerate(rest, start=1)],
        ):
            error = sum(map(abs, head)) + sum(map(abs, tail))
            if error < best:
                best, best_start, residuals = error, start, head + tail
    return best_start, residuals


def _standard_error(residuals: Sequence[float], before: int, after: int) -> float:
    """Return the standard error of the difference of means over ``before`` and ``after`` values."""
    squares = sum(value * value for value in residuals)
    if not squares:
        return 0.0
    # Autocorrelated values carry less information. The added term corrects a bias of short series.
    estimate = sum(a * b for a, b in itertools.pairwise(residuals)) / squares + 8 / len(residuals)
    correlation = min(0.95, max(0.0, estimate))
    sigma = 1.4826 * statistics.median(map(abs, residuals))
    return sigma * math.sqrt((1 + correlation) / (1 - correlation) * (1 / before + 1 / after))


class Throughput:
    """The throughput of a run, as two histories of bounded length.

    ``newest`` holds the newest reports. It shows a sudden slowdown early, even in a long run.
    ``whole`` covers the whole run and shows gradual slowdowns. When it is full, pairs of points are
    merged, which halves its resolution.

    Attributes:
        whole: Points of the whole run. A point is a list of step, amount and seconds.
        newest: Points of the newest reports, in the same form.
    """

    def __init__(self) -> None:
        self.whole: list[list[float]] = []
        self.newest: list[list[float]] = []
        self._reports_per_point = 1
        self._reports_in_last_point = 0

    def add(self, step: int, amount: float, seconds: float) -> None:
        """Add a report: starting at ``step``, ``amount`` of work took ``seconds``."""
        self.newest = [*self.newest[1 - MAX_POINTS :], [step, amount, seconds]]
        if self._reports_in_last_point:
            self.whole[-1] = _joined(self.whole[-1], [step, amount, seconds])
        else:
            if len(self.whole) == MAX_POINTS:
                pairs = zip(self.whole[::2], self.whole[1::2], strict=True)
                self.whole = [_joined(*pair) for pair in pairs]
                self._reports_per_point *= 2
            self.whole.append([step, amount, seconds])
        self._reports_in_last_point = (self._reports_in_last_point + 1) % self._reports_per_point

    def find_slowdown(self, min_drop: float) -> Slowdown | None:
        """Return the slowdown over the whole run, else the recent one, else None."""
        complete = self.whole[: len(self.whole) - bool(self._reports_in_last_point)]
        for points in (complete, self.newest):
            steps, rates = [int(point[0]) for point in points], [p[1] / p[2] for p in points]
            slowdown = find_slowdown(steps, rates, min_drop)
            if slowdown is not None:
                return slowdown
        return None

    def state_dict(self) -> dict[str, Any]:
        """Return both histories as plain types."""
        return {
            "whole": [list(point) for point in self.whole],
            "newest": [list(point) for point in self.newest],
            "reports_per_point": self._reports_per_point,
            "open": self._reports_in_last_point,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the result of :meth:`state_dict`."""
        self.whole = [list(point) for point in state["whole"]]
        self.newest = [list(point) for point in state["newest"]]
        self._reports_per_point = state["reports_per_point"]
        self._reports_in_last_point = state["open"]


def _joined(first: Sequence[float], second: Sequence[float]) -> list[float]:
    # Keep the first step, so that the start of a slowdown is reported.
    return [first[0], first[1] + second[1], first[2] + second[2]]


class Record:
    """The measurements of a run.

    Attributes:
        ranks: Number of ranks with their own data.
        work: The timed steps.
        losses: One loss per report, by the number of its batch.
        samples: Count, sum and largest value of each sampled quantity.
    """

    def __init__(self, samples: Sequence[Mapping[str, float]] = ()) -> None:
        self.ranks = 1
        self.work = Work()
        self.losses = History()
        self.samples: dict[str, tuple[int, float, float]] = {}
        self.add(samples)

    def add(self, samples: Sequence[Mapping[str, float]]) -> None:
        """Add samples to the count, sum and largest value of each quantity."""
        for sample in samples:
            for name, value in sample.items():
                count, total, largest = self.samples.get(name, (0, 0.0, value))
                self.samples[name] = count + 1, total + value, max(largest, value)

    def means(self) -> dict[str, float]:
        """Return the mean of each sampled quantity."""
        return {name: total / count for name, (count, total, _) in self.samples.items()}


def build_report(record: Record, slowdown: Slowdown | None) -> Report:
    """Return the table of a run."""
    times, rows = record.work.steps, []
    if times.count:
        rows.append(_row("step", "ms", 1e3 * times.quantile(0.5), 1e3 * times.quantile(0.95)))
        rows += [
            _row(key.replace("_", " "), "", rate * record.ranks)
            for key, rate in record.work.rates().items()
        ]
    means = record.means()
    rows += [
        _row(words, unit, means[name], record.samples[name][2])
        for name, (words, unit) in LABELS.items()
        if name in means
    ]
    notes = []
    if rows:
        ranks = ", summed over all ranks" if record.ranks > 1 else ""
        notes.append(
            "Steps: median and 95th percentile. Sampled quantities: mean and largest value. Rates: "
            f"means{ranks}."
        )
    if slowdown is not None:
        notes.append(describe(slowdown))
    return Report(f"PerformanceMonitor: {times.count} steps", rows, notes)


def _row(quantity: str, unit: str, typical: float, high: float | None = None) -> dict[str, Any]:
    return {"quantity": quantity, "unit": unit, "typical": typical, "high": high}


def describe(slowdown: Slowdown) -> str:
    """Describe a slowdown in one sentence."""
    return (
        f"Throughput has fallen by {slowdown.drop:.0%} since about step {slowdown.step}, from "
        f"{slowdown.before:.4g} to {slowdown.after:.4g} per second."
    )


def judge(record: Record, slowdown: Slowdown | None) -> list[Verdict]:
    """Return the verdicts on throughput and convergence."""
    if not record.work.steps.count:
        finding = "PerformanceMonitor has not timed a step yet."
        return [Verdict("throughput", "unknown", finding, "Train more than two steps.")]
    losses = [loss for _, loss in record.losses.points.get("loss", ())]
    return [_judge_throughput(record, slowdown), _judge_convergence(losses)]


def _judge_throughput(record: Record, slowdown: Slowdown | None) -> Verdict:
    step = f"A step takes {1e3 * record.work.steps.quantile(0.5):.3g} ms"
    gpu_percent = record.means().get("gpu_percent", 100.0)
    if slowdown is not None:
        finding = describe(slowdown)
        advice = "DataMonitor() measures waiting for data, and LeakDetector() memory growth."
        return Verdict("throughput", "look", finding, advice, gain=slowdown.drop)
    if gpu_percent < MIN_GPU_PERCENT:
        finding = f"{step}; the GPU was busy {gpu_percent:.0f}% of the time."
        advice = "Trainer(profiler=StepProfiler()) measures what the GPU waits for."
        return Verdict("throughput", "look", finding, advice, gain=1 - gpu_percent / 100)
    return Verdict("throughput", "ok", f"{step}, and throughput has not fallen.")


def _judge_convergence(losses: list[float]) -> Verdict:
    bad = sum(not math.isfinite(loss) for loss in losses)
    if bad:
        finding = f"{bad} of {len(losses)} recorded losses were NaN or infinite."
        advice = "Add NonFiniteGuard(). GradientHealth() shows the first affected layer."
        return Verdict("convergence", "look", finding, advice, gain=bad / len(losses))
    if len(losses) < MIN_LOSSES:
        finding = f"Only {len(losses)} losses were recorded, one per report."
        return Verdict("convergence", "unknown", finding, "Train longer, or report more often.")
    third = len(losses) // 3
    first, last = statistics.median(losses[:third]), statistics.median(losses[-third:])
    change = f"The loss went from {first:.4g} to {last:.4g} (medians of the first and last third)"
    if mann_kendall([-loss for loss in losses])[1] < SIGNIFICANCE:
        return Verdict("convergence", "ok", f"{change}.")
    if mann_kendall(losses)[1] < SIGNIFICANCE:
        advice = "Lower the learning rate. GradientHealth() shows exploding gradients."
        return Verdict("convergence", "look", f"{change}: it rises.", advice)
    advice = "Train longer, or compare the validation loss of two checkpoints."
    return Verdict("convergence", "unknown", f"{change}, within its noise.", advice)
