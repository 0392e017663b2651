"""How many operators a step of clipping, guard and health dispatches on a GPU.

Supports: nothing but views aside, so many kernels or more are launched for a step of 98 parameters,
at some 5 microseconds each. Counted on fake CUDA tensors, which needs no GPU; the counts are exact,
and `tests/fake_cuda/test_launches.py` holds their bounds. An operator over a list of tensors counts
once: of those that each tensor's own factor makes necessary (`fixed_value`, `per_parameter`,
`unit_wise`) CUDA makes a launch a tensor, from C++.
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
"""What the same count gave before the device had polynomials of its own."""


def launches_of(rule: str) -> int:
    """Return what a step of one rule dispatches."""
    with fake_cuda():
        model = on_fake_cuda(Transformer())
        clipper = lo.GradientClipper(model, rule)
        for _ in range(4):
            fake_gradients(model)
            launches = count_launches(clipper.clip)
    return launches


def launches_beside(make: Callable[[], Any] | None) -> int:
    """Return what callbacks dispatch in a step: one of them, and clipping behind it."""
    with fake_cuda():
        callbacks = [lo.AdaptiveClipping(every_n_steps=NEVER)]
        stage = Stage(callbacks if make is None else [make(), *callbacks], fused=True)
        steps: list[Launches] = [stage.step(update=False) for _ in range(4)]
    return steps[-1].total


def torchs() -> int:
    """Return what torch's own clipping dispatches."""
    with fake_cuda():
        model = on_fake_cuda(Transformer())
        fake_gradients(model)
        parameters, clip = list(model.parameters()), torch.nn.utils.clip_grad_norm_
        return count_launches(lambda: clip(parameters, 1.0, foreach=True))


def main() -> None:
    """Count and publish the table."""
    arguments = parse_arguments(__doc__)
    rows: list[dict[str, object]] = [{"what": "torch clip_grad_norm_", "operators": torchs()}]
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
