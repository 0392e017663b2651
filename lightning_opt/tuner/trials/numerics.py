"""Whether a faster run still learns the same: what its steps do, beside the baseline's.

All trainings start from equal weights and see equal batches. So the first gradients are those of
eager float32 up to rounding, whatever the learning rate and the user's own precision, and are
compared parameter by parameter in direction and length. Afterwards the weights must move about as
far as the baseline's, and the losses must stay near: what goes wrong later, or in the optimizer,
shows there. Where the model itself draws random numbers (dropout), the scale of gradients and
losses is how far the baseline's own differ when it draws others.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from lightning_opt.tuner.trials.baseline import Observed

Gradients = Mapping[str, Tensor]
"""Sampled elements of each parameter's gradient, by the parameter's name."""

TURNED = 0.7
"""Cosine below which two gradients of a parameter are not the same: rounding to bfloat16 leaves
0.95 even where much cancels, an unrelated gradient has 0, one of the wrong sign has -1."""

LONGER = 1.5
"""How many times as long one of two gradients of a parameter may be."""

CANCELLED = 0.02
"""Share of the largest gradient of its module, an element each, by which a parameter's may be off
in any case: that of a bias before a normalisation is nothing but rounding."""

MOVED = 64
"""Steps after which the ways of the weights are compared at the latest."""

FARTHER = 4.0
"""How many times as far the weights of one of two runs may have moved. Optimizers that divide
by the gradient's size turn rounding into steps, and a loss scale that is found skips some."""

FLOOR = 2e-2
"""Share of the loss by which it may always differ."""

PROGRESS = 0.2
"""Share of the baseline's progress that may be lost."""

DRAWS = 4.0
"""Standard errors of the mean loss that other random numbers in the model may make."""


def judge(
    own: Observed, baseline: Observed, another: Callable[[str], Observed]
) -> tuple[float | None, str]:
    """Judge whether a candidate learns what the baseline learns.

    Args:
        own: Of the candidate.
        baseline: Of the baseline.
        another: Returns what another run of the baseline tells: in eager ``"float32"``, or with
            other random numbers in the model, ``"noise"``, which is asked for only if it decides.

    Returns:
        The cosine of :func:`compare_gradients`, and why not; empty if it does.
    """
    exact = another("float32").gradients
    agreement, why = compare_gradients(own.gradients, exact)
    if why:
        agreement, why = compare_gradients(own.gradients, exact, another("noise").gradients)
    why = why or compare_paths(own.moved, baseline.moved)
    if not why and compare_losses(own.losses, baseline.losses):
        why = compare_losses(own.losses, baseline.losses, another("noise").losses)
    return agreement, why


def compare_gradients(
    own: Sequence[Gradients], reference: Sequence[Gradients], noise: Sequence[Gradients] = ()
) -> tuple[float | None, str]:
    """Compare the gradients of the first steps.

    Args:
        own: Of the candidate, one mapping a step.
        reference: Of eager float32, on the same batches.
        noise: Of the baseline, on the same batches, with other random numbers.

    Returns:
        The least cosine of a parameter, None if there was nothing to compare, and why the candidate
        does not learn the same; empty if it does. Each parameter counts at the first step at which
        the reference has a gradient for it and both are finite: the weights are equal only at the
        first, but a layer that begins with zeros sends none back then, and a loss scale that is
        still too large makes infinities.
    """
    least: float | None = None
    seen: set[str] = set()
    for step, (mine, theirs) in enumerate(zip(own, reference, strict=False)):
        if not all(bool(values.isfinite().all()) for values in mine.values()):
            continue
        usual = noise[step] if step < len(noise) else theirs
        largest: dict[str, float] = {}
        for name, target in theirs.items():
            module = name.rpartition(".")[0]
            largest[module] = max(largest.get(module, 0.0), _size(target))
        for name, target in theirs.items():
            if name in seen or not bool(target.isfinite().all()) or not target.any():
                continue
            seen.add(name)
            values = mine.get(name, torch.zeros_like(target))
            floor = CANCELLED * largest[name.rpartition(".")[0]]
            cosine, length = _cosine(values, target)
            if _size(target) > floor:
                least = cosine if least is None else min(least, cosine)
            if _size(values - target) <= floor:
                continue
            wanted, spread = _cosine(usual.get(name, torch.zeros_like(target)), target)
            # A cosine of few elements is no more exact than this.
            if cosine < TURNED * wanted - 2 / math.sqrt(len(target)) or not values.any():
                return cosine, _turned(name, cosine, values)
            allowed = LONGER * max(spread, 1 / spread if spread else math.inf)
            if not 1 / allowed <= length <= allowed:
                return cosine, (
                    f"the gradient of {name} is {length:.3g} times as long as that of eager "
                    "float32, from equal weights and batches"
                )
    return least, ""


def _turned(name: str, cosine: float, own: Tensor) -> str:
    if not own.any():
        return f"{name} gets no gradient, and the baseline trains it"
    return (
        f"the gradient of {name} points elsewhere than that of eager float32 from equal weights "
        f"and batches (cosine {cosine:.2f})"
    )


def _size(values: Tensor) -> float:
    """Return the root of the mean square of an element."""
    return float(values.double().square().mean().sqrt())


def _cosine(own: Tensor, reference: Tensor) -> tuple[float, float]:
    """Return the cosine between two vectors, and the length of the first in units of the second."""
    own, reference = own.double(), reference.double()
    length, unit = float(own.norm()), float(reference.norm())
    return float(own @ reference) / (length * unit) if length * unit else 0.0, length / unit


def compare_paths(own: Mapping[int, Any], reference: Mapping[int, Any]) -> str:
    """Return why the way that the weights have gone speaks against a candidate; empty if not.

    Args:
        own: How far each parameter is from its start, by name, after so many steps.
        reference: The same of the baseline.
    """
    # Later a training may have converged, whatever its way.
    steps = max((own.keys() & reference.keys()).intersection(range(MOVED + 1)), default=0)
    mine, theirs = own.get(steps, {}), reference.get(steps, {})
    if not any(mine.values()) or not any(theirs.values()):
        return ""  # nothing moved yet, as when a loss scale is being found or the rate is still 0
    lost = [name for name in theirs if theirs[name] and not mine.get(name)]
    if lost:
        named = ", ".join(lost[:3]) + (f" and {len(lost) - 3} more" if len(lost) > 3 else "")
        return f"after {steps} steps it has not changed {named}, which the baseline trains"
    ratio = math.hypot(*mine.values()) / math.hypot(*theirs.values())
    if not 1 / FARTHER <= ratio <= FARTHER:
        return f"after {steps} steps its weights have moved {ratio:.2g} times as far"
    return ""


def compare_losses(
    own: Sequence[float], reference: Sequence[float], noise: Sequence[float] = ()
) -> str:
    """Return why the losses speak against a candidate; empty if they do not.

    The mean of the last third of the common steps may differ by a share of the loss, by a part of
    what the baseline has learned until then, by the noise of the batches, or by what the random
    numbers of the model make of it.

    Args:
        own: Of the candidate.
        reference: Of the baseline.
        noise: Of the baseline, on the same batches, with other random numbers.
    """
    steps = min(len(own), len(reference))
    for step, (loss, usual) in enumerate(zip(own, reference, strict=False)):
        if not math.isfinite(loss):
            known = math.isfinite(usual)
            return f"its loss is {loss} at step {step}, and the baseline's is not" if known else ""
    if not steps or not all(map(math.isfinite, reference[:steps])):
        return ""
    last = max(1, steps // 3)
    theirs = reference[steps - last : steps]
    mean = statistics.fmean(theirs)
    # Of all its steps, since a few of them say little of their spread; each draws anew.
    pairs = [one - other for one, other in zip(noise, reference, strict=False)]
    drawn = math.hypot(*pairs) / math.sqrt(len(pairs) or 1)
    error = max(3 * statistics.pstdev(theirs), DRAWS * drawn) / math.sqrt(last)
    allowed = max(FLOOR * abs(mean), PROGRESS * abs(reference[0] - mean), error)
    difference = statistics.fmean(own[steps - last : steps]) - mean
    if abs(difference) <= allowed:
        return ""
    return (
        f"its loss differs by {difference:+.4g} in the last third of {steps} steps, where "
        f"{allowed:.4g} is allowed"
    )
