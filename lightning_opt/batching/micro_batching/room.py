"""Whether a larger micro-batch would fit: what a sample takes, and what is left."""

from __future__ import annotations

from collections.abc import Callable

import torch

from lightning_opt.core.memory import MemoryLimits, Usage, live_bytes

MARGIN = 1.25
"""A backward pass holds this much of what a forward pass has left behind, at its peak."""


class Room:
    """Measures one forward pass, and foretells that of more samples.

    What samples take grows in proportion to their number, on top of what is there anyway. So what
    is needed beyond what was in use at the end of the forward pass follows from one measurement.

    Args:
        device: The device that trains.
        safety: Share of each limit to be left free.
    """

    def __init__(self, device: torch.device, safety: float) -> None:
        self._device, self._safety = device, safety
        self._limits = MemoryLimits(device, host=device.type == "cpu")
        self.forget()

    def forget(self) -> None:
        """Forget the measurement."""
        self._sample: float | None = None
        self._usages: list[Usage] = []

    def measure(self, samples: int) -> Callable[[], None]:
        """Begin to measure a forward pass; what is returned ends it."""
        before = live_bytes(self._device)

        def end() -> None:
            self._sample = max(0, live_bytes(self._device) - before) / samples
            self._usages = self._limits.read()

        return end

    def holds(self, more: int) -> bool:
        """Return whether a micro-batch larger by ``more`` samples would fit."""
        if self._sample is None:
            return False
        extra = MARGIN * self._sample * more
        return all(usage.used + extra <= (1 - self._safety) * usage.total for usage in self._usages)
