"""From many elements to few: how a sparse compressor is approached.

References:
    Lin, Han, Mao, Wang and Dally (2018), *Deep Gradient Compression: Reducing the Communication
    Bandwidth for Distributed Training*.
"""

from __future__ import annotations

import math

from lightning_opt.strategies.compressors import Compressor, TopK

FACTOR = 4
"""Each stage sends this many times fewer elements: 25%, 6.2%, 1.6%, 0.4%, ..."""

SHARE = 1 / 2
"""Of the run that a ramp takes unless the user says otherwise."""

LONGEST = 30
"""Times that an element may wait, which a ramp need not exceed: 3,000 steps for 1%."""

UNKNOWN = 10
"""The same for a run of unknown length: 1,000 steps for 1%."""


class Ramp:
    """The compressors to go through before one that sends few elements.

    Args:
        final: Where it ends.
        steps: How long it takes.

    Attributes:
        stages: What comes before, from the gentlest on; only :class:`TopK` by ratio has any.

    Example:
        >>> Ramp(TopK(0.05), 300).stages
        [TopK(ratio=0.25, k=None), TopK(ratio=0.0625, k=None)]
    """

    def __init__(self, final: Compressor, steps: int) -> None:
        self.final = final
        self.steps = steps
        self.stages: list[Compressor] = []
        if isinstance(final, TopK) and final.k is None:
            ratio = 1.0 / FACTOR
            while ratio > final.ratio:
                self.stages.append(TopK(ratio))
                ratio /= FACTOR

    def at(self, step: int) -> Compressor:
        """Return which compressor is due at a step of the ramp (the first is 0)."""
        if step >= self.steps or not self.stages:
            return self.final
        return self.stages[step * len(self.stages) // self.steps]


def default_steps(compressor: Compressor, planned: float = math.inf) -> int:
    """Return how long a ramp should take.

    Args:
        compressor: Where it ends.
        planned: Optimizer steps of the whole run; infinite or below 0 if nobody knows.
    """
    if not isinstance(compressor, TopK) or compressor.k is not None:
        return 0
    wait = 1.0 / compressor.ratio  # steps after which every element could have been sent once
    if not 0 <= planned < math.inf:
        return round(UNKNOWN * wait)
    return round(min(SHARE * planned, LONGEST * wait))
