"""Cost of NonFiniteGuard in a training step, alone, with AdaptiveClipping and with GradientHealth.

Supports: the three share one measurement of the gradients, so that all together cost little more
than one of them. There are no faults, as usual.
"""

from __future__ import annotations

import torch
from torch import nn

import lightning_opt as lo
from benchmarks.harness import parse_arguments, publish
from benchmarks.models import Regression, forty_tensor_mlp, ten_million_transformer
from benchmarks.trainer_steps import EXPLANATION, time_steps

GPU = True

NEVER = 10**9
"""Steps between reports: more than there are."""


def two_hundred_tensor_mlp(device: str) -> Regression:
    """A hundred linear layers of 32: little computation for many tensors."""
    layers = [layer for _ in range(100) for layer in (nn.Linear(32, 32), nn.ReLU())]
    return Regression(nn.Sequential(*layers), torch.randn(16, 32, device=device)).to(device)


def measure(name: str, module: Regression, rounds: int, steps: int) -> list[dict[str, object]]:
    """Time the steps of one model with each set of callbacks."""
    module.fused = module.batch.is_cuda or None
    candidates = {
        "bare step": [],
        "bare step again": [],
        "NonFiniteGuard": [lo.NonFiniteGuard(every_n_steps=NEVER)],
        "NonFiniteGuard(spike=8)": [lo.NonFiniteGuard(spike=8.0, every_n_steps=NEVER)],
        "NonFiniteGuard, AdaptiveClipping": [
            lo.NonFiniteGuard(every_n_steps=NEVER),
            lo.AdaptiveClipping(every_n_steps=NEVER),
        ],
        "GradientHealth, NonFiniteGuard, AdaptiveClipping": [
            lo.GradientHealth(every_n_steps=NEVER),
            lo.NonFiniteGuard(every_n_steps=NEVER),
            lo.AdaptiveClipping(every_n_steps=NEVER),
        ],
        "NonFiniteGuard('rollback'), AdaptiveClipping": [
            lo.NonFiniteGuard("rollback", every_n_steps=NEVER),
            lo.AdaptiveClipping(every_n_steps=NEVER),
        ],
    }
    times = time_steps(module, candidates, rounds=rounds, steps=steps)
    return [
        {"model": name, "callbacks": label, **timed.row(times["bare step"])}
        for label, timed in times.items()
    ]


def main() -> None:
    """Measure each model and publish the table."""
    arguments = parse_arguments(__doc__)
    torch.manual_seed(0)
    device, quick = arguments.device, arguments.quick
    rounds = (2, 1) if quick else (5, 4) if device == "cuda" else (20, 7)
    notes = [*EXPLANATION, "'rollback' takes a snapshot every 100 steps."]
    models = {
        "40-tensor MLP": (forty_tensor_mlp, rounds[0], 100),
        "200-tensor MLP": (two_hundred_tensor_mlp, rounds[0], 50),
        "9.5 M transformer": (ten_million_transformer, rounds[1], 10),
    }
    rows: list[dict[str, object]] = []
    for name, (make, number, steps) in models.items():
        rows += measure(name, make(device), number, steps)
        report = lo.Report("Cost of the guard", rows, notes)
        publish("guard_cost", report, arguments, complete=name == list(models)[-1])


if __name__ == "__main__":
    main()
