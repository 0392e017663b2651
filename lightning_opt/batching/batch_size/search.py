"""The largest and the fastest batch size, from as few trials as possible."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from lightning_opt.batching.batch_size.memory_fit import MemoryFit
from lightning_opt.core.report import Report

TRIALS = 12
"""What a search may take."""

TOLERANCE = 0.03
"""A largest size this close to one that does not fit is good enough."""

SAME = 0.02
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
    """What a search has found.

    Attributes:
        initial: The batch size that the loader had.
        largest: The largest size that fits; 0 if none does.
        fastest: Of the sizes that were tried and fit, that with most samples a second.
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
        notes = [f"Largest that fits: {self.largest}. Most samples a second: {self.fastest}."]
        return Report("Batch sizes", rows, notes)


def search(
    run: Callable[[int], Trial],
    initial: int,
    most: int,
    *,
    target: float,
    speed: bool,
    trials: int = TRIALS,
) -> FoundSizes:
    """Search the largest size that fits, and if asked to, the one with most samples a second.

    Two sizes show what a sample takes; then the line through all peaks foretells the largest, and
    the next trials close in on it from both sides. Where it foretells nothing (memory of no known
    limit), sizes double until one fails, and the gap is halved.

    Args:
        run: Tries a size.
        initial: The first size to try.
        most: The largest size to try.
        target: Share of the limit that a size may take.
        speed: Whether to look for the fastest size too, with the trials that are left.
        trials: How many there may be.
    """
    done: dict[int, Trial] = {}
    fit = MemoryFit()
    good, bad = 0, most + 1
    size = max(1, min(initial, most))
    # The fastest is often among small sizes, so some trials are left for them.
    for_largest = trials - (4 if speed else 0)
    while len(done) < for_largest:
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
    while speed and len(done) < trials:
        another = _faster(done)
        if another is None:
            break
        done[another] = run(another)
    fitting = [trial for trial in done.values() if trial.fits]
    best = max((trial.speed for trial in fitting), default=0.0)
    fastest = min((t.size for t in fitting if t.speed >= (1 - SAME) * best), default=0)
    return FoundSizes(initial, good, fastest, list(done.values()))


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


def _faster(done: dict[int, Trial]) -> int | None:
    """Return a size to try beside the fastest so far; None where that is no use."""
    fitting = sorted(size for size, trial in done.items() if trial.fits)
    if not fitting:
        return None
    place = max(range(len(fitting)), key=lambda n: done[fitting[n]].speed)
    best = fitting[place]
    below = fitting[place - 1] if place else max(1, best // 4)
    above = fitting[place + 1] if place + 1 < len(fitting) else best
    gaps = [(best / below, below, best), (above / best, best, above)]
    for ratio, low, high in sorted(gaps, reverse=True):
        middle = math.isqrt(low * high)
        if place == 0 and low == below:
            middle = max(1, best // 2)
        if ratio > 1.3 and middle not in done:
            return middle
    return None
