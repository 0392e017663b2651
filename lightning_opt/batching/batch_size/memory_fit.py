"""What batches of other sizes would take: a line through what was measured, and a step along it."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field

SHRINK, BELOW, ABOVE = 0.8, 0.1, 0.05
"""What a size is multiplied with that took too much, and how far from the target sizes change."""


@dataclass
class MemoryFit:
    """The peak use of memory as ``a + b * size``, in shares of the limit.

    With one size measured the line goes through ``rest``, what is in use without a batch. With more
    it is that of least squares, unless it falls: then noise is larger than the slope.

    Attributes:
        points: From size to the latest peak of it.
        rest: In use while no batch is there.
    """

    points: dict[int, float] = field(default_factory=dict)
    rest: float = 0.0

    def add(self, size: int, peak: float, rest: float | None = None) -> None:
        """Take note of a measurement."""
        self.points[size] = peak
        if rest is not None:
            self.rest = min(rest, peak)

    def line(self) -> tuple[float, float] | None:
        """Return ``a`` and ``b``, or None if nothing was measured."""
        if not self.points:
            return None
        if len(self.points) > 1:
            n = len(self.points)
            mean = sum(self.points) / n
            level = sum(self.points.values()) / n
            spread = sum((size - mean) ** 2 for size in self.points)
            slope = sum((s - mean) * (p - level) for s, p in self.points.items()) / spread
            if slope > 0:
                return level - slope * mean, slope
        size = max(self.points)
        return self.rest, (self.points[size] - self.rest) / size

    def largest(self, share: float) -> int | None:
        """Return the largest size whose peak stays below ``share``; None if there is no bound."""
        line = self.line()
        if line is None or line[1] <= 0:
            return None
        # From the largest that was measured, so that its error is not that of the whole line.
        size = max(self.points)
        return max(0, int(size + (share - self.points[size]) / line[1] + 1e-9))


def next_size(
    size: int,
    peak: float,
    fit: MemoryFit,
    *,
    target: float,
    grow: float,
    most: int,
    allowed: Sequence[int] = (),
) -> int:
    """Return the size for the next epoch.

    Nothing changes from ``BELOW`` under the target to ``ABOVE`` over it. Under that, it grows by
    ``grow`` as far as the fit says that ``target`` is not passed, so that what has grown need not
    shrink again; over it, it shrinks by ``SHRINK``, or to ``target``, whichever is smaller.

    Args:
        size: The present one.
        peak: The share of the limit that it took.
        fit: Of all that was measured, this size included.
        target: The share aimed at.
        grow: Above 1.
        most: The largest size.
        allowed: If given, the only sizes there are, in ascending order.
    """
    room = fit.largest(target)
    if peak > min(1.0, target + ABOVE):
        wanted = int(size * SHRINK) if room is None else min(int(size * SHRINK), room)
        wanted = max(1, min(wanted, size - 1, most))
        return _down_to(allowed, wanted)
    most = min(most, most if room is None else room)
    if peak >= target - BELOW or most <= size:
        return size
    wanted = min(most, max(size + 1, int(size * grow)))
    if allowed:
        above = bisect_right(allowed, size)
        if above < len(allowed) and allowed[above] <= most:
            return max(allowed[above], _down_to(allowed, wanted))
        return size
    return wanted


def _down_to(allowed: Sequence[int], wanted: int) -> int:
    if not allowed:
        return wanted
    return allowed[max(0, bisect_right(allowed, wanted) - 1)]
