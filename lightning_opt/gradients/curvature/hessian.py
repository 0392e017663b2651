"""Second derivatives of a loss: products with the Hessian, its diagonal, trace and top eigenvalue.

Nothing here forms the Hessian. All is built on its product with a vector, which costs about two
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

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeAlias, TypeVar

import torch
from torch import Tensor

from lightning_opt.core.arguments import at_least
from lightning_opt.gradients.curvature.lanczos import Eigenvalue, largest_eigenvalue

Tensors: TypeAlias = Sequence[Tensor]
Product: TypeAlias = Callable[[Tensors], list[Tensor]]
"""Multiplies the Hessian with vectors that have the shapes of the parameters."""

Value = TypeVar("Value", Tensor, tuple[Tensor, ...])


@dataclass(frozen=True)
class Estimate(Generic[Value]):
    """A figure, and how far it may be off.

    Attributes:
        value: A scalar, or one tensor a parameter in its shape.
        standard_error: Of ``value``, in its shape; NaN from a single sample.
        n_samples: Random vectors used.
    """

    value: Value
    standard_error: Value
    n_samples: int


def hessian_vector_product(loss: Tensor, params: Tensors, vectors: Tensors) -> tuple[Tensor, ...]:
    """Return the product of the loss's Hessian with ``vectors``.

    Args:
        loss: A scalar with its graph, computed from ``params``; the graph is kept.
        params: Tensors that the loss depends on; for one that it does not depend on the product is
            zero.
        vectors: One for each of ``params``, in its shape.

    Returns:
        One tensor for each of ``params``, without a graph.

    Raises:
        ValueError: If shapes differ, or the loss is not a scalar.

    Example:
        >>> import torch
        >>> import lightning_opt as lo
        >>> x = torch.tensor([1.0, 2.0], requires_grad=True)
        >>> lo.hessian_vector_product((x**3).sum(), [x], [torch.ones(2)])
        (tensor([ 6., 12.]),)
    """
    ours, theirs = [tuple(p.shape) for p in params], [tuple(v.shape) for v in vectors]
    if ours != theirs:
        raise ValueError(f"vectors must have the shapes of params: {ours}, got {theirs}.")
    return tuple(hessian_product(loss, params)(vectors))


def hessian_diagonal(
    loss: Tensor, params: Tensors, n_samples: int = 1, generator: torch.Generator | None = None
) -> Estimate[tuple[Tensor, ...]]:
    r"""Return the diagonal of the loss's Hessian, by Hutchinson's estimator.

    It is the mean of :math:`z \odot H z` over random signs :math:`z`: unbiased, with a variance of
    the squared entries beside the diagonal (Bekas et al. 2007).

    Args:
        loss: A scalar with its graph, computed from ``params``.
        params: Tensors that the loss depends on.
        n_samples: Random vectors, at least 1.
        generator: Of the random signs, on the device of ``params``.

    Returns:
        One tensor a parameter, with standard errors.

    Raises:
        ValueError: For ``n_samples`` below 1, or a loss that is no scalar.

    Example:
        >>> import torch
        >>> import lightning_opt as lo
        >>> x = torch.tensor([1.0, 2.0], requires_grad=True)
        >>> lo.hessian_diagonal((x**3).sum(), [x]).value
        (tensor([ 6., 12.]),)
    """
    at_least("n_samples", n_samples, 1)
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
        n_samples: Random vectors, at least 1.
        generator: Of the random signs, on the device of ``params``.

    Returns:
        A 0-dimensional tensor, with its standard error.

    Raises:
        ValueError: For ``n_samples`` below 1, or a loss that is no scalar.
    """
    at_least("n_samples", n_samples, 1)
    return estimate_trace(hessian_product(loss, params), params, n_samples, generator)


def top_eigenvalue(
    loss: Tensor,
    params: Tensors,
    max_iterations: int = 30,
    tolerance: float = 1e-3,
    generator: torch.Generator | None = None,
) -> Eigenvalue:
    """Return the largest eigenvalue of the loss's Hessian, its sharpness, by Lanczos's iteration.

    Three vectors of the size of the parameters are kept. Without orthogonalisation against the
    earlier ones eigenvalues repeat, but the largest is right (Paige 1980). Each iteration waits for
    the device once.

    Args:
        loss: A scalar with its graph, computed from ``params``.
        params: Tensors that the loss depends on.
        max_iterations: Products with the Hessian at most.
        tolerance: Stop when the eigenvalue is within this share of itself of a true one.
        generator: Of the random start, on the device of ``params``.

    Raises:
        ValueError: For ``max_iterations`` below 1, ``tolerance`` below 0, or a loss that is no
            scalar.

    Example:
        >>> import torch
        >>> import lightning_opt as lo
        >>> x = torch.tensor([1.0, 2.0], requires_grad=True)
        >>> round(lo.top_eigenvalue((x**3).sum(), [x]).value, 4)
        12.0
    """
    product = hessian_product(loss, params)
    return largest_eigenvalue(product, params, max_iterations, tolerance, generator)


def hessian_product(loss: Tensor, params: Tensors) -> Product:
    """Return what multiplies the Hessian with vectors, from one graph, as often as wanted.

    Raises:
        ValueError: If the loss is not a real scalar.
        RuntimeError: If a function in it can be differentiated only once.
    """
    if loss.ndim or loss.is_complex():
        raise ValueError(
            f"The loss must be one real number, got a tensor of shape {tuple(loss.shape)} and "
            f"type {loss.dtype}. Take its mean or sum."
        )
    gradients = torch.autograd.grad(loss, list(params), create_graph=True, allow_unused=True)
    _check_differentiable(gradients)
    # A gradient without a graph is a constant: its row of the Hessian is zero.
    curved = [
        (place, gradient)
        for place, gradient in enumerate(gradients)
        if gradient is not None and gradient.requires_grad
    ]

    def product(vectors: Tensors) -> list[Tensor]:
        if not curved:
            return [torch.zeros_like(parameter) for parameter in params]
        products = torch.autograd.grad(
            [gradient for _, gradient in curved],
            list(params),
            [vectors[place] for place, _ in curved],
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
    """Return one random estimate of the Hessian's diagonal."""
    signs = [random_signs(parameter, generator) for parameter in params]
    return [own * part for own, part in zip(signs, product(signs), strict=True)]


def estimate_trace(
    product: Product, params: Tensors, n_samples: int, generator: torch.Generator | None = None
) -> Estimate[Tensor]:
    """Return the trace, estimated from products with the Hessian."""

    def draw() -> list[Tensor]:
        parts = sample_diagonal(product, params, generator)
        return [torch.stack([part.sum() for part in parts]).sum()]

    average = _average(draw, n_samples)
    return Estimate(average.value[0], average.standard_error[0], n_samples)


def random_signs(like: Tensor, generator: torch.Generator | None) -> Tensor:
    """Return -1 or 1, each as probable, in the shape of ``like``."""
    # A bit an element: drawing a number for each would take as long as a backward pass.
    drawn = torch.randint(
        0, 256, (like.numel() // 8 + 1, 1), generator=generator, device=like.device,
        dtype=torch.uint8,
    )  # fmt: skip
    places = torch.arange(8, dtype=torch.uint8, device=like.device)
    bits = drawn.bitwise_right_shift(places).bitwise_and_(1).flatten()[: like.numel()]
    return bits.to(like.dtype).mul_(2).sub_(1).view_as(like)


def _check_differentiable(gradients: Sequence[Tensor | None]) -> None:
    """Find functions that may be differentiated once only.

    Their node raises when it is reached, but leads nowhere, so that ``torch.autograd.grad`` leaves
    it out and the second derivative lacks a part in silence.
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
    """Return the mean of tensors that are drawn one after another, and its error (Welford 1962)."""
    means = draw()
    squares = [torch.zeros_like(mean) for mean in means]
    for count in range(2, n_samples + 1):
        for place, sample in enumerate(draw()):
            delta = sample - means[place]
            means[place] = means[place] + delta / count
            squares[place] = squares[place] + delta * (sample - means[place])
    if n_samples < 2:
        errors = [torch.full_like(mean, torch.nan) for mean in means]
    else:
        errors = [(square / (n_samples - 1) / n_samples).sqrt() for square in squares]
    return Estimate(tuple(means), tuple(errors), n_samples)
