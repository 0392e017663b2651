"""Rules for batch sizes: the next size after an epoch, the largest size and the fastest."""

from __future__ import annotations

import math
import random
import statistics
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from lightning_opt.core.output.report import Report

SHRINK_FACTOR = 0.8
"""Factor on a size whose memory peak was too large."""

MAX_BELOW, MAX_ABOVE = 0.1, 0.05
"""How far the peak may lie below and above the target without a change of size."""

MAX_TRIALS = 12
"""Maximum number of trials in a search for the largest size."""

MIN_SPEED_SHARE = 0.6
"""Halving stops at a size with less than this share of the best speed."""

FINALISTS_BY_ROUND = (3, 3, 3, 2)
"""How many of the best sizes are timed in each round after the first."""

SIZE_TOLERANCE = 0.03
"""The search ends if a size that fits is this close, relatively, to a size that does not."""

SPEED_TOLERANCE = 0.01
"""Sizes whose speeds differ by at most this share count as equally fast."""


@dataclass
class MemoryFit:
    """The memory peak as a linear function of the batch size, in shares of the limit.

    With one measured size, the line starts at ``baseline``. With several sizes, it is the
    least-squares fit. If that fit has no positive slope, noise exceeds the slope: the line then
    also runs from ``baseline`` through the largest size.

    Attributes:
        points: The latest peak of each measured size.
        baseline: Memory without a batch, as a share of the limit.
    """

    points: dict[int, float] = field(default_factory=dict)
    baseline: float = 0.0

    def add(self, size: int, peak: float, baseline: float | None = None) -> None:
        self.points[size] = peak
        if baseline is not None:
            self.baseline = min(baseline, peak)

    def slope(self) -> float:
        if len(self.points) > 1:
            slope, _ = statistics.linear_regression(list(self.points), list(self.points.values()))
            if slope > 0:
                return slope
        size = max(self.points)
        return (self.points[size] - self.baseline) / size

    def largest(self, share: float) -> int | None:
        """Return the largest size whose peak stays below ``share``; None if none is known."""
        if not self.points or self.slope() <= 0:
            return None
        # Starts at the largest measured size, to keep the extrapolation short.
        size = max(self.points)
        return max(0, int(size + (share - self.points[size]) / self.slope() + 1e-9))


def next_size(
    size: int, peak: float, fit: MemoryFit, allowed: Sequence[int], *, target: float, grow: float
) -> int:
    """Return the size for the next epoch, one of ``allowed``, which is in ascending order.

    The size stays if the peak lies from ``MAX_BELOW`` under the target to ``MAX_ABOVE`` over it.
    Under that range, the size grows by ``grow``, but not above the size for which the fit predicts
    ``target``. Over that range, it becomes ``SHRINK_FACTOR`` times itself or the predicted size,
    whichever is smaller.
    """
    predicted = fit.largest(target)
    if peak > min(1.0, target + MAX_ABOVE):
        wanted = min(int(size * SHRINK_FACTOR), size - 1)
        return _down_to(allowed, wanted if predicted is None else min(wanted, predicted))
    if peak >= target - MAX_BELOW:
        return size
    larger = allowed[bisect_right(allowed, size) :]
    wanted = max([int(size * grow), *larger[:1]])
    return max(size, _down_to(allowed, wanted if predicted is None else min(wanted, predicted)))


def _down_to(allowed: Sequence[int], wanted: int) -> int:
    return allowed[max(0, bisect_right(allowed, wanted) - 1)]


@dataclass(frozen=True)
class Trial:
    """The result of a few steps with one batch size.

    Attributes:
        size: Samples per batch.
        fits: Whether all steps on all ranks stayed within the limit.
        peak: Peak as a share of the limit; None if memory ran out.
        baseline: Memory without a batch, as a share of the limit.
        speed: Samples per second of one rank; 0 if memory ran out.
    """

    size: int
    fits: bool
    peak: float | None
    baseline: float
    speed: float


@dataclass
class FoundSizes:
    """The result of a search.

    Attributes:
        initial: The batch size of the user's loader.
        largest: The largest size that fits; 0 if none does.
        fastest: The timed size with the most samples per second; 0 if none was timed.
        trials: All trials, in order.
    """

    initial: int
    largest: int
    fastest: int
    trials: list[Trial] = field(default_factory=list)

    def chosen(self, mode: str) -> int:
        """Return the largest or the fastest size.

        Raises:
            MemoryError: If no size fits.
        """
        if not self.largest:
            raise MemoryError(
                "Not even a batch of one sample fits into memory. Possible remedies: "
                "lo.ActivationCheckpointing, precision='bf16-mixed', shorter or smaller samples."
            )
        return self.largest if mode == "largest" else self.fastest

    def report(self) -> Report:
        """Return one row per trial."""
        rows: list[dict[str, Any]] = [
            {
                "batch size": trial.size,
                "fits": trial.fits,
                "memory, of the limit": None if trial.peak is None else round(trial.peak, 3),
                "samples a second": round(trial.speed, 1) if trial.speed else None,
            }
            for trial in sorted(self.trials, key=lambda trial: trial.size)
        ]
        notes = [f"Largest that fits: {self.largest}."]
        if self.fastest:
            notes = [f"{notes[0]} Most samples a second: {self.fastest}."]
        return Report("Batch sizes", rows, notes)


def search(run: Callable[[int], Trial], initial: int, most: int, *, target: float) -> FoundSizes:
    """Search for the largest size that fits.

    The first two sizes give the memory per sample. A line through all peaks then predicts the
    largest size, and the next trials approach it from both sides. If no limit is known, nothing is
    predicted: sizes double until one fails, and then the gap is halved.
    """
    trials: dict[int, Trial] = {}
    fit = MemoryFit()
    fitting, failing = 0, most + 1
    size = max(1, min(initial, most))
    while len(trials) < MAX_TRIALS:
        trial = trials[size] = run(size)
        if trial.peak is not None:
            fit.add(size, trial.peak, trial.baseline)
        if trial.fits:
            fitting = max(fitting, size)
        else:
            failing = min(failing, size)
        if failing - fitting <= 1 or fitting >= (1 - SIZE_TOLERANCE) * failing:
            break
        size = _next_trial_size(fitting, failing, most, fit, target)
    return FoundSizes(initial, fitting, 0, list(trials.values()))


def find_fastest(run: Callable[[int], Trial], largest: int) -> tuple[int, list[Trial]]:
    """Return the size with the most samples per second, and one trial per size with its mean speed.

    The first round times the largest size, its half, its quarter and so on. It ends at a size that
    is much slower than the best so far, because smaller sizes are slower still. Then the best
    size's neighbours are timed: the sizes smaller and larger by a factor of the square root of 2.
    Short rounds of the best few follow, each in another order. Every round times all remaining
    sizes, so a slow minute of the machine affects all of them. Of equally fast sizes, the smallest
    wins.
    """
    generator = random.Random(0)  # the same order on all ranks
    trials: dict[int, list[Trial]] = {}

    def speed(size: int) -> float:
        return statistics.fmean(trial.speed for trial in trials[size])

    # Excludes size 1: BatchNorm cannot train on one sample.
    for halvings in range(max(1, largest.bit_length() - 1)):
        size = largest >> halvings
        trials[size] = [run(size)]
        if speed(size) < MIN_SPEED_SHARE * max(map(speed, trials)):
            break
    best = max(trials, key=speed)
    for neighbour in (round(best / math.sqrt(2)), round(best * math.sqrt(2))):
        if 1 < neighbour <= largest and neighbour not in trials:
            trials[neighbour] = [run(neighbour)]
    finalists = list(trials)
    for count in FINALISTS_BY_ROUND:
        finalists = sorted(finalists, key=lambda size: (-speed(size), size))[:count]
        if len(finalists) == 1:
            break
        generator.shuffle(finalists)
        for size in finalists:
            trials[size].append(run(size))
    best_speed = max(map(speed, finalists))
    fastest = min(size for size in finalists if speed(size) >= (1 - SPEED_TOLERANCE) * best_speed)
    return fastest, [replace(runs[-1], speed=speed(size)) for size, runs in trials.items()]


def _next_trial_size(fitting: int, failing: int, most: int, fit: MemoryFit, target: float) -> int:
    """Return a size between the largest that fits and the smallest that does not."""
    predicted = fit.largest(target) if len(fit.points) > 1 or failing <= most else None
    if predicted is None:
        if failing <= most and fitting:
            return min(failing - 1, max(fitting + 1, math.isqrt(fitting * failing)))
        return max(1, failing // 4) if failing <= most else min(most, 2 * fitting)
    if predicted <= fitting:  # the prediction was too low: the limit is probably close
        return min(failing - 1, max(fitting + 1, math.ceil(fitting / (1 - SIZE_TOLERANCE))))
    just_below = math.ceil(failing * (1 - SIZE_TOLERANCE))
    if failing <= most and predicted > 1.1 * failing:  # the prediction missed a limit
        return max(fitting + 1, math.isqrt(max(1, fitting) * failing))
    if failing <= most and predicted >= just_below:  # the prediction is slightly high
        return just_below if fitting < just_below < failing else (fitting + failing) // 2
    # At most 16 times the largest measured size, because few points predict poorly.
    return min(predicted, most, 16 * max(fit.points))
