"""Second derivatives of a loss: products with the Hessian, its diagonal, trace and top eigenvalue.

The Hessian is never formed. All functions use its product with a vector, which costs about two
backward passes (Pearlmutter 1994).

References:
    Pearlmutter, B. A. (1994). Fast exact multiplication by the Hessian. Neural Computation 6(1).
    Hutchinson, M. F. (1990). A stochastic estimator of the trace of the influence matrix for
    Laplacian smoothing splines. Communications in Statistics 19(2).
    Bekas, C., Kokiopoulou, E. and Saad, Y. (2007). An estimator for the diagonal of a matrix.
    Applied Numerical Mathematics 57.
    Paige, C. C. (1980). Accuracy and effectiveness of the Lanczos algorithm for the symmetric
    eigenproblem. Linear Algebra and its Applications 34.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeAlias, TypeVar

import torch
from torch import Tensor

from lightning_opt.core.arguments import check_at_least

Tensors: TypeAlias = Sequence[Tensor]
Product: TypeAlias = Callable[[Tensors], list[Tensor]]
"""Multiplies the Hessian with vectors in the shapes of the parameters."""

Value = TypeVar("Value", Tensor, tuple[Tensor, ...])

TINY = 1e-7
"""Relative length below which a new Lanczos direction is rounding error."""


@dataclass(frozen=True)
class Estimate(Generic[Value]):
    """A random estimate with its standard error.

    Attributes:
        value: A scalar, or one tensor per parameter in its shape.
        standard_error: Standard error of ``value``, in its shape; NaN for a single sample.
    """

    value: Value
    standard_error: Value


class Eigenvalue(NamedTuple):
    """The largest eigenvalue that was found.

    Attributes:
        value: The eigenvalue; NaN if a product is not finite.
        residual: Bound on the distance to a true eigenvalue.
        iterations: Number of products.
    """

    value: float
    residual: float
    iterations: int


def hessian_vector_product(loss: Tensor, params: Tensors, vectors: Tensors) -> tuple[Tensor, ...]:
    """Return the product of the loss's Hessian with ``vectors``.

    Args:
        loss: A scalar with its graph, computed from ``params``. The graph is kept.
        params: Tensors. If the loss does not depend on one, its part of the product is zero.
        vectors: One vector for each of ``params``, in its shape.

    Returns:
        One tensor per parameter, without a graph.

    Raises:
        RuntimeError: By torch, if shapes differ, or the loss is not a real scalar.

    Example:
        >>> import torch
        >>> import lightning_opt as lo
        >>> x = torch.tensor([1.0, 2.0], requires_grad=True)
        >>> lo.hessian_vector_product((x**3).sum(), [x], [torch.ones(2)])
        (tensor([ 6., 12.]),)
    """
    return tuple(hessian_product(loss, params)(vectors))


def hessian_diagonal(
    loss: Tensor, params: Tensors, n_samples: int = 1, generator: torch.Generator | None = None
) -> Estimate[tuple[Tensor, ...]]:
    r"""Return the diagonal of the loss's Hessian, by Hutchinson's estimator.

    The estimate is the mean of :math:`z \odot H z` over random signs :math:`z`. It is unbiased. A
    sample's variance is the sum of squared off-diagonal entries in the row (Bekas et al. 2007).

    Args:
        loss: A scalar with its graph, computed from ``params``.
        params: Tensors that the loss depends on.
        n_samples: Number of vectors, at least 1.
        generator: Generator of the random signs, on the device of ``params``.

    Returns:
        One tensor per parameter, with standard errors.

    Raises:
        ValueError: For ``n_samples`` below 1.

    Example:
        >>> import torch
        >>> import lightning_opt as lo
        >>> x = torch.tensor([1.0, 2.0], requires_grad=True)
        >>> lo.hessian_diagonal((x**3).sum(), [x]).value
        (tensor([ 6., 12.]),)
    """
    product = hessian_product(loss, params)
    return _average(lambda: sample_diagonal(product, params, generator), n_samples)


def hessian_trace(
    loss: Tensor, params: Tensors, n_samples: int = 10, generator: torch.Generator | None = None
) -> Estimate[Tensor]:
    r"""Return the trace of the loss's Hessian, which is the sum of its eigenvalues.

    Hutchinson's estimator is the mean of :math:`z^\top H z` over random signs :math:`z`.

    Args:
        loss: A scalar with its graph, computed from ``params``.
        params: Tensors that the loss depends on.
        n_samples: Number of vectors, at least 1.
        generator: Generator of the random signs, on the device of ``params``.

    Returns:
        A 0-dimensional tensor, with its standard error.

    Raises:
        ValueError: For ``n_samples`` below 1.
    """
    return estimate_trace(hessian_product(loss, params), params, n_samples, generator)


def top_eigenvalue(
    loss: Tensor,
    params: Tensors,
    max_iterations: int = 30,
    tolerance: float = 1e-3,
    generator: torch.Generator | None = None,
) -> Eigenvalue:
    """Return the largest eigenvalue of the loss's Hessian, its sharpness, by Lanczos's iteration.

    It needs three vectors of the size of the parameters. New vectors are not orthogonalised against
    all earlier ones. Eigenvalues may therefore repeat, but the largest is correct (Paige 1980).
    Each iteration waits for the device once.

    Args:
        loss: A scalar with its graph, computed from ``params``.
        params: Tensors that the loss depends on.
        max_iterations: Maximum number of products with the Hessian.
        tolerance: Stop at this relative residual.
        generator: Generator of the start vector, on the device of ``params``.

    Raises:
        ValueError: For ``max_iterations`` below 1 or ``tolerance`` below 0.

    Example:
        >>> import torch
        >>> import lightning_opt as lo
        >>> x = torch.tensor([1.0, 2.0], requires_grad=True)
        >>> round(lo.top_eigenvalue((x**3).sum(), [x]).value, 4)
        12.0
    """
    product = hessian_product(loss, params)
    return largest_eigenvalue(product, params, max_iterations, tolerance, generator)


def hessian_product(loss: Tensor | None, params: Tensors) -> Product:
    """Return a function that multiplies the Hessian with vectors. All calls share one graph.

    If the loss is None, the Hessian is zero.

    Raises:
        RuntimeError: If the loss is not a real scalar, or a function in the graph has no second
            derivative.
    """
    gradients: Sequence[Tensor | None] = [None] * len(params)
    if loss is not None:
        gradients = torch.autograd.grad(loss, list(params), create_graph=True, allow_unused=True)
    _check_differentiable(gradients)
    # A gradient without a graph is a constant: its row of the Hessian is zero.
    nonconstant_gradients = {
        index: gradient
        for index, gradient in enumerate(gradients)
        if gradient is not None and gradient.requires_grad
    }

    def product(vectors: Tensors) -> list[Tensor]:
        if not nonconstant_gradients:
            return [torch.zeros_like(parameter) for parameter in params]
        products = torch.autograd.grad(
            list(nonconstant_gradients.values()),
            list(params),
            [vectors[index] for index in nonconstant_gradients],
            retain_graph=True,
            allow_unused=True,
        )
        return [
            torch.zeros_like(parameter) if part is None else part
            for parameter, part in zip(params, products, strict=True)
        ]

    return product


def sample_diagonal(
    product: Product, params: Tensors, generator: torch.Generator | None = None
) -> list[Tensor]:
    """Draw one estimate of the Hessian's diagonal."""
    signs = [random_signs(parameter, generator) for parameter in params]
    return [sign * part for sign, part in zip(signs, product(signs), strict=True)]


def estimate_trace(
    product: Product, params: Tensors, n_samples: int, generator: torch.Generator | None = None
) -> Estimate[Tensor]:
    """Estimate the trace from products with the Hessian."""

    def draw() -> list[Tensor]:
        parts = sample_diagonal(product, params, generator)
        return [torch.stack([part.sum() for part in parts]).sum()]

    average = _average(draw, n_samples)
    return Estimate(average.value[0], average.standard_error[0])


def largest_eigenvalue(
    product: Product,
    like: Tensors,
    max_iterations: int = 30,
    tolerance: float = 1e-3,
    generator: torch.Generator | None = None,
) -> Eigenvalue:
    """Run Lanczos's iteration with vectors shaped as ``like``, from a random start.

    Waits for the device once per iteration, to stop early.

    Raises:
        ValueError: For ``max_iterations`` below 1 or ``tolerance`` below 0.
    """
    check_at_least("max_iterations", max_iterations, 1)
    if not tolerance >= 0:
        raise ValueError(f"tolerance must be a number of at least 0, got {tolerance!r}.")
    sizes = [part.numel() for part in like]

    def multiply(vector: Tensor) -> Tensor:
        parts = [piece.view_as(part) for piece, part in zip(vector.split(sizes), like, strict=True)]
        return torch.cat([part.flatten() for part in product(parts)])

    drawn = (
        torch.randn(part.numel(), generator=generator, device=part.device, dtype=part.dtype)
        for part in like
    )
    current = torch.cat(list(drawn))
    current /= torch.linalg.vector_norm(current, dtype=torch.float64)
    previous = torch.zeros_like(current)
    beta_on_device = current.new_zeros((), dtype=torch.float64)
    diagonal: list[float] = []
    off_diagonal: list[float] = []
    best = Eigenvalue(math.nan, math.inf, 0)
    for iteration in range(1, max_iterations + 1):
        remainder = multiply(current).addcmul_(previous, beta_on_device, value=-1)
        alpha_on_device = (remainder * current).sum(dtype=torch.float64)
        remainder.addcmul_(current, alpha_on_device, value=-1)
        beta_on_device = torch.linalg.vector_norm(remainder, dtype=torch.float64)
        # The only synchronization in an iteration.
        alpha, beta = torch.stack([alpha_on_device, beta_on_device]).tolist()
        diagonal.append(alpha)
        if not math.isfinite(alpha) or not math.isfinite(beta):
            return Eigenvalue(math.nan, math.inf, iteration)
        value, last = _top_of_tridiagonal(diagonal, off_diagonal)
        best = Eigenvalue(value, abs(beta * last), iteration)
        scale = max(map(abs, (*diagonal, *off_diagonal)))
        # In an invariant subspace the next direction is zero, and the eigenvalue is exact.
        exact = beta <= TINY * scale or iteration == len(current)
        if exact or best.residual <= tolerance * abs(value):
            return best
        previous, current = current, remainder / beta_on_device
        off_diagonal.append(beta)
    return best


def _top_of_tridiagonal(diagonal: list[float], off_diagonal: list[float]) -> tuple[float, float]:
    """Return the largest eigenvalue, and the last entry of its eigenvector."""
    matrix = torch.diag(torch.tensor(diagonal, dtype=torch.float64))
    matrix += torch.diag(torch.tensor(off_diagonal, dtype=torch.float64), -1)
    values, vectors = torch.linalg.eigh(matrix)  # reads the lower half only
    return float(values[-1]), float(vectors[-1, -1])


def random_signs(like: Tensor, generator: torch.Generator | None) -> Tensor:
    """Draw -1 or 1 with equal probability, in the shape of ``like``."""
    # Draw one bit per element. One number per element would take as long as a backward pass.
    drawn = torch.randint(
        0, 256, (like.numel() // 8 + 1, 1), generator=generator, device=like.device,
        dtype=torch.uint8,
    )  # fmt: skip
    shifts = torch.arange(8, dtype=torch.uint8, device=like.device)
    bits = drawn.bitwise_right_shift(shifts).bitwise_and_(1).flatten()[: like.numel()]
    return bits.to(like.dtype).mul_(2).sub_(1).view_as(like)


def _check_differentiable(gradients: Sequence[Tensor | None]) -> None:
    """Raise if a function in the graph is marked ``once_differentiable``.

    ``torch.autograd.grad`` would silently omit it: its backward node has no successors.
    """
    waiting = [g.grad_fn for g in gradients if g is not None and g.grad_fn is not None]
    seen = set(waiting)
    while waiting:
        node = waiting.pop()
        if node.name().rpartition("::")[2] == "Error":
            raise RuntimeError(
                "A function in the loss is marked once_differentiable, so it has no second "
                "derivative."
            )
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                waiting.append(following)


def _average(draw: Callable[[], list[Tensor]], n_samples: int) -> Estimate[tuple[Tensor, ...]]:
    """Return mean and standard error of several draws (Welford 1962)."""
    check_at_least("n_samples", n_samples, 1)
    means = draw()
    squares = [torch.zeros_like(mean) for mean in means]
    for count in range(2, n_samples + 1):
        for index, sample in enumerate(draw()):
            delta = sample - means[index]
            means[index] = means[index] + delta / count
            squares[index] = squares[index] + delta * (sample - means[index])
    # 0 / 0 is NaN for a single sample.
    errors = [(square / (n_samples - 1) / n_samples).sqrt() for square in squares]
    return Estimate(tuple(means), tuple(errors))
