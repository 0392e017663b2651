"""When to clean up: at a threshold, with hysteresis and a cooldown, while cleanups free memory."""

from __future__ import annotations

import math
from dataclasses import dataclass

GAIN = 0.25
"""A cleanup is of use if it frees this share of what lies between threshold and release."""

GIVE_UP_AFTER = 3
"""After so many cleanups in a row that were of no use there are no more."""


@dataclass
class Pressure:
    """Decides for one limit. A working set that is simply large is not garbage.

    A cleanup that was of no use raises the level of the next one to halfway between the level it
    left and full, and after three such in a row there are no more. Falling below ``release`` puts
    everything back.

    Args:
        threshold: Share of the limit from which to clean.
        release: Share below which all is well again.
        cooldown: Steps after a cleanup in which the next one waits until half of what lies above
            the threshold is gone.
    """

    threshold: float
    release: float
    cooldown: int

    def __post_init__(self) -> None:
        self._relax()
        self._last = -math.inf

    def _relax(self) -> None:
        self._level = self.threshold
        self._useless = 0

    def level(self, step: int) -> float:
        """Return the share from which to clean at this step."""
        rested = step - self._last >= self.cooldown
        return self._level if rested else max(self._level, (1 + self.threshold) / 2)

    def wants(self, step: int, fraction: float) -> bool:
        """Return whether to clean at this step, with this share of the limit used."""
        if fraction < self.release:
            self._relax()
        return fraction >= self.level(step)

    def cleaned(self, step: int, fraction: float, freed: float) -> bool:
        """Take note of a cleanup, and return whether it was of use.

        Args:
            step: When.
            fraction: Share of the limit that is used after it.
            freed: Share of the limit that it freed.
        """
        self._last = step
        if freed >= GAIN * (self.threshold - self.release) or fraction < self.release:
            self._relax()
            return True
        self._useless += 1
        self._level = fraction + (1 - fraction) / 2 if self._useless < GIVE_UP_AFTER else math.inf
        return False
