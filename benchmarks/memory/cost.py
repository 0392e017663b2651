"""Cost of the memory callbacks in a training step of about ten milliseconds.

Supports: MemoryCleanup and GarbageCollection together at most 1.005 of the step, MemoryProfiler at
most 1.03 without counting by module, with its period at 50 steps. The time in hooks lacks what the
profiler adds to operators; whole steps contain it.
"""

from __future__ import annotations

import torch
from torch import nn

import lightning_opt as lo
from benchmarks.harness import parse_arguments, publish
from benchmarks.models import Regression
from benchmarks.trainer_steps import EXPLANATION, time_steps

STEPS = 200
"""Timed steps per fit: a multiple of every period."""


def ten_millisecond_model() -> Regression:
    """Return an MLP of width 512 whose step takes about ten milliseconds on one thread."""
    layers = [layer for _ in range(6) for layer in (nn.Linear(512, 512), nn.GELU())]
    return Regression(nn.Sequential(*layers), torch.randn(48, 512))


def main() -> None:
    """Measure and publish the table."""
    arguments = parse_arguments(__doc__)
    torch.manual_seed(0)
    rounds, steps = (1, 50) if arguments.quick else (7, STEPS)
    candidates = {
        "bare step": [],
        "bare step again": [],
        "MemoryCleanup": [lo.MemoryCleanup()],
        "GarbageCollection": [lo.GarbageCollection()],
        "MemoryCleanup and GarbageCollection": [lo.MemoryCleanup(), lo.GarbageCollection()],
        "LeakDetector": [lo.LeakDetector()],
        "MemoryProfiler": [lo.MemoryProfiler()],
        "MemoryProfiler, every 10 steps": [lo.MemoryProfiler(10)],
    }
    module = ten_millisecond_model().to(arguments.device)
    times = time_steps(module, candidates, rounds=rounds, steps=steps)
    rows = [{"what": name, **timed.row(times["bare step"])} for name, timed in times.items()]
    notes = [*EXPLANATION, f"{rounds} rounds of {steps} steps."]
    publish("memory_cost", lo.Report("Cost of the memory callbacks", rows, notes), arguments)


if __name__ == "__main__":
    main()
