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

    Waits for the device once an iteration, to know whether the next is worth its backward passes.

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
    current /= torch.linalg.vector_norm(current, dtype=torch.float64)
    before = torch.zeros_like(current)
    length = current.new_zeros((), dtype=torch.float64)
    diagonal: list[float] = []
    beside: list[float] = [0.0]
    best = Eigenvalue(math.nan, math.inf, 0)
    for iteration in range(1, max_iterations + 1):
        following = multiply(current).addcmul_(before, length, value=-1)
        along = (following * current).sum(dtype=torch.float64)
        following.addcmul_(current, along, value=-1)
        length = torch.linalg.vector_norm(following, dtype=torch.float64)
        # The one wait of an iteration: whether to go on saves whole double-backward passes.
        center, beyond = torch.stack([along, length]).tolist()
        diagonal.append(center)
        if not math.isfinite(center) or not math.isfinite(beyond):
            return Eigenvalue(math.nan, math.inf, iteration)
        value, last = _top_of_tridiagonal(diagonal, beside[1:])
        best = Eigenvalue(value, abs(beyond * last), iteration)
        scale = max(map(abs, (*diagonal, *beside)))
        # The start may lie in a space that the matrix does not leave: values are exact there.
        exact = beyond <= TINY * scale or iteration == len(current)
        if exact or best.residual <= tolerance * abs(value):
            return best
        before, current = current, following / length
        beside.append(beyond)
    return best


def _top_of_tridiagonal(diagonal: list[float], beside: list[float]) -> tuple[float, float]:
    """Return the largest eigenvalue, and the last entry of its vector."""
    middle, edge = (torch.tensor(part, dtype=torch.float64) for part in (diagonal, beside))
    values, vectors = torch.linalg.eigh(torch.diag(middle) + torch.diag(edge, -1))  # lower half
    return float(values[-1]), float(vectors[-1, -1])
