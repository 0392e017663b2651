"""Checks that a trial learns the same as the baseline.

All runs start from equal weights and see equal batches. For each parameter, the first gradient must
equal the baseline's in direction and length, up to rounding. Then the weights must move about as
far, and the losses must stay near the baseline's. This also finds faults of the optimizer, and
faults in later steps. If the model draws random numbers (dropout), a run of the baseline with other
random numbers gives the tolerance of gradients and losses.
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
"""Minimum cosine between two gradients of a parameter. Rounding to bfloat16 gives 0.95, even if
most terms of a sum cancel out. An unrelated gradient gives 0, a negated gradient -1."""

MAX_LENGTH_RATIO = 1.5
"""Maximum ratio between the lengths of two gradients of a parameter."""

MAX_CANCELLATION_ERROR = 0.02
"""Allowed error of a gradient as a share of the largest gradient of its module, both as root mean
squares. Some gradients, such as a bias's before a normalisation, consist of rounding errors."""

MAX_DISTANCE_STEPS = 64
"""Maximum number of steps after which the distances of the weights are compared."""

MAX_DISTANCE_RATIO = 4.0
"""Maximum ratio between the distances that the weights of two runs have moved. It is large because
Adam turns rounding errors into full steps, and a loss scaler skips steps."""

MAX_LOSS_SHARE = 2e-2
"""Allowed difference in loss, as a share of the loss."""

MAX_PROGRESS_SHARE = 0.2
"""Allowed difference in loss, as a share of the baseline's progress."""

MAX_NOISE_ERRORS = 4.0
"""Allowed difference in mean loss, in standard errors due to the model's random numbers."""


def judge(
    candidate: Observations, baseline: Observations, noise_run: Callable[[], Observations]
) -> str:
    """Describe the first difference between what a trial and the baseline learn, or return "".

    Args:
        candidate: The observations of the trial.
        baseline: The observations of the baseline.
        noise_run: Returns the observations of the baseline with other random numbers. It is called
            only if needed.
    """
    why = compare_gradients(candidate.gradients, baseline.gradients)
    if why:
        why = compare_gradients(candidate.gradients, baseline.gradients, noise_run().gradients)
    why = why or compare_distances(candidate.moved, baseline.moved)
    if not why and compare_losses(candidate.losses, baseline.losses):
        why = compare_losses(candidate.losses, baseline.losses, noise_run().losses)
    return why


def compare_gradients(
    candidate: Sequence[Gradients], reference: Sequence[Gradients], noise: Sequence[Gradients] = ()
) -> str:
    """Compare the gradients of the first updates. Describe the first difference, or return "".

    Each parameter is compared at its first update with a finite, non-zero gradient. This is usually
    the very first update, where the weights are equal. It is a later update if the parameter is
    behind a layer initialised with zeros, or if the loss scale is still too large.

    Args:
        candidate: Gradients of the trial, one mapping per update.
        reference: Gradients of the baseline, on the same batches.
        noise: Gradients of the baseline on the same batches, with other random numbers.
    """
    compared: set[str] = set()
    for step, (gradients, targets) in enumerate(zip(candidate, reference, strict=False)):
        if not all(bool(values.isfinite().all()) for values in gradients.values()):
            continue
        noisy = noise[step] if step < len(noise) else targets
        largest: dict[str, float] = {}
        for name, target in targets.items():
            module = name.rpartition(".")[0]
            largest[module] = max(largest.get(module, 0.0), _root_mean_square(target))
        for name, target in targets.items():
            if name in compared or not bool(target.isfinite().all()) or not target.any():
                continue
            compared.add(name)
            values = gradients.get(name, torch.zeros_like(target))
            floor = MAX_CANCELLATION_ERROR * largest[name.rpartition(".")[0]]
            if _root_mean_square(values - target) > floor:
                noise_values = noisy.get(name, torch.zeros_like(target))
                if why := _gradient_difference(name, values, target, noise_values):
                    return why
    return ""


def _gradient_difference(name: str, values: Tensor, target: Tensor, noisy: Tensor) -> str:
    """Describe the difference if it exceeds the noise, else return ""."""
    if not values.any():
        return f"{name} has no gradient, but the baseline trains it"
    cosine, length = _cosine_and_length(values, target)
    noise_cosine, noise_length = _cosine_and_length(noisy, target)
    uncertainty = 2 / math.sqrt(len(target))  # the cosine is uncertain if there are few elements
    if cosine < MIN_COSINE * noise_cosine - uncertainty:
        return (
            f"the gradient of {name} has another direction than the baseline's, from equal weights "
            f"and batches (cosine {cosine:.2f})"
        )
    inverse = 1 / noise_length if noise_length else math.inf
    allowed = MAX_LENGTH_RATIO * max(noise_length, inverse)
    if 1 / allowed <= length <= allowed:
        return ""
    return (
        f"the gradient of {name} is {length:.3g} times as long as the baseline's, from equal "
        "weights and batches"
    )


def _root_mean_square(values: Tensor) -> float:
    return float(values.double().square().mean().sqrt())


def _cosine_and_length(candidate: Tensor, reference: Tensor) -> tuple[float, float]:
    """Compute the cosine between two gradients, and the ratio of their lengths."""
    candidate, reference = candidate.double(), reference.double()
    length, reference_length = float(candidate.norm()), float(reference.norm())
    product = length * reference_length
    cosine = float(candidate @ reference) / product if product else 0.0
    return cosine, length / reference_length


def compare_distances(candidate: Mapping[int, Any], reference: Mapping[int, Any]) -> str:
    """Compare how far the weights have moved. Describe a difference, or return "".

    Args:
        candidate: For each number of steps, the distance that each parameter has moved.
        reference: The same for the baseline.
    """
    # Ignore the last steps, because both runs may have converged by then.
    steps = max(
        (candidate.keys() & reference.keys()).intersection(range(MAX_DISTANCE_STEPS + 1)), default=0
    )
    moved, expected = candidate.get(steps, {}), reference.get(steps, {})
    if not any(moved.values()) or not any(expected.values()):
        return ""  # the loss scaler skips steps, or the learning rate is still 0
    unchanged = [name for name in expected if expected[name] and not moved.get(name)]
    if unchanged:
        named = ", ".join(unchanged[:3])
        return (
            f"after {steps} steps it has not changed {named} ({len(unchanged)} in all), which the "
            "baseline trains"
        )
    ratio = math.hypot(*moved.values()) / math.hypot(*expected.values())
    if not 1 / MAX_DISTANCE_RATIO <= ratio <= MAX_DISTANCE_RATIO:
        return f"after {steps} steps its weights have moved {ratio:.2g} times as far"
    return ""


def compare_losses(
    candidate: Sequence[float], reference: Sequence[float], noise: Sequence[float] = ()
) -> str:
    """Compare mean losses over the last third of the common steps. Describe a difference, or "".

    The allowed difference is the largest of four: a share of the loss, a share of the baseline's
    progress, the noise between batches, and the noise of the model's random numbers.

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
    # Use all steps: the last third may have too few to estimate a spread.
    differences = [loss - target for loss, target in zip(noise, reference, strict=False)]
    randomness = math.hypot(*differences) / math.sqrt(len(differences) or 1)
    error = max(3 * statistics.pstdev(last_losses), MAX_NOISE_ERRORS * randomness) / math.sqrt(last)
    allowed = max(MAX_LOSS_SHARE * abs(mean), MAX_PROGRESS_SHARE * abs(reference[0] - mean), error)
    difference = statistics.fmean(candidate[steps - last : steps]) - mean
    if abs(difference) <= allowed:
        return ""
    return (
        f"its loss differs by {difference:+.4g} in the last third of {steps} steps, where "
        f"{allowed:.4g} is allowed"
    )
