"""Checks that a trial learns the same as the baseline.

All runs start from equal weights and see equal batches. The first gradients must equal those of
eager float32 up to rounding, parameter by parameter, in direction and length. Then the weights must
move about as far as the baseline's, and the losses must stay near. This also finds faults of the
optimizer and faults that appear later. If the model draws random numbers (dropout), the tolerance
of gradients and losses is measured by a run of the baseline with different ones.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from lightning_opt.tuner.probe import Observations

Gradients = Mapping[str, Tensor]
"""Sampled elements of each parameter's gradient, by the parameter's name."""

MIN_COSINE = 0.7
"""Minimum cosine between two gradients of a parameter. It is 0.95 after rounding to bfloat16, even
if most of the sum cancels out. It is 0 for an unrelated gradient, and -1 for a negated one."""

MAX_LENGTH_RATIO = 1.5
"""Maximum ratio between the lengths of two gradients of a parameter."""

MAX_CANCELLATION_ERROR = 0.02
"""Allowed error of a gradient as a share of the largest gradient of its module, both as root mean
squares. For example, the gradient of a bias before a normalisation consists of rounding errors."""

MAX_DISTANCE_STEPS = 64
"""Maximum number of steps after which the distances of the weights are compared."""

MAX_DISTANCE_RATIO = 4.0
"""Maximum ratio between the distances that the weights of two runs have moved. It is large because
Adam normalises gradients, which turns rounding errors into steps, and a loss scaler skips steps."""

MAX_LOSS_SHARE = 2e-2
"""Allowed difference in loss, as a share of the loss."""

MAX_PROGRESS_SHARE = 0.2
"""Allowed difference in loss, as a share of the baseline's progress."""

MAX_NOISE_ERRORS = 4.0
"""Allowed difference in mean loss, in standard errors of the model's own randomness."""


def judge(
    candidate: Observations, baseline: Observations, reference_run: Callable[[str], Observations]
) -> tuple[float | None, str]:
    """Check whether a trial learns the same as the baseline.

    Args:
        candidate: The observations of the trial.
        baseline: The observations of the baseline.
        reference_run: Returns the observations of another run of the baseline: ``"float32"`` for
            eager float32, ``"noise"`` for different random numbers (only if needed).

    Returns:
        The cosine from :func:`compare_gradients`, and a sentence about the first difference, or "".
    """
    exact = reference_run("float32").gradients
    agreement, why = compare_gradients(candidate.gradients, exact)
    if why:
        agreement, why = compare_gradients(
            candidate.gradients, exact, reference_run("noise").gradients
        )
    why = why or compare_distances(candidate.moved, baseline.moved)
    if not why and compare_losses(candidate.losses, baseline.losses):
        why = compare_losses(candidate.losses, baseline.losses, reference_run("noise").losses)
    return agreement, why


def compare_gradients(
    candidate: Sequence[Gradients], reference: Sequence[Gradients], noise: Sequence[Gradients] = ()
) -> tuple[float | None, str]:
    """Compare the gradients of the first steps.

    Args:
        candidate: Gradients of the trial, one mapping per update.
        reference: Gradients in eager float32, on the same batches.
        noise: Gradients of the baseline on the same batches, with different random numbers.

    Returns:
        The smallest cosine of a parameter (None if nothing was compared), and the first difference,
        or "". Each parameter is compared at its first update with a finite, non-zero gradient. That
        is the first update, where the weights are equal, unless the parameter is behind a layer
        initialised with zeros or the loss scale is still too large.
    """
    least: float | None = None
    compared: set[str] = set()
    for step, (gradients, targets) in enumerate(zip(candidate, reference, strict=False)):
        if not all(bool(values.isfinite().all()) for values in gradients.values()):
            continue
        noisy = noise[step] if step < len(noise) else targets
        largest: dict[str, float] = {}
        for name, target in targets.items():
            module = name.rpartition(".")[0]
            largest[module] = max(largest.get(module, 0.0), _size(target))
        for name, target in targets.items():
            if name in compared or not bool(target.isfinite().all()) or not target.any():
                continue
            compared.add(name)
            values = gradients.get(name, torch.zeros_like(target))
            floor = MAX_CANCELLATION_ERROR * largest[name.rpartition(".")[0]]
            cosine, _ = _cosine_and_length(values, target)
            if _size(target) > floor:
                least = cosine if least is None else min(least, cosine)
            if _size(values - target) > floor:
                why = _gradient_difference(name, values, target, noisy.get(name))
                if why:
                    return cosine, why
    return least, ""


def _gradient_difference(name: str, values: Tensor, target: Tensor, noisy: Tensor | None) -> str:
    """Describe a difference from eager float32 that exceeds the noise, or return ""."""
    if not values.any():
        return f"{name} has no gradient, but the baseline trains it"
    cosine, length = _cosine_and_length(values, target)
    noisy = torch.zeros_like(target) if noisy is None else noisy
    noise_cosine, noise_length = _cosine_and_length(noisy, target)
    uncertainty = 2 / math.sqrt(len(target))  # the cosine of few elements is uncertain
    if cosine < MIN_COSINE * noise_cosine - uncertainty:
        return (
            f"the gradient of {name} has another direction than in eager float32, from equal "
            f"weights and batches (cosine {cosine:.2f})"
        )
    inverse = 1 / noise_length if noise_length else math.inf
    allowed = MAX_LENGTH_RATIO * max(noise_length, inverse)
    if 1 / allowed <= length <= allowed:
        return ""
    return (
        f"the gradient of {name} is {length:.3g} times as long as in eager float32, from equal "
        "weights and batches"
    )


def _size(values: Tensor) -> float:
    """Compute the root mean square."""
    return float(values.double().square().mean().sqrt())


def _cosine_and_length(candidate: Tensor, reference: Tensor) -> tuple[float, float]:
    """Compute the cosine between two gradients, and the ratio of their lengths."""
    candidate, reference = candidate.double(), reference.double()
    length, unit = float(candidate.norm()), float(reference.norm())
    return float(candidate @ reference) / (length * unit) if length * unit else 0.0, length / unit


def compare_distances(candidate: Mapping[int, Any], reference: Mapping[int, Any]) -> str:
    """Describe a difference between the distances that weights have moved, or return "".

    Args:
        candidate: The distance of each parameter, by the number of steps.
        reference: The same for the baseline.
    """
    # Not the last steps, because both may have converged by then.
    steps = max(
        (candidate.keys() & reference.keys()).intersection(range(MAX_DISTANCE_STEPS + 1)), default=0
    )
    moved, expected = candidate.get(steps, {}), reference.get(steps, {})
    if not any(moved.values()) or not any(expected.values()):
        return ""  # the loss scaler skips steps, or the learning rate is still 0
    unchanged = [name for name in expected if expected[name] and not moved.get(name)]
    if unchanged:
        named = ", ".join(unchanged[:3]) + (
            f" and {len(unchanged) - 3} more" if len(unchanged) > 3 else ""
        )
        return f"after {steps} steps it has not changed {named}, which the baseline trains"
    ratio = math.hypot(*moved.values()) / math.hypot(*expected.values())
    if not 1 / MAX_DISTANCE_RATIO <= ratio <= MAX_DISTANCE_RATIO:
        return f"after {steps} steps its weights have moved {ratio:.2g} times as far"
    return ""


def compare_losses(
    candidate: Sequence[float], reference: Sequence[float], noise: Sequence[float] = ()
) -> str:
    """Describe a difference between the losses, or return "".

    The mean over the last third of the common steps may differ by the largest of a share of the
    loss, a share of the baseline's progress, the noise between batches, and the randomness of the
    model.

    Args:
        candidate: Losses of the trial.
        reference: Losses of the baseline.
        noise: Losses of the baseline on the same batches, with different random numbers.
    """
    steps = min(len(candidate), len(reference))
    for step, (loss, baseline) in enumerate(zip(candidate, reference, strict=False)):
        if not math.isfinite(loss):
            finite = math.isfinite(baseline)
            return f"its loss is {loss} at step {step}, the baseline's is finite" if finite else ""
    if not steps or not all(map(math.isfinite, reference[:steps])):
        return ""
    last = max(1, steps // 3)
    last_losses = reference[steps - last : steps]
    mean = statistics.fmean(last_losses)
    # Over all steps, because the last third may be too few to estimate a spread.
    pairs = [one - other for one, other in zip(noise, reference, strict=False)]
    randomness = math.hypot(*pairs) / math.sqrt(len(pairs) or 1)
    error = max(3 * statistics.pstdev(last_losses), MAX_NOISE_ERRORS * randomness) / math.sqrt(last)
    allowed = max(MAX_LOSS_SHARE * abs(mean), MAX_PROGRESS_SHARE * abs(reference[0] - mean), error)
    difference = statistics.fmean(candidate[steps - last : steps]) - mean
    if abs(difference) <= allowed:
        return ""
    return (
        f"its loss differs by {difference:+.4g} in the last third of {steps} steps, where "
        f"{allowed:.4g} is allowed"
    )
