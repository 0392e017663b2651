"""Cost of PerformanceMonitor: less than 0.5% of a training step of 10 ms.

Supports: "costs next to nothing". A step includes forward, backward and update, and calls the hooks
as the Trainer does. Steps with and without the callback take turns, 50 at a time, so that each turn
has one report.

The noise of whole steps on a busy machine exceeds the cost of the callback. So the time within its
hooks is measured too: medians of the steps with a report and of the others, relative to the median
of the rest of the same steps. The cost of the sampling thread is its CPU time divided by the
elapsed time, without and with child processes such as the workers of a loader.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import lightning as L
import torch
from torch import nn

import lightning_opt as lo
from benchmarks.harness import parse_arguments, publish
from benchmarks.models import Regression, fit_two_steps
from lightning_opt.core.measure.timing import time_in_turns
from lightning_opt.core.numerics.ratios import median_ratio
from lightning_opt.profiling.monitor.sampling import Sampler, find_gpu

GPU = True

STEPS = 50
"""Steps per turn, and between reports."""


def ten_milliseconds(device: str) -> Regression:
    """Twenty linear layers: about 10 ms on one thread of a CPU, less on a GPU."""
    layers = [layer for _ in range(20) for layer in (nn.Linear(256, 256), nn.ReLU())]
    return Regression(nn.Sequential(*layers), torch.randn(64, 256)).to(device)


def stepper(
    module: Regression,
    trainer: L.Trainer,
    callback: L.Callback | None,
    spent: list[tuple[float, float]],
) -> Callable[[], None]:
    """Return a function that makes one training step.

    Args:
        module: The model.
        trainer: Its Trainer.
        callback: The monitor, or None.
        spent: Gets, at each step, the time within hooks and the rest.
    """
    (optimizer,) = trainer.optimizers
    in_hooks = 0.0

    def call(hook: str, *arguments: object) -> None:
        nonlocal in_hooks
        if callback is not None:
            start = time.perf_counter()
            getattr(callback, hook)(trainer, module, *arguments)
            in_hooks += time.perf_counter() - start

    loss = torch.zeros(())

    def closure() -> torch.Tensor:
        nonlocal loss
        loss = module.training_step(module.batch, 0)
        optimizer.zero_grad()
        call("on_before_backward", loss)
        loss.backward()
        return loss

    def step() -> None:
        nonlocal in_hooks
        in_hooks = 0.0
        start = time.perf_counter()
        call("on_train_batch_start", module.batch, 0)
        optimizer.step(closure)
        call("on_train_batch_end", {"loss": loss.detach()}, module.batch, 0)
        spent.append((in_hooks, time.perf_counter() - start - in_hooks))

    return step


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
    rounds, seconds = (3, 2.5) if arguments.quick else (20, 10.5)
    monitor = lo.PerformanceMonitor(every_n_steps=STEPS)
    steps, spent = {}, {}
    for label, callback in (("bare", None), ("bare again", None), ("with it", monitor)):
        torch.manual_seed(0)
        module = ten_milliseconds(device)
        trainer = fit_two_steps(module, device)
        if callback is not None:
            callback.setup(trainer, module, "fit")
            callback.on_train_start(trainer, module)
        spent[label] = []
        steps[label] = stepper(module, trainer, callback, spent[label])
        for _ in range(3 * STEPS):  # the thread starts, and libraries are loaded
            steps[label]()
        spent[label].clear()
    taken = time_in_turns(steps, rounds=rounds, calls=STEPS, device=device)
    monitor.teardown(trainer, module, "fit")
    idle, busy = thread_share(seconds, 0, device), thread_share(seconds, 8, device)
    # The monitor counts from the first step, so every fiftieth step has a report.
    rest = statistics.median(seconds for _, seconds in spent["with it"])
    report_step = statistics.median(hooks for hooks, _ in spent["with it"][STEPS - 1 :: STEPS])
    plain_step = statistics.median(hooks for hooks, _ in spent["with it"])
    hooks = (plain_step + (report_step - plain_step) / STEPS) / rest
    rows = [
        {"cost": "time within hooks, reports included", "of a step": f"{hooks:.3%}"},
        {"cost": "CPU time of the thread", "of a step": f"{idle:.3%}"},
        {"cost": "the same with 8 child processes", "of a step": f"{busy:.3%}"},
        {"cost": "hooks and thread with 8 children", "of a step": f"{hooks + busy:.3%}"},
        {
            "cost": "whole steps, beside bare ones",
            "of a step": f"{median_ratio(taken['with it'], taken['bare']) - 1:+.3%}",
        },
        {
            "cost": "bare steps beside bare ones: the noise",
            "of a step": f"{median_ratio(taken['bare again'], taken['bare']) - 1:+.3%}",
        },
    ]
    notes = [
        f"A step takes {1e3 * rest:.3g} ms (median of {rounds} turns of {STEPS}). Hooks: "
        f"{1e6 * plain_step:.3g} us a step and {1e6 * report_step:.3g} us with a report, medians, "
        f"of which one in {STEPS} steps has one. The thread samples once a second. Whole steps: "
        "median of the ratios within a round."
    ]
    report = lo.Report("Cost of PerformanceMonitor in a step of about 10 ms", rows, notes)
    publish(
        "monitor_cost",
        report,
        arguments,
        hooks=hooks,
        thread=idle,
        thread_with_children=busy,
        milliseconds=1e3 * rest,
    )


if __name__ == "__main__":
    main()
