"""The largest eigenvalue of a symmetric matrix of which only products with vectors are known."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_opt.core.arguments import at_least

TINY = 1e-7
"""Share of the largest entry below which a new direction is rounding, and the space is explored."""


class Eigenvalue(NamedTuple):
    """The largest eigenvalue that was found.

    Attributes:
        value: The eigenvalue; where products are not finite, NaN.
        residual: A true eigenvalue lies within this distance.
        iterations: Products that were taken.
    """

    value: float
    residual: float
    iterations: int


def largest_eigenvalue(
    product: Callable[[Sequence[Tensor]], list[Tensor]],
    like: Sequence[Tensor],
    max_iterations: int = 30,
    tolerance: float = 1e-3,
    generator: torch.Generator | None = None,
) -> Eigenvalue:
    """Run Lanczos's iteration from a random start, in the space of tensors shaped as ``like``.

    Args:
        product: Multiplies the matrix with a vector, which is a list of tensors.
        like: Tensors of the vector's shapes, types and devices.
        max_iterations: Products at most.
        tolerance: Stop when the residual is within this share of the eigenvalue.
        generator: Of the random start, on the device of ``like``.

    Raises:
        ValueError: For ``max_iterations`` below 1 or ``tolerance`` below 0.
    """
    at_least("max_iterations", max_iterations, 1)
    if not tolerance >= 0:
        raise ValueError(f"tolerance must be a number of at least 0, got {tolerance!r}.")
    sizes = [part.numel() for part in like]

    def multiply(vector: Tensor) -> Tensor:
        parts = [own.view_as(part) for own, part in zip(vector.split(sizes), like, strict=True)]
        return torch.cat([part.flatten() for part in product(parts)])

    current = torch.cat(
        [
            torch.randn(part.numel(), generator=generator, device=part.device, dtype=part.dtype)
            for part in like
        ]
    )
    current /= _norm(current)
    before = torch.zeros_like(current)
    diagonal: list[float] = []
    beside: list[float] = [0.0]
    best = Eigenvalue(math.nan, math.inf, 0)
    for iteration in range(1, max_iterations + 1):
        following = multiply(current).sub_(before, alpha=beside[-1])
        diagonal.append(float((following * current).sum(dtype=torch.float64)))
        following.sub_(current, alpha=diagonal[-1])
        length = _norm(following)
        if not math.isfinite(diagonal[-1]) or not math.isfinite(length):
            return Eigenvalue(math.nan, math.inf, iteration)
        value, last = _top_of_tridiagonal(diagonal, beside[1:])
        best = Eigenvalue(value, abs(length * last), iteration)
        scale = max(map(abs, (*diagonal, *beside)))
        # The start may lie in a space that the matrix does not leave: values are exact there.
        exact = length <= TINY * scale or iteration == len(current)
        if exact or best.residual <= tolerance * abs(value):
            return best
        before, current = current, following / length
        beside.append(length)
    return best


def _top_of_tridiagonal(diagonal: list[float], beside: list[float]) -> tuple[float, float]:
    """Return the largest eigenvalue, and the last entry of its vector."""
    middle, edge = (torch.tensor(part, dtype=torch.float64) for part in (diagonal, beside))
    values, vectors = torch.linalg.eigh(torch.diag(middle) + torch.diag(edge, -1))  # lower half
    return float(values[-1]), float(vectors[-1, -1])


def _norm(vector: Tensor) -> float:
    return float(torch.linalg.vector_norm(vector, dtype=torch.float64))
