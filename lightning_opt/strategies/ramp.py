"""From many elements to few: how a sparse compressor is approached.

References:
    Lin, Han, Mao, Wang and Dally (2018), *Deep Gradient Compression: Reducing the Communication
    Bandwidth for Distributed Training*.
"""

from __future__ import annotations

from collections.abc import Sequence

from lightning_opt.strategies.compressors import Compressor, TopK

FACTOR = 4
"""Each stage sends this many times fewer elements: 25%, 6.2%, 1.6%, 0.4%, ..."""

GENTLE_BELOW = 0.01
"""Ratios that are reached by a ramp unless the user says otherwise."""

DEFAULT_STEPS = 500


def default_steps(compressor: Compressor) -> int:
    """Return how long a ramp should take: none unless less than 1% is sent."""
    gentle = isinstance(compressor, TopK) and compressor.k is None
    return DEFAULT_STEPS if gentle and compressor.ratio < GENTLE_BELOW else 0  # type: ignore[attr-defined]


def stages_to(compressor: Compressor) -> list[Compressor]:
    """Return the compressors to go through before ``compressor``, from the gentlest on.

    Only :class:`TopK` by ratio has any.

    Example:
        >>> stages_to(TopK(0.01))
        [TopK(ratio=0.25, k=None, values='int8'), TopK(ratio=0.0625, k=None, values='int8'),
         TopK(ratio=0.015625, k=None, values='int8')]
    """
    stages: list[Compressor] = []
    if isinstance(compressor, TopK) and compressor.k is None:
        ratio = 1.0 / FACTOR
        while ratio > compressor.ratio:
            stages.append(TopK(ratio, values=compressor.values))
            ratio /= FACTOR
    return stages


def stage_at(step: int, stages: Sequence[Compressor], final: Compressor, steps: int) -> Compressor:
    """Return which compressor is due at ``step`` of a ramp (the first is 0) of ``steps`` in all."""
    if step >= steps or not stages:
        return final
    return stages[step * len(stages) // steps]
