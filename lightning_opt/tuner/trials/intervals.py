"""A ratio of times from blocks that took turns, and how well it is known."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

# Quantiles of Student's t at 0.95 (both sides 0.9) by degrees of freedom.
T_95 = (6.314, 2.920, 2.353, 2.132, 2.015, 1.943, 1.895, 1.860, 1.833, 1.812)
Z_95 = 1.645


@dataclass(frozen=True)
class Interval:
    """An estimate and its bounds at 90%."""

    value: float
    low: float
    high: float

    @property
    def width(self) -> float:
        """Half the interval, as a share of the estimate."""
        return (self.high - self.low) / 2 / self.value


def ratio_interval(seconds: Sequence[float], reference: Sequence[float]) -> Interval:
    """Return the ratio of two series of blocks that were timed in turn.

    The median of the logarithms, which one disturbed block does not move, with Student's interval
    from the median deviation; a few blocks have a wide one.

    Args:
        seconds: Of each block.
        reference: Of the baseline's block of the same round.
    """
    logs = [math.log(own / other) for own, other in zip(seconds, reference, strict=True)]
    centre = statistics.median(logs)
    if len(logs) < 2:
        return Interval(math.exp(centre), 0.0, math.inf)
    spread = 1.4826 * statistics.median(abs(value - centre) for value in logs)
    # Half of a few values may be close by chance; their range does not lie so easily.
    spread = max(spread, (max(logs) - min(logs)) / 4)
    freedom = len(logs) - 2
    quantile = T_95[freedom] if freedom < len(T_95) else Z_95
    half = quantile * 1.2533 * spread / math.sqrt(len(logs))  # a median's error is 1.25 of a mean's
    return Interval(math.exp(centre), math.exp(centre - half), math.exp(centre + half))
