"""Cost of GradientHealth, alone and with AdaptiveClipping, compared with other monitors.

Supports: health and clipping together at most 1.25 of the bare step on a model of 40 small tensors
and 1.03 on a transformer of ten million parameters, reports included. Each timing contains
exactly one report. Other monitors are timed at each step, and once per report interval if that is
their usual setting.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning as L
import torch
from lightning.pytorch.utilities import grad_norm

import lightning_opt as lo
from benchmarks.harness import parse_arguments, publish
from benchmarks.models import Regression, forty_tensor_mlp, ten_million_transformer
from benchmarks.trainer_steps import EXPLANATION, time_steps

GPU = True

BARE = "bare step"


def lightning_grad_norm(module: Regression) -> None:
    """Compute Lightning's own norms of all gradients, and read them as a logger would."""
    {name: float(norm) for name, norm in grad_norm(module, 2).items()}


def histograms(module: Regression) -> None:
    """Compute what ``wandb.watch`` does: a histogram of 64 bins per gradient, on the host."""
    for parameter in module.parameters():
        if parameter.grad is not None:
            flat = parameter.grad.flatten()
            low, high = flat.min().item(), flat.max().item()
            flat.histc(bins=64, min=low, max=high if high > low else low + 1).tolist()


def naive_monitor(module: Regression) -> None:
    """Compute four numbers per parameter and read each one, as a simple monitor does."""
    for parameter in module.parameters():
        gradient = parameter.grad
        if gradient is not None:
            gradient.norm().item()
            gradient.abs().max().item()
            (gradient == 0).float().mean().item()
            torch.isfinite(gradient).all().item()


class Watch(L.Callback):
    """Calls a monitor before the update, every few steps."""

    def __init__(self, observe: Callable[[Any], None], every: int = 1) -> None:
        self._observe, self._every = observe, every

    def on_before_optimizer_step(
        self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        if trainer.global_step % self._every == 0:
            self._observe(pl_module)


def measure(name: str, module: Regression, rounds: int, every: int) -> list[dict[str, object]]:
    """Time ``every`` steps of each candidate in each round."""

    def health(activations: bool = False) -> lo.GradientHealth:
        return lo.GradientHealth(every_n_steps=every, activations=activations)

    candidates: dict[str, list[L.Callback]] = {
        BARE: [],
        "GradientHealth": [health()],
        "GradientHealth and AdaptiveClipping": [
            health(),
            lo.AdaptiveClipping(every_n_steps=every),
        ],
        "GradientHealth(activations=True)": [health(activations=True)],
        "Lightning grad_norm, each step": [Watch(lightning_grad_norm)],
        f"histograms, every {every} steps": [Watch(histograms, every)],
        "histograms, each step": [Watch(histograms)],
        f"naive monitor, every {every} steps": [Watch(naive_monitor, every)],
        "naive monitor, each step": [Watch(naive_monitor)],
    }
    times = time_steps(module, candidates, rounds=rounds, steps=every)
    return [
        {"model": name, "what": label, **timed.row(times[BARE])} for label, timed in times.items()
    ]


def main() -> None:
    """Measure both models and publish the table."""
    arguments = parse_arguments(__doc__)
    torch.manual_seed(0)
    device, quick = arguments.device, arguments.quick
    rounds = (2, 1) if quick else (4, 3) if device == "cuda" else (20, 5)
    notes = [
        *EXPLANATION,
        "GradientHealth reports every 50 steps (the default) on the MLP and every 10 steps on the "
        "transformer.",
    ]
    rows = measure("40-tensor MLP", forty_tensor_mlp(device), rounds[0], 50)
    report = lo.Report("Cost of watching gradients", rows, notes)
    publish("health_cost", report, arguments, complete=False)
    # Shorter fits of the slow model: a report every 10 steps costs more than one every 50.
    rows += measure("9.5 M transformer", ten_million_transformer(device), rounds[1], 10)
    publish("health_cost", lo.Report("Cost of watching gradients", rows, notes), arguments)


if __name__ == "__main__":
    main()
