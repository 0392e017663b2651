"""When to clean up: at a threshold, with hysteresis and a cooldown, and not where it is no use."""

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
        cooldown: Steps from one cleanup to the next. Only if the last one was of use, and half of
            what was left is gone again, it is not waited for.
    """

    threshold: float
    release: float
    cooldown: int

    def __post_init__(self) -> None:
        self._relax()
        self._last: int | None = None

    def _relax(self) -> None:
        self.level = self.threshold
        self.useless = 0

    @property
    def gave_up(self) -> bool:
        """Whether there are no more cleanups until use falls below ``release``."""
        return math.isinf(self.level)

    @property
    def urgent(self) -> float:
        """Share from which the cooldown is not waited for, as long as cleaning is of use."""
        return (1 + self.threshold) / 2 if self.useless == 0 else math.inf

    def rests_until(self, fraction: float) -> float:
        """Return the step at which a cooldown ends that alone holds a cleanup back."""
        if self._last is None or fraction < self.level:
            return math.inf
        return self._last + self.cooldown

    def wants(self, step: int, fraction: float) -> bool:
        """Return whether to clean at this step, with this share of the limit used."""
        if fraction < self.release:
            self._relax()
        if fraction < self.level:
            return False
        if self._last is None or step - self._last >= self.cooldown:
            return True
        return fraction >= self.urgent

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
        self.useless += 1
        self.level = fraction + (1 - fraction) / 2 if self.useless < GIVE_UP_AFTER else math.inf
        return False
