"""Counts, totals and quantiles of durations in bounded memory."""

from __future__ import annotations

from math import frexp, ldexp

_CELLS = 256
"""Cells from one power of two to the next are half as many: each is 0.4 to 0.8% wide."""


class Durations:
    """Count, total and quantiles of numbers of seconds, however many there are.

    Durations are counted in cells of less than 1%, so a quantile is within 0.5% of a true one, and
    there are at most some thousand cells between a nanosecond and a month.

    References:
        C. Masson, J. Rim, H. Lee, *DDSketch: A Fast and Fully-Mergeable Quantile Sketch with
        Relative-Error Guarantees*, 2019 (the variant with cells linear between powers of two).

    Example:
        >>> durations = Durations()
        >>> for milliseconds in (1, 2, 3, 4, 100):
        ...     durations.add(milliseconds / 1e3)
        >>> durations.count, round(durations.total, 3), round(durations.quantile(0.5), 4)
        (5, 0.11, 0.003)
    """

    __slots__ = ("_cells", "count", "total")

    def __init__(self) -> None:
        self.count = 0
        self.total = 0.0
        self._cells: dict[int, int] = {}

    def add(self, seconds: float) -> None:
        """Count one duration."""
        self.count += 1
        self.total += seconds
        mantissa, exponent = frexp(seconds)  # many times faster than a logarithm
        cell = exponent * _CELLS + int(mantissa * _CELLS)
        cells = self._cells
        cells[cell] = cells.get(cell, 0) + 1

    @property
    def mean(self) -> float:
        """The mean, or 0.0 of none."""
        return self.total / self.count if self.count else 0.0

    def quantile(self, q: float) -> float:
        """Return what a share ``q`` (0 to 1) of the durations do not exceed, or 0.0 of none."""
        seen = 0
        for cell in sorted(self._cells):
            seen += self._cells[cell]
            if seen >= q * self.count:
                exponent, part = divmod(cell, _CELLS)
                return ldexp((part + 0.5) / _CELLS, exponent)
        return 0.0
