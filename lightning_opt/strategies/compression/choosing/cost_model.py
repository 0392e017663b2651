"""Which way to send gradients over a given network: pure arithmetic on measured numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

MARGIN = 0.1
"""A harsher way to send must save this share of a step, or the gentler one is kept."""

LATE_MARGIN = 0.25
"""The same for one that sends most elements late, which costs steps, about one in ten."""


@dataclass(frozen=True)
class Line:
    """Seconds that a thing takes: some always, and some for each byte or element."""

    fixed: float
    slope: float

    def __call__(self, amount: float) -> float:
        """Return the seconds that an amount takes."""
        return self.fixed + self.slope * amount


def fit_line(samples: Sequence[tuple[float, float]]) -> Line:
    """Fit seconds to amounts, with neither part below 0.

    Squared errors count in inverse proportion to the seconds. Equal weights would leave the fixed
    part to the noise of the largest samples, relative errors the slope to the smallest ones, which
    a network's burst may have let through at once.

    Args:
        samples: Pairs of amount and seconds, at least one; of several, not all of one amount.
    """
    amounts, seconds = np.array(samples, dtype=float).T
    weights = 1.0 / np.maximum(seconds, 1e-9)
    x, y = np.average(amounts, weights=weights), np.average(seconds, weights=weights)
    spread = (weights * (amounts - x) ** 2).sum()
    slope = (weights * (amounts - x) * (seconds - y)).sum() / spread if spread > 0 else 0.0
    if slope <= 0:
        return Line(float(y), 0.0)
    if y < slope * x:
        return Line(0.0, float((weights * amounts * seconds).sum() / (weights * amounts**2).sum()))
    return Line(float(y - slope * x), float(slope))


@dataclass(frozen=True)
class Option:
    """One way to send the buckets of a model. The sequences have one entry a bucket.

    Args:
        name: For people.
        sent: Bytes that a rank sends.
        before: Seconds of processor time until a bucket can be launched.
        after: Seconds of processor time when it has arrived.
        rounds: Collectives that a bucket takes.
        margin: Share of a step that it must save.
    """

    name: str
    sent: Sequence[int]
    before: Sequence[float]
    after: Sequence[float]
    rounds: int = 1
    margin: float = MARGIN


def exchange_seconds(ready: Sequence[float], option: Option, link: Line) -> float:
    """Return by how much the exchange makes a step longer.

    Buckets queue for the network while the backward pass goes on, so what travels early may cost
    nothing. The processor's work is never taken to be hidden.

    Args:
        ready: When each bucket's gradient is there, in seconds; ascending.
        option: How they are sent.
        link: Seconds of a collective by the bytes that a rank sends.
    """
    hook = work = wire = landed = 0.0
    for at, sent, before, after in zip(
        ready, option.sent, option.before, option.after, strict=True
    ):
        hook += before
        wire = max(wire, at + hook) + option.rounds * link.fixed + link.slope * sent
        landed = max(landed, wire) + after
        work += before + after
    return max(landed, ready[-1] + work) - ready[-1]


def gentlest_that_pays(seconds: Sequence[float], margins: Sequence[float]) -> int:
    """Return the first option that no later one beats by more than that one's margin.

    Args:
        seconds: What a step takes with each, the gentlest first.
        margins: Shares of the gentler one's time.
    """
    later = list(zip(seconds, margins, strict=True))
    return next(
        index
        for index, own in enumerate(seconds)
        if all(own * (1.0 - margin) <= other for other, margin in later[index + 1 :])
    )
