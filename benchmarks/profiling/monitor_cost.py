"""Cost of PerformanceMonitor: less than 0.5% of a training step of 10 ms.

Supports: "costs next to nothing". Fits with and without the callback take turns; each contains one
report. The cost of the sampling thread is its CPU time divided by the elapsed time, without and
with child processes such as the workers of a loader.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time

import torch
from torch import nn

import lightning_opt as lo
from benchmarks.harness import median_ratio, parse_arguments, publish
from benchmarks.models import Regression
from benchmarks.trainer_steps import time_steps
from lightning_opt.profiling.monitor.sampling import Sampler, find_gpu

GPU = True

STEPS = 50
"""Timed steps per fit, and between reports."""


def ten_milliseconds(device: str) -> Regression:
    """Twenty linear layers: about 10 ms on one thread of a CPU, less on a GPU."""
    layers = [layer for _ in range(20) for layer in (nn.Linear(256, 256), nn.ReLU())]
    return Regression(nn.Sequential(*layers), torch.randn(64, 256, device=device)).to(device)


def thread_share(seconds: float, children: int, device: str) -> float:
    """Return the sampling thread's share of a core at its default interval."""
    sleeping = [
        subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
        for _ in range(children)
    ]
    try:
        time.sleep(0.5)
        sampler = Sampler(1.0, find_gpu(torch.device(device)))
        start = time.process_time()
        time.sleep(seconds)
        spent = time.process_time() - start
        sampler.stop()
    finally:
        for child in sleeping:
            child.kill()
            child.communicate()
    return spent / seconds


def main() -> None:
    """Measure and publish the table."""
    arguments = parse_arguments(__doc__)
    device = arguments.device
    rounds, seconds = (20, 10.5) if device == "cpu" else (8, 5.5)
    if arguments.quick:
        rounds, seconds = 3, 2.5
    torch.manual_seed(0)
    monitor = lo.PerformanceMonitor(every_n_steps=STEPS)
    candidates = {"bare": [], "bare again": [], "with it": [monitor]}
    times = time_steps(ten_milliseconds(device), candidates, rounds=rounds, steps=STEPS)
    bare = times["bare"].seconds
    hooks = statistics.median(times["with it"].hooks) - 1
    idle, busy = thread_share(seconds, 0, device), thread_share(seconds, 8, device)
    rows = [
        {"cost": "time within hooks, reports included", "of a step": f"{hooks:.3%}"},
        {"cost": "CPU time of the sampling thread", "of a step": f"{idle:.3%}"},
        {"cost": "CPU time of the sampling thread, 8 child processes", "of a step": f"{busy:.3%}"},
        {"cost": "hooks and thread, 8 child processes", "of a step": f"{hooks + busy:.3%}"},
        {
            "cost": "whole steps, compared with bare steps",
            "of a step": f"{median_ratio(times['with it'].seconds, bare) - 1:+.3%}",
        },
        {
            "cost": "noise: bare steps, compared with bare steps",
            "of a step": f"{median_ratio(times['bare again'].seconds, bare) - 1:+.3%}",
        },
    ]
    milliseconds = 1e3 * statistics.median(bare)
    notes = [
        f"A bare step takes {milliseconds:.3g} ms (median of {rounds} rounds of {STEPS} steps). "
        "Each round contains one report, and the thread samples once per second. Whole steps: "
        "ratio to bare steps minus 1, median over rounds."
    ]
    report = lo.Report("Cost of PerformanceMonitor", rows, notes)
    publish(
        "monitor_cost",
        report,
        arguments,
        hooks=hooks,
        thread=idle,
        thread_with_children=busy,
        milliseconds=milliseconds,
    )


if __name__ == "__main__":
    main()
