"""Bounds on the operators that a step launches on a device, with 98 parameters."""

from typing import Any

import pytest

from lightning_opt import AdaptiveClipping, GradientClipper, GradientHealth, NonFiniteGuard
from tests.helpers.fake_cuda import (
    Launches,
    Stage,
    Transformer,
    fake_gradients,
    on_fake_cuda,
)

BOUNDS = {
    "fixed_norm": 16,
    "robust": 26,
    "zclip": 26,
    "mean_std": 26,
    "percentile": 30,
    "fixed_value": 40,
    "per_parameter": 50,
    "unit_wise": 60,
}
BEFORE_CLIPPING = {
    "guard": (lambda: NonFiniteGuard(every_n_steps=10**9), 10),
    "guard with spikes": (lambda: NonFiniteGuard(spike=6.0, every_n_steps=10**9), 20),
    "health": (lambda: GradientHealth(every_n_steps=10**9), 14),
}
NEVER = 10**9


@pytest.mark.parametrize("rule", BOUNDS)
def test_launches_of_a_rule_are_within_its_bound(rule: str) -> None:
    model = on_fake_cuda(Transformer())
    clipper = GradientClipper(model, rule)
    for _ in range(4):
        fake_gradients(model)
        with Launches() as launches:
            clipper.clip()
    assert launches.total <= BOUNDS[rule], launches.names


@pytest.mark.parametrize("name", BEFORE_CLIPPING)
def test_additional_launches_of_a_callback_are_within_its_bound(name: str) -> None:
    make, bound = BEFORE_CLIPPING[name]

    def launches_of(*before: Any) -> Launches:
        stage = Stage([*before, AdaptiveClipping(every_n_steps=NEVER)], fused=True)
        return [stage.step(update=False) for _ in range(4)][-1]

    alone, both = launches_of(), launches_of(make())
    assert both.total - alone.total <= bound, both.names - alone.names
