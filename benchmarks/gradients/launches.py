"""Operators that a step of clipping, guard and health dispatches on a GPU.

Supports: the number of launches in a step of 98 parameters, at about 5 microseconds each. Counted
on fake CUDA tensors, which needs no GPU, without views; the counts are exact, and
`tests/fake_cuda/test_launches.py` enforces their bounds. An operator over a list of tensors counts
once, but if each tensor has its own factor (`fixed_value`, `per_parameter`, `unit_wise`), CUDA
launches one kernel per tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import lightning_opt as lo
from benchmarks.harness import parse_arguments, publish
from tests.fake_cuda.test_launches import BESIDE, BOUNDS, NEVER
from tests.helpers.fake_cuda import (
    Launches,
    Stage,
    Transformer,
    count_launches,
    fake_cuda,
    fake_gradients,
    on_fake_cuda,
)

BEFORE = {
    "fixed_norm": 29,
    "robust": 120,
    "zclip": 76,
    "mean_std": 66,
    "percentile": 64,
    "fixed_value": 417,
    "per_parameter": 141,
    "unit_wise": 323,
    "guard": 22,
    "guard with spikes": 230,
    "health": 0,
}
"""The counts before the device path had its own formulas."""


def launches_of(rule: str) -> int:
    """Return the operators of a step of one rule."""
    with fake_cuda():
        model = on_fake_cuda(Transformer())
        clipper = lo.GradientClipper(model, rule)
        for _ in range(4):
            fake_gradients(model)
            launches = count_launches(clipper.clip)
    return launches


def launches_beside(make: Callable[[], Any] | None) -> int:
    """Return the operators of a step with a callback before clipping."""
    with fake_cuda():
        callbacks = [lo.AdaptiveClipping(every_n_steps=NEVER)]
        stage = Stage(callbacks if make is None else [make(), *callbacks], fused=True)
        steps: list[Launches] = [stage.step(update=False) for _ in range(4)]
    return steps[-1].total


def torch_launches() -> int:
    """Return the operators of torch's own clipping."""
    with fake_cuda():
        model = on_fake_cuda(Transformer())
        fake_gradients(model)
        parameters, clip = list(model.parameters()), torch.nn.utils.clip_grad_norm_
        return count_launches(lambda: clip(parameters, 1.0, foreach=True))


def main() -> None:
    """Count and publish the table."""
    arguments = parse_arguments(__doc__)
    rows: list[dict[str, object]] = [
        {"what": "torch clip_grad_norm_", "operators": torch_launches()}
    ]
    for rule, bound in BOUNDS.items():
        count = launches_of(rule)
        rows.append({"what": rule, "operators": count, "bound": bound, "before": BEFORE[rule]})
    alone = launches_beside(None)
    for name, (make, bound) in BESIDE.items():
        count = launches_beside(make) - alone
        row = {"what": f"{name}, beside clipping", "operators": count, "bound": bound}
        rows.append({**row, "before": BEFORE[name]})
    notes = ["operators: all that one step dispatches, but for views; 98 parameters, no report."]
    publish("launches", lo.Report("Operators of a step on a GPU", rows, notes), arguments)


if __name__ == "__main__":
    main()
