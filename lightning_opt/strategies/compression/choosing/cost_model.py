"""Which way to send gradients over a given network: pure arithmetic on measured numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

MARGIN = 0.1
"""A harsher way to send must save this share of a step, or the gentler one is kept."""

LATE_MARGIN = 0.25
"""The same for one that sends most elements late, which costs steps, about one in ten."""

LATE_MARGIN_FOR_ADAM = 0.5
"""The same with an optimizer whose second moments take what comes late all at once for noise."""

BAND = 0.05
"""How far a running choice may be from this margin before it is changed."""

UNNOTICED = 0.005
"""Share of a step by which a prediction may grow unnoticed."""

HIDING = 0.7
"""Share of the backward pass behind which an exchange is trusted to hide."""


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
    weights = [1.0 / max(seconds, 1e-9) for _, seconds in samples]
    total = sum(weights)
    x = sum(w * amount for w, (amount, _) in zip(weights, samples, strict=True)) / total
    y = sum(w * seconds for w, (_, seconds) in zip(weights, samples, strict=True)) / total
    spread = covariance = square = product = 0.0
    for w, (amount, seconds) in zip(weights, samples, strict=True):
        spread += w * (amount - x) ** 2
        covariance += w * (amount - x) * (seconds - y)
        square += w * amount**2
        product += w * amount * seconds
    slope = covariance / spread if spread > 0 else 0.0
    if slope <= 0:
        return Line(y, 0.0)
    if y < slope * x:
        return Line(0.0, product / square)
    return Line(y - slope * x, slope)


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


@dataclass(frozen=True)
class Choice:
    """What was chosen, and why.

    Attributes:
        best: Index of the option for the model as a whole.
        plan: Index of the option of each bucket: ``best``, or a gentler one where that costs
            nothing.
        seconds: Predicted seconds of a step, one number an option.
        planned: Predicted seconds of a step with the plan.
    """

    best: int
    plan: list[int]
    seconds: list[float]
    planned: float


def exchange_seconds(
    ready: Sequence[float], plan: Sequence[int], options: Sequence[Option], link: Line
) -> float:
    """Return by how much the exchange makes a step longer.

    Buckets queue for the network while the backward pass goes on, so what travels early may cost
    nothing. The processor's work is never taken to be hidden.

    Args:
        ready: When each bucket's gradient is there, in seconds; ascending.
        plan: Index of each bucket's option.
        options: To choose from.
        link: Seconds of a collective by the bytes that a rank sends.
    """
    hook = work = wire = landed = 0.0
    for bucket, (at, index) in enumerate(zip(ready, plan, strict=True)):
        option = options[index]
        hook += option.before[bucket]
        travel = option.rounds * link.fixed + link.slope * option.sent[bucket]
        wire = max(wire, at + hook) + travel
        landed = max(landed, wire) + option.after[bucket]
        work += option.before[bucket] + option.after[bucket]
    return max(landed, ready[-1] + work) - ready[-1]


def slowed(link: Line, factor: float) -> Line:
    """Return a network that takes ``factor`` times as long."""
    return Line(link.fixed * factor, link.slope * factor)


def calibrate(ready: Sequence[float], dense: Option, link: Line, seen: float) -> float:
    """Return how much of its predicted time a network has turned out to take, at most 1.

    Args:
        ready: See :func:`exchange_seconds`.
        dense: An option that was in use.
        link: What was measured of the network by itself.
        seen: By how much the exchange then made a step longer.
    """
    low, high = 0.0, 1.0
    plan = [0] * len(ready)
    if exchange_seconds(ready, plan, [dense], link) <= seen:
        return 1.0
    for _ in range(30):
        middle = (low + high) / 2
        if exchange_seconds(ready, plan, [dense], slowed(link, middle)) <= seen:
            low = middle
        else:
            high = middle
    return high


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


def choose(
    ready: Sequence[float],
    options: Sequence[Option],
    link: Line,
    *,
    compute: float,
    current: int | None = None,
) -> Choice:
    """Choose how to send each bucket.

    Args:
        ready: See :func:`exchange_seconds`.
        options: To choose from, the gentlest for the gradients first.
        link: See :func:`exchange_seconds`.
        compute: Seconds of a step without an exchange.
        current: The option in use; it is left only when that clearly pays.
    """
    buckets = len(ready)
    seconds = [
        compute + exchange_seconds(ready, [index] * buckets, options, link)
        for index in range(len(options))
    ]
    if current is None:
        best = gentlest_that_pays(seconds, [option.margin for option in options])
    else:
        gentle, harsh = (
            gentlest_that_pays(seconds, [option.margin + side for option in options])
            for side in (BAND, -BAND)
        )
        best = min(max(current, gentle), harsh)
    plan = _soften(ready, best, options, link, UNNOTICED * seconds[best])
    return Choice(best, plan, seconds, compute + exchange_seconds(ready, plan, options, link))


def choose_stages(
    ready: Sequence[float],
    options: Sequence[Option],
    stages: Sequence[Option],
    link: Line,
    compute: float,
) -> list[int]:
    """Choose what to send in each stage of the ramp that leads to the last option.

    A stage sends many times more than what it leads to. Where the network gives so much less for
    it, or there are so many ranks, that a gentler option is as fast, that one takes its place.

    Args:
        ready: See :func:`exchange_seconds`.
        options: To choose from, the gentlest for the gradients first.
        stages: Gentler forms of the last of them.
        link: See :func:`exchange_seconds`.
        compute: Seconds of a step without an exchange.

    Returns:
        For each stage an index into ``[*options, *stages]``.
    """
    chosen = []
    for place, stage in enumerate(stages):
        ways = [*options[:-1], stage]
        seconds = [
            compute + exchange_seconds(ready, [index] * len(ready), ways, link)
            for index in range(len(ways))
        ]
        best = gentlest_that_pays(seconds, [way.margin for way in ways])
        chosen.append(best if best < len(ways) - 1 else len(options) + place)
    return chosen


def _soften(
    ready: Sequence[float], best: int, options: Sequence[Option], link: Line, unnoticed: float
) -> list[int]:
    """Send each bucket by the gentlest option that makes a step no longer.

    What a gentler option takes on the network has to be hidden behind the backward pass, not behind
    the work of compressing, which is known less well.
    """
    idle = [0.0] * len(ready)
    wires = [Option(option.name, option.sent, idle, idle, option.rounds) for option in options]
    short = [HIDING * at for at in ready]
    plan = [best] * len(ready)

    def costs(plan: Sequence[int]) -> tuple[float, float]:
        return (
            exchange_seconds(ready, plan, options, link),
            exchange_seconds(short, plan, wires, link),
        )

    most, most_wired = (cost + unnoticed for cost in costs(plan))
    for bucket in range(len(ready)):
        for gentler in range(best):
            softened = [*plan[:bucket], gentler, *plan[bucket + 1 :]]
            cost, wired = costs(softened)
            if cost <= most and wired <= most_wired:
                plan = softened
                break
    return plan
