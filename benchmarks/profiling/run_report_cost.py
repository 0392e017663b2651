"""Cost of RunReport in a training step of about five milliseconds, and of one page.

Supports: at most 1% of a step. A page is written at the end of a fit. During a long fit, pages take
at most 0.5% of the time: the next one waits for 200 times as long as the last one took.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from time import perf_counter

import lightning as L
import torch
from torch import nn

import lightning_opt as lo
from benchmarks.harness import parse_arguments, publish
from benchmarks.models import Regression
from benchmarks.trainer_steps import EXPLANATION, fit, time_steps
from lightning_opt.profiling.run_report.page import build_page

STEPS = 200
"""Timed steps per fit."""


def five_millisecond_model(device: str) -> Regression:
    layers = [layer for _ in range(10) for layer in (nn.Linear(256, 256), nn.ReLU())]
    return Regression(nn.Sequential(*layers), torch.randn(64, 256)).to(device)


class Pages(L.Callback):
    """Times the page of a run with all pictures.

    Attributes:
        seconds: Of each page.
    """

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        for _ in range(3):
            with tempfile.TemporaryDirectory() as folder:
                start = perf_counter()
                build_page(trainer, "", Path(folder))
                self.seconds.append(perf_counter() - start)


def main() -> None:
    """Measure and publish the table."""
    arguments = parse_arguments(__doc__)
    torch.manual_seed(0)
    rounds, steps = (1, 50) if arguments.quick else (15, STEPS)
    module = five_millisecond_model(arguments.device)
    with tempfile.TemporaryDirectory() as folder:
        # The pages of the fits lie there.
        options = {"default_root_dir": folder}
        candidates = {
            "bare step": [],
            "bare step again": [],
            "RunReport": [lo.RunReport()],
        }
        times = time_steps(
            module, candidates, rounds=rounds, steps=steps,
            options=dict.fromkeys(candidates, options),
        )  # fmt: skip
        pages = Pages()
        watching = [
            lo.GradientHealth(every_n_steps=2),
            lo.AdaptiveClipping(every_n_steps=2),
            lo.MemoryProfiler(every_n_steps=2),
            lo.RunReport(),
        ]
        profiler = lo.StepProfiler(log_every_n_steps=2, flops=False, print_table=False)
        fit(module, [*watching, pages], steps, profiler=profiler, **options)
        written = (Path(folder) / "report.html").stat().st_size
    rows = [{"what": name, **timed.row(times["bare step"])} for name, timed in times.items()]
    page = (
        "A page with four plots and 100 points per line takes "
        f"{min(pages.seconds):.2f} s to write and has {written / 1e6:.2f} MB."
    )
    notes = [*EXPLANATION, f"{rounds} rounds of {steps} steps.", page]
    publish("run_report_cost", lo.Report("Cost of RunReport", rows, notes), arguments)


if __name__ == "__main__":
    main()
