"""Clipping of complex gradients, and with bfloat16 as the default dtype."""

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from lightning_opt import (
    ClippingRule,
    FixedNorm,
    FixedValue,
    GradientClipper,
    PerParameter,
    UnitWise,
)
from tests.gradients.cases import both_taken


class Filter(nn.Module):
    """Complex weights, as in a Fourier operator, and real ones."""

    def __init__(self) -> None:
        super().__init__()
        self.filter = nn.Parameter(torch.full((2, 3), 0.5 + 0.5j, dtype=torch.complex64))
        self.gain = nn.Parameter(torch.ones(3))
        self.filter.grad = torch.full((2, 3), 3 - 4j, dtype=torch.complex64)
        self.gain.grad = torch.ones(3)


@both_taken
def test_fixed_value_clamps_real_and_imaginary_parts(path: str) -> None:
    model = Filter()
    GradientClipper(model, FixedValue(2.0)).clip()
    assert model.filter.grad is not None
    assert model.filter.grad.tolist() == [[2 - 2j] * 3] * 2


@both_taken
@pytest.mark.parametrize("rule", [FixedNorm(1.0), PerParameter(), UnitWise(0.1, exclude=None)])
def test_complex_gradients_keep_their_phase(path: str, rule: ClippingRule) -> None:
    model = Filter()
    clipper = GradientClipper(model, rule)
    assert float(clipper.clip()["norm"]) == pytest.approx((6 * 25 + 3) ** 0.5)
    gradient = model.filter.grad
    assert gradient is not None
    torch.testing.assert_close(gradient.angle(), torch.full((2, 3), 3 - 4j).angle())
    if isinstance(rule, UnitWise):  # a row of three of modulus 0.7
        assert gradient[0].abs().norm().item() == pytest.approx(0.1 * 1.5**0.5)


@pytest.fixture
def _bfloat16_by_default() -> Iterator[None]:
    """As Lightning sets it under manual optimisation and ``bf16-true``."""
    torch.set_default_dtype(torch.bfloat16)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.usefixtures("_bfloat16_by_default")
@both_taken
@pytest.mark.parametrize("rule", [FixedNorm(0.1), FixedValue(0.1)])
def test_counts_do_not_use_the_default_dtype(path: str, rule: ClippingRule) -> None:
    model = nn.Linear(3, 2)
    clipper = GradientClipper(model, rule)
    for _ in range(300):  # bfloat16 cannot count beyond 256
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        clipper.clip()
    assert clipper.state_dict()["clipped"] == 300.0
