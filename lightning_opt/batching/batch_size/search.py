"""The largest and the fastest batch size, from as few trials as possible."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from lightning_opt.batching.batch_size.memory_fit import MemoryFit
from lightning_opt.core.output.report import Report

TRIALS = 12
"""What a search for the largest size may take."""

SLOW = 0.6
"""Of the best speed: sizes below one that is slower are not timed."""

FINALISTS = (3, 3, 3, 2)
"""How many of the best sizes are timed in each round after the first."""

TOLERANCE = 0.03
"""A largest size this close to one that does not fit is good enough."""

SAME = 0.01
"""Sizes whose throughput differs by no more are alike, and the smaller one is better."""


@dataclass(frozen=True)
class Trial:
    """What a few steps with one batch size have shown.

    Attributes:
        size: Samples of a batch.
        fits: Whether all steps went through within the limit, on all ranks.
        peak: Share of the limit that was taken; None if memory ran out before that was known.
        rest: Share that is taken without a batch.
        speed: Samples a second of one rank; 0 where memory ran out.
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
        initial: The batch size that the loader had.
        largest: The largest size that fits; 0 if none does.
        fastest: Of the sizes that were timed, that with most samples a second; 0 if none was.
        trials: All of them, in order.
    """

    initial: int
    largest: int
    fastest: int
    trials: list[Trial] = field(default_factory=list)

    def chosen(self, mode: str) -> int:
        """Return the size that ``mode`` asks for.

        Raises:
            MemoryError: If none fits.
        """
        if not self.largest:
            raise MemoryError(
                "Not even a batch of one sample fits into memory. What may help: "
                "lo.ActivationCheckpointing, precision='bf16-mixed', shorter or smaller samples."
            )
        return self.largest if mode == "largest" else self.fastest

    def report(self) -> Report:
        """Return one row a trial."""
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
    """Search the largest size that fits.

    Two sizes show what a sample takes; then the line through all peaks foretells the largest, and
    the next trials close in on it from both sides. Where it foretells nothing (memory of no known
    limit), sizes double until one fails, and the gap is halved.

    Args:
        run: Tries a size.
        initial: The first size to try.
        most: The largest size to try.
        target: Share of the limit that a size may take.
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
    """Return the size with most samples a second.

    The first round goes down from the largest, its half, its quarter and so on, and ends at a size
    that is much slower than the best so far: what costs the same each step weighs more the smaller
    the size. The best of them has its neighbours timed too, half a step away. Then come short
    rounds of the best few, in another order each time. Sizes are compared by their mean over rounds
    that all of them took part in, so that a slow minute of the machine counts for none of them. Of
    those as fast as the best, but for noise, the smallest is the one.

    Args:
        run: Times a size.
        largest: The largest that fits, at least 1.

    Returns:
        The size, and one trial a size, with the mean of its speeds.
    """
    order = random.Random(0)  # the same on all ranks
    trials: dict[int, list[Trial]] = {}

    def speed(size: int) -> float:
        return statistics.fmean(trial.speed for trial in trials[size])

    # Not one sample alone, of which BatchNorm makes no statistics.
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
    if guess <= good:  # further than foretold: just beyond it is where it ends
        return min(bad - 1, max(good + 1, math.ceil(good / (1 - TOLERANCE))))
    near = math.ceil(bad * (1 - TOLERANCE))
    if bad <= most and guess > 1.1 * bad:  # something else than the foretold limit: halve the gap
        return max(good + 1, math.isqrt(max(1, good) * bad)) if bad - good > 1 else good
    if bad <= most and guess >= near:  # not quite as far as foretold: just below what failed
        return near if good < near < bad else (good + bad) // 2
    # From few points a line must not be followed too far.
    return min(guess, most, 16 * max(fit.points))
