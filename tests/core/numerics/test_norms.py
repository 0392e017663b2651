"""Norms of one step against float64 numpy, on both paths."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from lightning_opt.core.numerics.norms import (
    collect_gradients,
    measure_norms,
    nonfinite_names,
)

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
C64, C128 = torch.complex64, torch.complex128
GENERATOR = torch.Generator().manual_seed(0)


def parameters_with(*gradients: Tensor | None) -> list[Tensor]:
    parameters: list[Tensor] = []
    for gradient in gradients:
        like = torch.zeros(2) if gradient is None else torch.zeros_like(gradient.to_dense())
        parameter = nn.Parameter(like)
        parameter.grad = gradient
        parameters.append(parameter)
    return parameters


def measured(*gradients: Tensor | None, **settings: Any) -> tuple[np.ndarray, float]:
    result = measure_norms(collect_gradients(parameters_with(*gradients)), **settings)
    return np.array(torch.as_tensor(result.per_tensor).tolist()), float(result.total)


def expected(*gradients: Tensor) -> tuple[np.ndarray, float]:
    wide = [g.to_dense().to(C128 if g.is_complex() else FP64).flatten().numpy() for g in gradients]
    return np.array([np.linalg.norm(g) for g in wide]), float(np.linalg.norm(np.concatenate(wide)))


def random(dtype: torch.dtype, *shape: int, scale: float = 1.0) -> Tensor:
    return (scale * torch.randn(shape, generator=GENERATOR)).to(dtype)


def rows(*indices: int) -> Tensor:
    """Return a sparse gradient; values of repeated indices add up."""
    return torch.sparse_coo_tensor(
        torch.tensor([indices]),
        torch.randn(len(indices), 3, generator=GENERATOR),
        (8, 3),
        check_invariants=True,
    )


LISTS: dict[str, list[Tensor]] = {
    "fp32": [random(FP32, 40, 30), random(FP32, 7)],
    "fp64": [random(FP64, 40, 30), random(FP64, 7)],
    "bf16": [random(BF16, 40, 30), random(BF16, 7)],
    "fp16": [random(FP16, 40, 30), random(FP16, 7)],
    "fp16 whose squares overflow": [random(FP16, 300, 300, scale=1e4)],
    "fp16 whose squares vanish": [random(FP16, 300, 300, scale=1e-5)],
    "mixed": [random(d, 50) for d in (FP32, BF16, FP64, FP16, BF16, FP32)],
    "halves": [random(d, 50) for d in (FP16, BF16)],
    "complex": [random(C64, 40), random(C128, 3)],
    "complex and half": [random(C64, 40), random(FP16, 30)],
    "sparse": [rows(1, 5), random(FP32, 4)],
    "sparse with duplicates": [rows(1, 5, 1, 1)],
    "odd shapes": [random(FP32), random(FP32, 1, 1), random(FP32, 0), random(FP32, 3, 4).t()],
    "far apart": [random(FP32, 9, scale=1e-12), random(FP32, 9, scale=1e12)],
}


@pytest.mark.parametrize("name", LISTS)
def test_norms_agree_with_numpy(name: str, path: str) -> None:
    per_tensor, total = measured(*[g.clone() for g in LISTS[name]])
    true_per_tensor, true_total = expected(*LISTS[name])
    np.testing.assert_allclose(per_tensor, true_per_tensor, rtol=1e-5)
    assert total == pytest.approx(true_total, rel=1e-5)


@pytest.mark.parametrize("fault", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [FP32, BF16, FP16, FP64, C64])
def test_nan_and_inf_appear_in_their_tensor_and_the_total(
    fault: float, dtype: torch.dtype, path: str
) -> None:
    faulty = torch.ones(5, dtype=dtype)
    faulty[2] = fault
    per_tensor, total = measured(torch.ones(3), faulty)
    assert not math.isfinite(total)
    assert np.isfinite(per_tensor).tolist() == [True, False]


@pytest.mark.parametrize("dtype", [FP32, BF16, C64])
def test_norm_beyond_float32_is_exact_on_the_host(dtype: torch.dtype, path: str) -> None:
    per_tensor, total = measured(torch.ones(3), torch.full((4,), 2e19, dtype=dtype))
    if path == "host":
        assert total == pytest.approx(4e19, rel=5e-3)
        np.testing.assert_allclose(per_tensor, [math.sqrt(3), 4e19], rtol=5e-3)
    else:
        assert math.isinf(total), "as documented"


def test_total_of_large_norms_does_not_overflow(path: str) -> None:
    _, total = measured(*[torch.full((1,), 1.5e19) for _ in range(400)])
    assert total == pytest.approx(3e20)


@pytest.mark.parametrize("name", LISTS)
@pytest.mark.parametrize("kind", ["float", "tensor"])
def test_scale_multiplies_gradients_in_place(name: str, kind: str) -> None:
    parameters = parameters_with(*[g.clone() for g in LISTS[name]])
    coefficient = torch.tensor(0.25, dtype=FP64) if kind == "tensor" else 0.25
    collect_gradients(parameters).scale_(coefficient)
    for parameter, before in zip(parameters, LISTS[name], strict=True):
        torch.testing.assert_close(parameter.grad.to_dense(), before.to_dense() * 0.25)


@pytest.mark.filterwarnings("ignore:Sparse CS")
def test_tensors_of_any_layout_and_dtype_are_checked_for_nan() -> None:
    dtypes = (FP16, BF16, FP32, FP64, C64, torch.float8_e4m3fn, torch.float8_e5m2)
    good, bad = torch.eye(4), torch.eye(4)
    bad[1, 2] = math.nan
    found = {}
    for dtype in dtypes:
        found[f"good {dtype}"], found[f"bad {dtype}"] = good.to(dtype), bad.to(dtype)
    for layout in (torch.sparse_coo, torch.sparse_csr, torch.sparse_csc):
        found[f"good {layout}"] = good.to_sparse(layout=layout)
        found[f"bad {layout}"] = bad.to_sparse(layout=layout)
    found |= {"good int64": torch.arange(3), "good empty": torch.empty(0)}
    assert nonfinite_names(found) == [name for name in found if name.startswith("bad")]
