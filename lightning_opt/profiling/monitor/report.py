"""The measurements of a run, and their table and verdicts."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from lightning_opt.core.numerics.ratios import mann_kendall
from lightning_opt.core.output.loggers import History
from lightning_opt.core.output.report import Report, Verdict
from lightning_opt.profiling.durations import Work
from lightning_opt.profiling.monitor.slowdown import Slowdown

UNITS = {
    "gpu_percent": ("GPU use", "%"),
    "gpu_memory_mb": ("GPU memory", "MB"),
    "gpu_watts": ("GPU power", "W"),
    "gpu_celsius": ("GPU temperature", "°C"),
    "cpu_percent": ("CPU use, with children", "% of a core"),
    "rss_mb": ("resident memory, with children", "MB"),
    "child_processes": ("child processes", ""),
}

MIN_GPU_PERCENT = 70.0
"""The verdict is ``look`` if the GPU is busy for a smaller percentage of the time."""

MIN_LOSSES, SIGNIFICANCE = 8, 0.01
"""Minimum number of losses for a verdict on their trend, and its significance level."""


class Record:
    """The measurements of a run.

    Attributes:
        device: Name of the device.
        ranks: Number of processes.
        work: The timed steps.
        losses: The loss of each batch at which a report was due, by the batch's number.
        samples: Count, sum and largest value of each sampled quantity.
        notes: Notes on the sampling.
    """

    def __init__(self) -> None:
        self.device, self.ranks = "", 1
        self.work = Work()
        self.losses = History()
        self.samples: dict[str, tuple[int, float, float]] = {}
        self.notes: list[str] = []

    def add(self, samples: Sequence[Mapping[str, float]]) -> None:
        """Add samples to the count, sum and largest value of each quantity."""
        for sample in samples:
            for name, value in sample.items():
                number, total, largest = self.samples.get(name, (0, 0.0, value))
                self.samples[name] = number + 1, total + value, max(largest, value)

    def means(self) -> dict[str, float]:
        """Return the mean of each sampled quantity."""
        return {name: total / number for name, (number, total, _) in self.samples.items()}


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
        for name, (words, unit) in UNITS.items()
        if name in means
    ]
    notes = []
    if rows:
        ranks = " over all ranks" if record.ranks > 1 else ""
        notes.append(
            "Steps: median and 95th percentile. Sampled quantities: mean and largest value. Rates: "
            f"means{ranks}."
        )
    if slowdown is not None:
        notes.append(describe(slowdown))
    title = f"PerformanceMonitor: {times.count} steps"
    if record.device:
        title += f" on {record.device}"
    return Report(title, rows, [*notes, *record.notes])


def _row(quantity: str, unit: str, typical: float, high: float | None = None) -> dict[str, Any]:
    return {"quantity": quantity, "unit": unit, "typical": typical, "high": high}


def describe(slowdown: Slowdown) -> str:
    """Describe a slowdown in one sentence."""
    return (
        f"Throughput has fallen by {slowdown.drop:.0%} since about step {slowdown.step}, from "
        f"{slowdown.before:.4g} to {slowdown.after:.4g} per second."
    )


def judge(record: Record, slowdown: Slowdown | None, *, watched: bool) -> list[Verdict]:
    """Return the verdicts on throughput and convergence.

    Args:
        record: The measurements.
        slowdown: The slowdown of the run, or None.
        watched: Whether the monitor looked for slowdowns.
    """
    if not record.work.steps.count:
        finding = "PerformanceMonitor has not timed a step yet."
        return [Verdict("throughput", "unknown", finding, "Train more than two steps.")]
    throughput = _judge_throughput(record, slowdown, watched=watched)
    losses = [loss for _, loss in record.losses.points.get("loss", ())]
    return [throughput, _judge_convergence(losses)]


def _judge_throughput(record: Record, slowdown: Slowdown | None, *, watched: bool) -> Verdict:
    step = f"A step takes {1e3 * record.work.steps.quantile(0.5):.3g} ms"
    use = record.means().get("gpu_percent", 100.0)
    if slowdown is not None:
        finding = describe(slowdown)
        advice = "DataMonitor() measures waiting for data, LeakDetector() growing memory."
        return Verdict("throughput", "look", finding, advice, gain=slowdown.drop)
    if use < MIN_GPU_PERCENT:
        finding = f"{step}; the GPU was busy {use:.0f}% of the time."
        advice = "Trainer(profiler=StepProfiler()) measures what the GPU waits for."
        return Verdict("throughput", "look", finding, advice, gain=1 - use / 100)
    if not watched:
        finding = f"{step}; slowdowns were not monitored."
        advice = "Keep slowdown=0.1 in PerformanceMonitor."
        return Verdict("throughput", "unknown", finding, advice)
    return Verdict("throughput", "ok", f"{step}, and throughput has not fallen.")


def _judge_convergence(losses: list[float]) -> Verdict:
    bad = sum(not math.isfinite(loss) for loss in losses)
    if bad:
        finding = f"{bad} of {len(losses)} recorded losses were NaN or infinite."
        advice = "Add NonFiniteGuard(). GradientHealth() shows the layer where it begins."
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
