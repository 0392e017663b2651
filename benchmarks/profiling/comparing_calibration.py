"""How often ``lo.compare`` is right, on two equal configurations and on one that is 5% slower.

Each run compares three configurations in new processes: a model whose step takes 20 ms of matrix
products, the same again, and the same with a callback that adds 5% of the products (1 ms). The
second must be "no difference", the third "slower", each in at least 95 of 100 runs. The runs are
short, so that 100 take about ten minutes: two starts with six turns of four steps. With
``--defaults`` they use the defaults of ``lo.compare``, and take three times as long.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import lightning_opt as lo
from benchmarks.harness import publish
from benchmarks.records import RESULTS
from lightning_opt.worker.training_process import TrainingProcess

STEP = 0.020
SLOWDOWN = 0.05
ROWS, WIDTH = 32, 256
QUIET = {"accelerator": "cpu", "devices": 1}
SHORT = {"steps": 24, "rounds": 6, "starts": 2, "warmup": 2}


class Products(nn.Module):
    """A layer that is applied, forwards and backwards, a given number of times."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, times: int) -> Tensor:
        total = x.new_zeros(())
        for _ in range(times):
            part = self.layer(x).square().mean()
            part.backward()
            total = total + part.detach()
        return total


class Net(L.LightningModule):
    def __init__(self, times: int) -> None:
        super().__init__()
        self.products, self.times = Products(), times
        self.automatic_optimization = False

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        loss = self.products(batch, self.times)
        optimizer.step()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-4)


class More(L.Callback):
    """The same products, so many times more."""

    def __init__(self, times: int) -> None:
        self.products, self.times = Products(), times

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Tensor, _: int) -> None:
        self.products(batch, self.times)


def data() -> DataLoader[Tensor]:
    return DataLoader(torch.randn(40 * ROWS, WIDTH), batch_size=ROWS)


def median_step(times: int, steps: int = 30) -> float:
    """Return the seconds of a step, in a process of its own."""
    with TrainingProcess(lambda: Net(times), data, QUIET) as fit:
        fit.advance(5)
        return statistics.median(step.seconds for step in fit.advance(steps))


def sizes() -> tuple[int, int]:
    """Return how many products make a step of 20 ms, and how many are 5% of it."""
    few, many = median_step(10), median_step(40)
    each = max((many - few) / 30, 1e-6)
    times = max(20, round((STEP - few) / each) + 10)
    return times, max(1, round(SLOWDOWN * median_step(times) / each))


def row(name: str, wanted: str, ratios: list[Any], truth: float, each: float) -> dict[str, Any]:
    logs = [math.log(ratio.value) for ratio in ratios]
    right = sum(ratio.verdict == wanted for ratio in ratios)
    return {
        "configuration": name,
        "correct verdict": wanted,
        "right": right,
        "runs": len(ratios),
        "median ratio": math.exp(statistics.median(logs)),
        "true ratio": truth,
        "spread of ratios": statistics.pstdev(logs),
        "half interval": statistics.median(math.log(r.high / r.value) for r in ratios),
        "interval contains true ratio": sum(r.low <= truth <= r.high for r in ratios),
        "seconds a run": each,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=100, help="comparisons (default: %(default)s)")
    parser.add_argument("--minutes", type=float, default=None, help="stop after so many")
    parser.add_argument("--defaults", action="store_true", help="with the defaults of lo.compare")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the results")
    parser.add_argument("--quick", action="store_true", help="three runs: does it run at all?")
    arguments = parser.parse_args()
    arguments.device = "cpu"
    torch.set_num_threads(1)  # two busy threads on a shared machine measure the neighbours
    settings = {} if arguments.defaults else SHORT
    times, more = sizes()
    plain, slower = QUIET, {**QUIET, "callbacks": [More(more)]}
    named = {"plain": plain, "the same": plain, "5% more": slower}
    found: dict[str, list[Any]] = {"the same": [], "5% more": []}
    centres: list[float] = []
    begin = time.monotonic()
    for run in range(3 if arguments.quick else arguments.runs):
        result = lo.compare(lambda: Net(times), data, named, **settings)
        for name, ratios in found.items():
            ratios.append(result.ratios[name])
        centres.append(result.report.rows[0]["ms/step"])
        same, other = (ratios[-1] for ratios in found.values())
        print(
            f"{run + 1:4d}  {centres[-1]:6.2f} ms  same {same.value:.4f} "
            f"({same.low:.4f} to {same.high:.4f}) {same.verdict:13s}  5% more {other.value:.4f} "
            f"({other.low:.4f} to {other.high:.4f}) {other.verdict}",
            file=sys.stderr,
            flush=True,
        )
        if arguments.minutes and time.monotonic() - begin > 60 * arguments.minutes:
            break
    each = (time.monotonic() - begin) / len(centres)
    planted = 1 + more * (STEP / times) / STEP
    report = lo.Report(
        "How often lo.compare gives the correct verdict",
        [
            row("the same configuration", "no difference", found["the same"], 1.0, each),
            row("with 5% more to compute", "slower", found["5% more"], planted, each),
        ],
        [
            "Each run compares the configuration with the plain one, in new processes. `right`: "
            "runs with the correct verdict; the goal is 95 of 100. `true ratio`: ratio of the "
            "numbers of matrix products. `spread of ratios`: standard deviation of the logarithms. "
            "`half interval`: median half-width of the interval of the logarithm. The median step "
            f"takes {statistics.median(centres):.1f} ms for {times} products; 5% more are {more}. "
            + ("Defaults of lo.compare." if arguments.defaults else f"lo.compare(..., {SHORT})."),
        ],
    )
    runs = {
        name: [[ratio.value, ratio.low, ratio.high, ratio.verdict] for ratio in ratios]
        for name, ratios in found.items()
    }
    publish("compare_calibration", report, arguments, runs=runs)


if __name__ == "__main__":
    main()
