"""Second derivatives compared with autograd's Hessian in float64."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import cross_entropy, mse_loss, scaled_dot_product_attention

import lightning_opt as lo


class Attention(nn.Module):
    """Causal self-attention by SDPA, whose fast kernels have no second derivative."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(4, 12)
        self.out = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.project(x).view(*x.shape[:2], 3, 2, 2).permute(2, 0, 3, 1, 4)
        y = scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2)).mean(1)


NETWORKS = {
    "mlp": (lambda: nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2)), (5, 4)),
    "convnet": (
        lambda: nn.Sequential(
            nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.GELU(), nn.Flatten(), nn.Linear(18, 2)
        ),
        (5, 1, 5, 5),
    ),
    "attention": (Attention, (5, 4, 4)),
}


def flat(parts) -> Tensor:
    return torch.cat([part.flatten() for part in parts])


def hessian_of(net: nn.Module, x: Tensor, y: Tensor, loss: Any = mse_loss) -> Tensor:
    """Return the full Hessian of ``loss``, by torch's reference implementation."""
    names, params = zip(*net.named_parameters(), strict=True)

    def of_flat(values: Tensor) -> Tensor:
        parts = values.split([p.numel() for p in params])
        shaped = [part.view_as(p) for part, p in zip(parts, params, strict=True)]
        named = dict(zip(names, shaped, strict=True))
        return loss(functional_call(net, named, (x,)), y)

    with sdpa_kernel(SDPBackend.MATH):
        return torch.autograd.functional.hessian(of_flat, flat(params).detach())


class Case:
    """A small network in float64, with a batch."""

    def __init__(self, name: str) -> None:
        make, shape = NETWORKS[name]
        self.net = make().double()
        self.params = list(self.net.parameters())
        self.x = torch.randn(shape, dtype=torch.float64)
        self.y = torch.arange(len(self.x)) % 2

    def graph(self) -> Tensor:
        with sdpa_kernel(SDPBackend.MATH):
            return cross_entropy(self.net(self.x), self.y)

    def hessian(self) -> Tensor:
        return hessian_of(self.net, self.x, self.y, cross_entropy)


each_network = pytest.mark.parametrize("name", NETWORKS)


@each_network
def test_products_match_the_hessian(name):
    case = Case(name)
    vectors = [torch.randn_like(p) for p in case.params]
    loss = case.graph()
    product = lo.hessian_vector_product(loss, case.params, vectors)
    torch.testing.assert_close(flat(product), case.hessian() @ flat(vectors), rtol=1e-9, atol=1e-12)
    assert not any(part.requires_grad for part in product)
    assert all(p.grad is None for p in case.params)


@pytest.mark.slow
def test_estimates_are_unbiased_with_correct_standard_errors():
    """The mean of 100 estimates lies within 3 standard errors, and so do most single ones."""
    case = Case("mlp")
    true = case.hessian()
    loss = case.graph()
    diagonals, traces, far = [], [], 0
    for seed in range(100):
        generator = torch.Generator().manual_seed(seed)
        diagonals.append(flat(lo.hessian_diagonal(loss, case.params, 4, generator=generator).value))
        trace = lo.hessian_trace(loss, case.params, 8, generator=generator)
        traces.append(trace.value)
        far += abs(trace.value - true.trace()) > 3 * trace.standard_error
    # Eight samples: Student's t with 7 degrees of freedom is beyond 3 in 2% of cases.
    assert far <= 8
    spread = torch.stack(traces)
    assert abs(spread.mean() - true.trace()) < 3 * spread.std() / math.sqrt(100)
    errors = torch.stack(diagonals)
    z = (errors.mean(0) - true.diagonal()) / (errors.std(0) / math.sqrt(100)).clamp_min(1e-15)
    assert z.abs().max() < 4.0  # of up to 60 elements
    assert z.square().mean() < 2.0


def test_standard_error_matches_single_samples():
    case = Case("mlp")
    loss = case.graph()
    generator = torch.Generator().manual_seed(5)
    estimate = lo.hessian_diagonal(loss, case.params, 6, generator=generator)
    generator = torch.Generator().manual_seed(5)
    singles = [lo.hessian_diagonal(loss, case.params, 1, generator=generator) for _ in range(6)]
    samples = torch.stack([flat(single.value) for single in singles])
    torch.testing.assert_close(flat(estimate.value), samples.mean(0))
    torch.testing.assert_close(flat(estimate.standard_error), samples.std(0) / math.sqrt(6))
    assert torch.isnan(flat(singles[0].standard_error)).all()


@each_network
def test_top_eigenvalue_matches_the_hessian(name):
    case = Case(name)
    top = torch.linalg.eigvalsh(case.hessian())[-1].item()
    found = lo.top_eigenvalue(case.graph(), case.params, max_iterations=60, tolerance=1e-6)
    assert found.value == pytest.approx(top, rel=1e-6)
    assert found.residual <= 1e-6 * top
    assert found.iterations < 60
    early = lo.top_eigenvalue(case.graph(), case.params, max_iterations=3, tolerance=0.0)
    assert early.iterations == 3
    assert early.value <= top * (1 + 1e-9)


def test_top_eigenvalue_is_the_largest_with_its_sign():
    scale = torch.tensor([-9.0, 1.0, 4.0], dtype=torch.float64)
    x = torch.ones(3, dtype=torch.float64, requires_grad=True)
    assert lo.top_eigenvalue(0.5 * (scale * x * x).sum(), [x]).value == pytest.approx(4.0)


def test_zero_and_nonfinite_hessians():
    x = torch.ones(3, requires_grad=True)
    assert lo.top_eigenvalue(x.sum(), [x]).value == 0.0
    assert lo.hessian_vector_product(x.sum(), [x], [torch.ones(3)])[0].eq(0).all()
    broken = lo.top_eigenvalue((x * math.inf).square().sum(), [x])
    assert math.isnan(broken.value)
    assert broken.residual == math.inf


def test_unused_parameters_have_zero_curvature():
    x, y = (torch.ones(2, requires_grad=True) for _ in range(2))
    loss = (x**3).sum()
    product = lo.hessian_vector_product(loss, [x, y], [torch.ones(2), torch.ones(2)])
    assert product[0].tolist() == [6.0, 6.0]
    assert product[1].tolist() == [0.0, 0.0]


def test_invalid_arguments_raise():
    case = Case("mlp")
    with pytest.raises(ValueError, match="n_samples must be a whole number of at least 1"):
        lo.hessian_trace(case.graph(), case.params, 0)
    with pytest.raises(ValueError, match="tolerance must be a number of at least 0"):
        lo.top_eigenvalue(case.graph(), case.params, tolerance=-1.0)
