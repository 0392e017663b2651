"""Searches for the largest batch size that fits, and for the fastest, by trials."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from lightning_opt.core.output.report import Report

MAX_TRIALS = 12
"""Maximum number of trials in a search for the largest size."""

MIN_SPEED_SHARE = 0.6
"""Halving stops at a size with less than this share of the best speed."""

FINALISTS_BY_ROUND = (3, 3, 3, 2)
"""Number of the best sizes that are timed in each round after the first."""

SIZE_TOLERANCE = 0.03
"""The search ends if the largest untried size exceeds the found size by at most this share."""

SPEED_TOLERANCE = 0.01
"""Sizes whose speeds differ by at most this share count as equally fast."""


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
                "samples per second": round(trial.speed, 1) if trial.speed else None,
            }
            for trial in sorted(self.trials, key=lambda trial: trial.size)
        ]
        notes = [f"Largest that fits: {self.largest}."]
        if self.fastest:
            notes = [f"{notes[0]} Most samples per second: {self.fastest}."]
        return Report("Batch sizes", rows, notes)


def find_largest(
    run: Callable[[int], Trial],
    initial: int,
    max_size: int,
    *,
    target: float,
    round_down: Callable[[int], int] = int,
) -> tuple[int, list[Trial]]:
    """Return the largest size that fits, 0 if none does, and all trials.

    The first two sizes give the memory per sample. A line through all peaks then predicts the
    largest size, and the next trials approach it from both sides. If no limit is known, nothing is
    predicted: sizes double until one fails, and then the gap is halved.

    Args:
        run: Tries a size.
        initial: The first size to try.
        max_size: The largest size to try.
        target: The share of memory to use.
        round_down: Returns the largest allowed size up to the given one.
    """
    trials: dict[int, Trial] = {}
    fitting, failing = 0, max_size + 1
    size = max(1, min(initial, max_size))
    while len(trials) < MAX_TRIALS:
        trial = trials[size] = run(size)
        if trial.fits:
            fitting = max(fitting, size)
        else:
            failing = min(failing, size)
        largest_untried = round_down(failing - 1)
        if largest_untried * (1 - SIZE_TOLERANCE) <= round_down(fitting):
            break
        size = round_down(_next_size(fitting, failing, max_size, trials, target))
        if size <= fitting:
            size = largest_untried
    return round_down(fitting), list(trials.values())


def _next_size(
    fitting: int, failing: int, max_size: int, trials: Mapping[int, Trial], target: float
) -> int:
    """Return a size between the largest that fits and the smallest that does not."""
    peaks = {trial.size: trial.peak for trial in trials.values() if trial.peak is not None}
    predicted, has_failed = None, failing <= max_size
    if len(peaks) > 1 or (peaks and has_failed):
        predicted = _predict(peaks, min(trials[size].baseline for size in peaks), target)
    if predicted is not None and not (has_failed and predicted > 1.1 * failing):
        size = max(predicted, math.ceil(fitting / (1 - SIZE_TOLERANCE)))
        if has_failed:
            size = min(size, math.ceil(failing * (1 - SIZE_TOLERANCE)))
        size = min(size, max_size, 16 * max(peaks))  # few points predict distant sizes poorly
    elif has_failed:  # no prediction, or far above a failed size
        size = math.isqrt(fitting * failing) if fitting else failing // 4
    else:
        size = min(max_size, 2 * fitting)
    return size if fitting < size < failing else (fitting + failing) // 2


def _predict(peaks: Mapping[int, float], baseline: float, target: float) -> int | None:
    """Return the size at which a line through the peaks reaches ``target``; None without a slope.

    For a single peak, or if noise exceeds the slope, the line runs from ``baseline`` through the
    peak of the largest size.
    """
    largest, slope = max(peaks), 0.0
    if len(peaks) > 1:
        slope, _ = statistics.linear_regression(list(peaks), list(peaks.values()))
    if slope <= 0:
        slope = (peaks[largest] - baseline) / largest
    if slope <= 0:
        return None
    # Extrapolate from the largest measured size, to keep the distance short.
    return max(0, int(largest + (target - peaks[largest]) / slope + 1e-9))


def find_fastest(
    run: Callable[[int], Trial], largest: int, round_down: Callable[[int], int] = int
) -> tuple[int, list[Trial]]:
    """Return the size with the most samples per second, and one trial per size with its mean speed.

    The first round times the largest size, its half, its quarter and so on. It ends at a size that
    is much slower than the best so far, because smaller sizes are slower still. Then the best
    size's neighbours are timed: the sizes smaller and larger by a factor of the square root of 2.
    Then short rounds time the best few sizes, each round in another order. Every round times all
    remaining sizes, so a temporary slowdown affects all of them. Of equally fast sizes the smallest
    is returned.
    """
    generator = random.Random(0)  # the same order on all ranks
    trials: dict[int, list[Trial]] = {}

    def speed(size: int) -> float:
        return statistics.fmean(trial.speed for trial in trials[size])

    halves = [round_down(largest >> halvings) for halvings in range(largest.bit_length())]
    for size in dict.fromkeys(halves):
        if size > 1 or largest == 1:  # BatchNorm cannot train on one sample
            trials[size] = [run(size)]
            if speed(size) < MIN_SPEED_SHARE * max(map(speed, trials)):
                break
    best = max(trials, key=speed)
    for factor in (math.sqrt(0.5), math.sqrt(2)):
        neighbour = round_down(round(best * factor))
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
