"""What a PerformanceMonitor says at the end: its table, and its verdicts."""

from __future__ import annotations

import math
import statistics
from typing import Any

from lightning_opt.core.numerics.trend import mann_kendall
from lightning_opt.core.output.report import Report
from lightning_opt.core.output.verdicts import Verdict
from lightning_opt.profiling.monitor.record import Record
from lightning_opt.profiling.monitor.slowdown import Fall

UNITS = {
    "gpu_percent": ("GPU use", "%"),
    "gpu_memory_mb": ("GPU memory", "MB"),
    "gpu_watts": ("GPU power", "W"),
    "gpu_celsius": ("GPU temperature", "°C"),
    "cpu_percent": ("CPU use, with children", "% of a core"),
    "rss_mb": ("resident memory, with children", "MB"),
    "child_processes": ("child processes", ""),
}

IDLE = 70.0
"""Percent of the time that a GPU should run something, at least."""

LOSSES, SURE = 8, 0.01
"""Losses from which a trend can be told, and the probability of one as clear by chance."""


def build_report(record: Record, fall: Fall | None) -> Report:
    """Return the table of a run."""
    times, rows = record.work.steps, []
    if times.count:
        rows.append(_row("step", "ms", 1e3 * times.quantile(0.5), 1e3 * times.quantile(0.95)))
        rows += [
            _row(key.removesuffix("_per_second") + " a second", "", rate * record.ranks)
            for key, rate in record.work.rates().items()
        ]
    rows += [
        _row(words, unit, record.mean(name), record.largest(name))
        for name, (words, unit) in UNITS.items()
        if name in record.looks
    ]
    notes = []
    if rows:
        whose = " of all ranks" if record.ranks > 1 else ""
        notes.append(
            "Steps: median and 95th percentile. What is sampled: mean and largest value. Rates: "
            f"means{whose}."
        )
    if fall is not None:
        notes.append(describe(fall))
    title = f"PerformanceMonitor: {times.count} steps"
    if record.device:
        title += f" on {record.device}"
    return Report(title, rows, [*notes, *record.notes])


def _row(
    quantity: str, unit: str, typical: float | None, high: float | None = None
) -> dict[str, Any]:
    return {"quantity": quantity, "unit": unit, "typical": typical, "high": high}


def describe(fall: Fall) -> str:
    """Return a fall as a sentence."""
    return (
        f"Throughput has fallen by {fall.drop:.0%} since about step {fall.step}, from "
        f"{fall.before:.4g} to {fall.after:.4g} a second."
    )


def judge(record: Record, fall: Fall | None, *, watched: bool) -> list[Verdict]:
    """Return verdicts on what a run has shown."""
    if not record.work.steps.count:
        why = "PerformanceMonitor has not timed a step yet."
        return [Verdict("throughput", "unknown", why, "Train more than two steps.")]
    return [_throughput(record, fall, watched=watched), _convergence(record.losses)]


def _convergence(losses: list[float]) -> Verdict:
    bad = sum(not math.isfinite(loss) for loss in losses)
    if bad:
        finding = f"{bad} of the {len(losses)} losses looked at were NaN or infinite."
        advice = "Add NonFiniteGuard(), and look at GradientHealth() for where it begins."
        return Verdict("convergence", "look", finding, advice)
    if len(losses) < LOSSES:
        finding = f"Only {len(losses)} losses were looked at, one a report."
        return Verdict("convergence", "unknown", finding, "Train longer, or report more often.")
    third = len(losses) // 3
    first, last = statistics.median(losses[:third]), statistics.median(losses[-third:])
    course = f"The loss went from {first:.4g} to {last:.4g} (medians of the first and last third)"
    if mann_kendall([-loss for loss in losses])[1] < SURE:
        return Verdict("convergence", "ok", f"{course}.")
    if mann_kendall(losses)[1] < SURE:
        advice = "Lower the learning rate, or look at GradientHealth() for what explodes."
        return Verdict("convergence", "look", f"{course}: it rises.", advice)
    advice = "Train longer, or compare the validation loss of two checkpoints."
    return Verdict("convergence", "unknown", f"{course}, within its noise.", advice)


def _throughput(record: Record, fall: Fall | None, *, watched: bool) -> Verdict:
    typical = f"A step takes {1e3 * record.work.steps.quantile(0.5):.3g} ms"
    if fall is not None:
        return Verdict(
            "throughput", "look", describe(fall),
            "Look at what began there: DataMonitor shows waiting, LeakDetector memory.",
        )  # fmt: skip
    use = record.mean("gpu_percent")
    if use is not None and use < IDLE:
        advice = "Find out what the GPU waits for: Trainer(profiler=StepProfiler()) tells."
        return Verdict(
            "throughput", "look", f"{typical}; the GPU ran {use:.0f}% of the time.", advice
        )
    if not watched:
        return Verdict(
            "throughput", "unknown", f"{typical}; whether that grows was not watched.",
            "Leave slowdown=0.1 in PerformanceMonitor.",
        )  # fmt: skip
    return Verdict("throughput", "ok", f"{typical}, and throughput has not fallen.")
