"""Durations in bounded memory, and the throughput computed from them."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import frexp, ldexp

_CELLS = 256
"""Twice the number of cells between adjacent powers of two. A cell is 0.4 to 0.8% wide."""


class Durations:
    """Count, total and quantiles of any number of durations in seconds.

    Durations are counted in cells that are less than 1% wide, so a quantile is within 0.5% of the
    exact one. Between a nanosecond and a month there are only a few thousand cells.

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
        """Add one duration."""
        self.count += 1
        self.total += seconds
        # `frexp` is much faster than a logarithm. It would count 0 as 2 ms, so 0 is replaced.
        mantissa, exponent = frexp(seconds or 1e-99)
        cell = exponent * _CELLS + int(mantissa * _CELLS)
        cells = self._cells
        cells[cell] = cells.get(cell, 0) + 1

    @property
    def mean(self) -> float:
        """The mean; 0.0 if there are no durations."""
        return self.total / self.count if self.count else 0.0

    def quantile(self, q: float) -> float:
        """Return the quantile at ``q`` (0 to 1); 0.0 if there are no durations."""
        seen = 0
        for cell in sorted(self._cells):
            seen += self._cells[cell]
            if seen >= q * self.count:
                exponent, part = divmod(cell, _CELLS)
                return ldexp((part + 0.5) / _CELLS, exponent)
        return 0.0


@dataclass
class Work:
    """Durations of steps, and the total number of samples and tokens in these steps."""

    steps: Durations = field(default_factory=Durations)
    samples: int = 0
    tokens: int = 0

    def add(self, seconds: float, samples: int, tokens: int) -> None:
        self.steps.add(seconds)
        self.samples += samples
        self.tokens += tokens

    def rates(self, flops: float | None = None, peak: float | None = None) -> dict[str, float]:
        """Return the rates per second by logged key. Unknown rates are omitted."""
        seconds = self.steps.total
        amounts = {"samples": self.samples, "tokens": self.tokens, "flops": flops}
        found = {f"{name}_per_second": n / seconds for name, n in amounts.items() if n and seconds}
        if peak and "flops_per_second" in found:
            found["mfu"] = found["flops_per_second"] / peak
        return found
