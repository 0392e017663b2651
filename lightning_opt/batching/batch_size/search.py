"""Pure rules for batch sizes: the next size from measured peaks, the largest, the fastest."""

from __future__ import annotations

import math
import random
import statistics
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from lightning_opt.core.output.report import Report

SHRINK = 0.8
"""Factor for a size that took too much memory."""

BELOW, ABOVE = 0.1, 0.05
"""Distance from the target, down and up, within which a size stays."""

TRIALS = 12
"""The most trials in a search for the largest size."""

SLOW = 0.6
"""Share of the best speed: no size below a slower one is timed."""

FINALISTS = (3, 3, 3, 2)
"""Number of the best sizes that are timed in each round after the first."""

TOLERANCE = 0.03
"""Relative distance to a size that does not fit at which the search ends."""

SAME = 0.01
"""Relative difference in speed up to which the smaller size is better."""


@dataclass
class MemoryFit:
    """The memory peak as a linear function of the batch size, in shares of the limit.

    With one measured size the line starts at ``rest``, the use without a batch. With several it is
    the least-squares fit, unless that falls: then noise exceeds the slope.

    Attributes:
        points: The latest peak of each measured size.
        rest: Use without a batch.
    """

    points: dict[int, float] = field(default_factory=dict)
    rest: float = 0.0

    def add(self, size: int, peak: float, rest: float | None = None) -> None:
        self.points[size] = peak
        if rest is not None:
            self.rest = min(rest, peak)

    def slope(self) -> float:
        if len(self.points) > 1:
            slope, _ = statistics.linear_regression(list(self.points), list(self.points.values()))
            if slope > 0:
                return slope
        size = max(self.points)
        return (self.points[size] - self.rest) / size

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

    From ``BELOW`` under the target to ``ABOVE`` over it, the size stays. Below, it grows by
    ``grow``, but only as far as the fit predicts ``target``, so that it need not shrink again.
    Above, it shrinks by ``SHRINK`` or to the predicted size, whichever is smaller.
    """
    room = fit.largest(target)
    if peak > min(1.0, target + ABOVE):
        wanted = min(int(size * SHRINK), size - 1)
        return _down_to(allowed, wanted if room is None else min(wanted, room))
    if peak >= target - BELOW:
        return size
    larger = allowed[bisect_right(allowed, size) :]
    wanted = max([int(size * grow), *larger[:1]])
    return max(size, _down_to(allowed, wanted if room is None else min(wanted, room)))


def _down_to(allowed: Sequence[int], wanted: int) -> int:
    return allowed[max(0, bisect_right(allowed, wanted) - 1)]


@dataclass(frozen=True)
class Trial:
    """The result of a few steps with one batch size.

    Attributes:
        size: Samples per batch.
        fits: Whether all steps on all ranks stayed within the limit.
        peak: Peak as a share of the limit; None if memory ran out.
        rest: Share that is in use without a batch.
        speed: Samples per second of one rank; 0 if memory ran out.
    """

    size: int
    fits: bool
    peak: float | None
    rest: float
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

    Two sizes give the memory per sample. A line through all peaks then predicts the largest, and
    the next trials close in on it from both sides. Without a prediction (no known limit), sizes
    double until one fails, and then the gap is halved.
    """
    done: dict[int, Trial] = {}
    fit = MemoryFit()
    good, bad = 0, most + 1
    size = max(1, min(initial, most))
    while len(done) < TRIALS:
        trial = done[size] = run(size)
        if trial.peak is not None:
            fit.add(size, trial.peak, trial.rest)
        if trial.fits:
            good = max(good, size)
        else:
            bad = min(bad, size)
        if bad - good <= 1 or good >= (1 - TOLERANCE) * bad:
            break
        size = _next(good, bad, most, fit, target)
    return FoundSizes(initial, good, 0, list(done.values()))


def race(run: Callable[[int], Trial], largest: int) -> tuple[int, list[Trial]]:
    """Return the size with the most samples per second, and one trial per size with its mean.

    The first round times the largest size, its half, its quarter and so on, and ends at a size much
    slower than the best so far: the constant cost per step weighs more at smaller sizes. Then the
    neighbours of the best are timed, half a step away. Short rounds of the best few follow, in
    another order each time. Sizes are compared by their mean over the rounds that they share, so a
    slow minute of the machine affects all of them. The smallest size as fast as the best wins.
    """
    order = random.Random(0)  # the same on all ranks
    trials: dict[int, list[Trial]] = {}

    def speed(size: int) -> float:
        return statistics.fmean(trial.speed for trial in trials[size])

    # Never one sample alone: BatchNorm has no statistics of it.
    for halvings in range(max(1, largest.bit_length() - 1)):
        size = largest >> halvings
        trials[size] = [run(size)]
        if speed(size) < SLOW * max(map(speed, trials)):
            break
    best = max(trials, key=speed)
    for near in (round(best / math.sqrt(2)), round(best * math.sqrt(2))):
        if near <= largest and near > 1 and near not in trials:
            trials[near] = [run(near)]
    racing = list(trials)
    for most in FINALISTS:
        racing = sorted(racing, key=lambda size: (-speed(size), size))[:most]
        if len(racing) == 1:
            break
        order.shuffle(racing)
        for size in racing:
            trials[size].append(run(size))
    fastest = max(map(speed, racing))
    found = min(size for size in racing if speed(size) >= (1 - SAME) * fastest)
    return found, [replace(runs[-1], speed=speed(size)) for size, runs in trials.items()]


def _next(good: int, bad: int, most: int, fit: MemoryFit, target: float) -> int:
    """Return a size between ``good``, which fits, and ``bad``, which does not."""
    guess = fit.largest(target) if len(fit.points) > 1 or bad <= most else None
    if guess is None:
        if bad <= most and good:
            return min(bad - 1, max(good + 1, math.isqrt(good * bad)))
        return max(1, bad // 4) if bad <= most else min(most, 2 * good)
    if guess <= good:  # larger than predicted: the limit is probably close
        return min(bad - 1, max(good + 1, math.ceil(good / (1 - TOLERANCE))))
    near = math.ceil(bad * (1 - TOLERANCE))
    if bad <= most and guess > 1.1 * bad:  # another limit than the predicted one: halve the gap
        return max(good + 1, math.isqrt(max(1, good) * bad)) if bad - good > 1 else good
    if bad <= most and guess >= near:  # a bit less than predicted: try just below the failure
        return near if good < near < bad else (good + bad) // 2
    # Limits the extrapolation from few points.
    return min(guess, most, 16 * max(fit.points))
