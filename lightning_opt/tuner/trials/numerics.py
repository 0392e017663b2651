"""Whether a faster run still learns the same: its losses against the baseline's, step by step.

Candidate and baseline start from the same seed and see the same batches, so their losses differ by
what the candidate changes. How much may be is not known beforehand: a trajectory is a chaotic thing
in which rounding grows. The scale is what the user accepts anyway: how far the baseline's own
losses differ from seed to seed, with other weights and other batches.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

WINDOWS = 3
"""Parts of the compared steps, each with its own tolerance: a late fault is not diluted."""

FLOOR = 2e-3
"""Share of the loss that rounding may always change; bfloat16 has a relative spacing of 8e-3, and
a loss is a mean of many. It does not depend on the learning rate or on any seed."""

PROGRESS = 0.2
"""Share of the baseline's progress that may be lost on the same batches, whatever the seeds say."""

# Quantiles of Student's t at 0.995 by degrees of freedom.
T_995 = (63.66, 9.925, 5.841, 4.604, 4.032, 3.707, 3.499, 3.355, 3.250, 3.169)
Z_995 = 2.576


@dataclass(frozen=True)
class Agreement:
    """How two trajectories of losses compare.

    Attributes:
        steps: Steps that were compared.
        difference: The largest difference of a window's mean loss, candidate less baseline.
        tolerance: What was allowed in that window.
        why: Why it is not accepted; empty if it is.
        by_floor: Whether the difference is within rounding, so that no seed was needed.
    """

    steps: int
    difference: float
    tolerance: float
    why: str = ""
    by_floor: bool = False

    @property
    def accepted(self) -> bool:
        """Whether the candidate learns as the baseline does."""
        return not self.why


def windows(losses: Sequence[float], steps: int) -> list[float]:
    """Return the mean loss of each of :data:`WINDOWS` equal parts of the first steps."""
    count = min(WINDOWS, steps)
    bounds = [round(part * steps / count) for part in range(count + 1)]
    return [statistics.fmean(losses[start:end]) for start, end in itertools.pairwise(bounds)]


def floors(baseline: Sequence[float], steps: int, share: float = FLOOR) -> list[float]:
    """Return, for each window, the difference that rounding may make.

    A share of the loss there, and of a tenth of the first loss where training brings it near 0.
    """
    first = abs(baseline[0])
    return [share * max(abs(mean), 0.1 * first) for mean in windows(baseline, steps)]


def seed_tolerances(runs: Sequence[Sequence[float]], steps: int) -> list[float]:
    """Return, for each window, how far another seed's mean may lie from the first one's.

    The half-width of the prediction interval at 99% for one more seed, from the spread of those
    that were run; but no more than three times their range, since the interval of two or three
    values admits anything. Other seeds mean other batches too, which the candidate does not have,
    so that the interval is too wide for it: no more than :data:`PROGRESS` of what the baseline has
    learnt may be lost either, unless the seeds that were run differ by as much themselves.

    Args:
        runs: Losses of the baseline, one sequence a seed, the candidate's seed first.
        steps: How many count.
    """
    parts = [windows(run, steps) for run in runs]
    learnt = PROGRESS * abs(runs[0][0] - parts[0][-1])
    tolerances = []
    for means in zip(*parts, strict=True):
        count = len(means)
        if count < 2:
            tolerances.append(0.0)
            continue
        quantile = T_995[count - 2] if count - 2 < len(T_995) else Z_995
        wide = quantile * statistics.stdev(means) * math.sqrt(1 + 1 / count)
        spread = max(means) - min(means)
        tolerances.append(min(wide, 3.0 * spread, max(spread, learnt)))
    return tolerances


def compare(
    losses: Sequence[float],
    baseline: Sequence[float],
    others: Sequence[Sequence[float]] = (),
    tolerance: float | None = None,
) -> Agreement:
    """Compare a candidate's losses with the baseline's over the steps that both have taken.

    Args:
        losses: Of the candidate.
        baseline: Of the baseline, with the same seed.
        others: Of the baseline with other seeds.
        tolerance: Share of the loss that may differ, instead of what the seeds say.

    Returns:
        The comparison. It is accepted if each window's mean differs by no more than the larger of
        what rounding may change and what seeds change; or by the tolerance that was given.
    """
    steps = min(len(losses), len(baseline), *(len(run) for run in others))
    if not steps:
        return Agreement(0, math.nan, math.nan, "no step was taken")
    broken = next((step for step in range(len(losses)) if not math.isfinite(losses[step])), None)
    if broken is not None and all(map(math.isfinite, baseline[: broken + 1])):
        return Agreement(
            steps, math.nan, math.nan,
            f"its loss is {losses[broken]} at step {broken}, and the baseline's is not",
        )  # fmt: skip
    usual = [value for value in baseline[:steps] if math.isfinite(value)]
    if len(usual) < steps or not all(map(math.isfinite, losses[:steps])):
        return Agreement(
            steps, math.nan, math.nan,
            "the baseline's own loss is not finite, so there is nothing to compare with",
        )  # fmt: skip
    allowed = floors(baseline, steps, FLOOR if tolerance is None else tolerance)
    differences = [
        own - other
        for own, other in zip(windows(losses, steps), windows(baseline, steps), strict=True)
    ]
    by_floor = all(
        abs(difference) <= bound for difference, bound in zip(differences, allowed, strict=True)
    )
    if tolerance is None and not by_floor and others:
        seeds = seed_tolerances([baseline, *others], steps)
        allowed = [max(pair) for pair in zip(allowed, seeds, strict=True)]
    shares = [
        abs(difference) / bound if bound else (math.inf if difference else 0.0)
        for difference, bound in zip(differences, allowed, strict=True)
    ]
    worst = max(range(len(shares)), key=shares.__getitem__)
    difference, bound = differences[worst], allowed[worst]
    if shares[worst] <= 1:
        return Agreement(steps, difference, bound, by_floor=by_floor)
    source = "are allowed" if tolerance is not None else "seeds and rounding explain"
    return Agreement(
        steps, difference, bound,
        f"its loss differs by {difference:+.4g} in part {worst + 1} of {len(shares)} of "
        f"{steps} steps, where {bound:.4g} {source}",
    )  # fmt: skip


def still(moved: Mapping[int, Sequence[str]], reference: Mapping[int, Sequence[str]]) -> str:
    """Return why parameters that no longer move speak against a candidate; empty if none do.

    Args:
        moved: Parameters that the candidate's updates had changed, after so many steps.
        reference: Those that the baseline's had changed.
    """
    common = moved.keys() & reference.keys()
    if not common or not moved[max(common)]:
        return ""  # nothing moved yet, as when a loss scale is still being found
    steps = max(common)
    lost = [name for name in reference[steps] if name not in set(moved[steps])]
    if not lost:
        return ""
    named = ", ".join(lost[:3]) + (f" and {len(lost) - 3} more" if len(lost) > 3 else "")
    return f"after {steps} steps it has not changed {named}, which the baseline trains"
