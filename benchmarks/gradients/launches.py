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
from tests.fake_cuda.test_launches import BEFORE_CLIPPING, BOUNDS, NEVER
from tests.helpers.fake_cuda import (
    Stage,
    Transformer,
    count_launches,
    fake_cuda,
    fake_gradients,
    on_fake_cuda,
)


def launches_of(clipper: Callable[[torch.nn.Module], Callable[[], object]]) -> int:
    """Return the operators of the fourth step of clipping."""
    with fake_cuda():
        model = on_fake_cuda(Transformer())
        clip = clipper(model)
        counts = []
        for _ in range(4):
            fake_gradients(model)
            counts.append(count_launches(clip))
    return counts[-1]


def launches_with(*before: Any) -> int:
    """Return the operators of a step with callbacks before clipping."""
    with fake_cuda():
        stage = Stage([*before, lo.AdaptiveClipping(every_n_steps=NEVER)], fused=True)
        return [stage.step(update=False) for _ in range(4)][-1].total


def main() -> None:
    """Count and publish the table."""
    arguments = parse_arguments(__doc__)
    torch_clip = torch.nn.utils.clip_grad_norm_
    count = launches_of(lambda model: lambda: torch_clip([*model.parameters()], 1.0, foreach=True))
    rows: list[dict[str, object]] = [{"what": "torch clip_grad_norm_", "operators": count}]
    for rule, bound in BOUNDS.items():
        count = launches_of(lambda model, rule=rule: lo.GradientClipper(model, rule).clip)
        rows.append({"what": rule, "operators": count, "bound": bound})
    alone = launches_with()
    for name, (make, bound) in BEFORE_CLIPPING.items():
        count = launches_with(make()) - alone
        rows.append({"what": f"{name}, added to clipping", "operators": count, "bound": bound})
    notes = [
        "`operators`: operators that a step without a report dispatches for 98 parameters, except "
        "views. `bound`: the limit that tests/fake_cuda/test_launches.py enforces."
    ]
    publish("launches", lo.Report("Operators per step on a GPU", rows, notes), arguments)


if __name__ == "__main__":
    main()
