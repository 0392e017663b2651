"""Cost of the memory callbacks in a training step of about ten milliseconds.

Supports: MemoryCleanup and GarbageCollection together at most 1.005 of the step, MemoryProfiler at
most 1.03 without counting by module, with its period at 50 steps. Hooks are called as the Trainer
calls them. The times of whole steps vary by more than the callbacks cost, so the main figure is the
CPU time in hooks relative to the rest of the same steps. The CPU time of whole blocks relative to
blocks without callbacks is shown too, because the profiler also slows down operators.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Sequence

import lightning as L
import torch
from torch import nn

import lightning_opt as lo
from benchmarks.harness import parse_arguments, publish
from benchmarks.models import Regression, fit_two_steps
from lightning_opt.core.measure.timing import time_in_turns
from lightning_opt.core.numerics.ratios import median_ratio

BLOCK = 200
"""Steps per block: a multiple of every period."""


def ten_millisecond_model() -> Regression:
    """Return an MLP of width 512 whose step takes about ten milliseconds on one thread."""
    layers = [layer for _ in range(6) for layer in (nn.Linear(512, 512), nn.GELU())]
    return Regression(nn.Sequential(*layers), torch.randn(48, 512))


class Loop:
    """Trains in a manual loop with some callbacks, and measures the time in their hooks.

    Args:
        module: The model.
        trainer: A Trainer that has fitted it.
        callbacks: Called around each step.
    """

    def __init__(
        self, module: Regression, trainer: L.Trainer, callbacks: Sequence[L.Callback]
    ) -> None:
        self.module, self.trainer, self.callbacks = module, trainer, callbacks
        self.optimizer = module.configure_optimizers()
        self.start = {name: value.clone() for name, value in module.state_dict().items()}
        self.clock = time.perf_counter if module.batch.is_cuda else time.thread_time
        self.methods: dict[str, list[Callable[..., object]]] = {}
        self.in_hooks = 0.0
        self.shares: list[float] = []
        self.spent: list[float] = []

    def call(self, hook: str, *arguments: object) -> None:
        methods = self.methods.get(hook)
        if methods is None:
            methods = self.methods[hook] = self.overridden(hook)
        if not methods:
            return
        start = self.clock()
        for method in methods:
            method(self.trainer, self.module, *arguments)
        self.in_hooks += self.clock() - start

    def overridden(self, hook: str) -> list[Callable[..., object]]:
        """Return the callbacks' methods that override the hook."""
        empty = getattr(L.Callback, hook)
        return [getattr(c, hook) for c in self.callbacks if getattr(type(c), hook) is not empty]

    def run(self, steps: int) -> None:
        """Run some steps; the callbacks' work at start and end is not counted."""
        module, optimizer, batch = self.module, self.optimizer, self.module.batch
        module.load_state_dict(self.start)
        self.trainer.strategy.optimizers = [optimizer]
        self.call("on_fit_start")
        self.call("on_train_start")
        self.in_hooks, start = 0.0, self.clock()
        for index in range(steps):
            self.call("on_train_batch_start", batch, index)
            loss = module.training_step(batch, index)
            self.call("on_before_zero_grad", optimizer)
            optimizer.zero_grad()
            self.call("on_before_backward", loss)
            loss.backward()
            self.call("on_after_backward")
            self.call("on_before_optimizer_step", optimizer)
            optimizer.step()
            self.call("on_train_batch_end", None, batch, index)
        whole = self.clock() - start
        self.spent.append(whole)
        self.shares.append(1 + self.in_hooks / (whole - self.in_hooks))
        self.call("teardown", "fit")


def main() -> None:
    """Measure and publish the table."""
    arguments = parse_arguments(__doc__)
    torch.manual_seed(0)
    module = ten_millisecond_model().to(arguments.device)
    trainer = fit_two_steps(module, arguments.device)
    rounds, steps = (2, 50) if arguments.quick else (7, BLOCK)
    quiet = {"figure": None, "file": None}
    candidates = {
        "bare step": [],
        "MemoryCleanup": [lo.MemoryCleanup()],
        "GarbageCollection": [lo.GarbageCollection()],
        "MemoryCleanup and GarbageCollection": [
            lo.MemoryCleanup(),
            lo.GarbageCollection(),
        ],
        "LeakDetector": [lo.LeakDetector()],
        "MemoryProfiler": [lo.MemoryProfiler(**quiet)],
        "MemoryProfiler, every 10 steps": [lo.MemoryProfiler(10, **quiet)],
    }
    gc.collect()
    loops = {name: Loop(module, trainer, callbacks) for name, callbacks in candidates.items()}
    seconds = time_in_turns(
        {name: (lambda loop=loop: loop.run(steps)) for name, loop in loops.items()},
        rounds=rounds,
        device=arguments.device,
        warmup=1,
    )
    bare = loops["bare step"].spent[1:]
    rows = [
        {
            "what": name,
            "ms a step": round(statistics.median(seconds[name]) / steps * 1e3, 3),
            "hooks, of the rest": round(statistics.median(loop.shares[1:]), 4),
            "whole, of bare": round(median_ratio(loop.spent[1:], bare), 3),
        }
        for name, loop in loops.items()
    ]
    notes = [
        "hooks, of the rest: one plus the time within the hooks over that of the rest of the same "
        "steps. whole, of bare: all of the steps over those of steps without callbacks in "
        "the same round, which is noisier. Both are processor time on a CPU. ms a step is by the "
        "clock on the wall.",
        f"{rounds} rounds of {steps} steps. What happens once, at start and end (freezing and "
        "collecting take about half a second), is only in ms a step.",
    ]
    publish("memory_cost", lo.Report("Cost of the memory callbacks", rows, notes), arguments)


if __name__ == "__main__":
    main()
