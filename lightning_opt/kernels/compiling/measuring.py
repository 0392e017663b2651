"""Times uncompiled and compiled steps, and keeps the faster code."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from lightning_opt.core.measure.timing import StepClock, wait_for
from lightning_opt.kernels.compiling.regions import Region

if TYPE_CHECKING:
    import lightning.pytorch as pl

# Number of untimed steps and of timed steps, first of uncompiled code and then of compiled code.
WARMUP_STEPS = 2
TIMED_STEPS = 5
# Assumed seconds of compilation, at least.
MIN_STARTUP_SECONDS = 20.0
# Maximum share of a step's time that compiling is expected to save.
MAX_SAVING_SHARE = 0.5
# Minimum share of a step's time that compiling must save.
MIN_SAVING_SHARE = 0.02


def can_save_time(eager_seconds: float, remaining_steps: float) -> bool:
    """Return whether the remaining steps could save more time than compilation takes.

    Args:
        eager_seconds: Seconds of an uncompiled step.
        remaining_steps: Number of remaining steps.
    """
    return eager_seconds * remaining_steps * MAX_SAVING_SHARE > MIN_STARTUP_SECONDS


class Comparison:
    """Times the first steps of a training uncompiled, then compiled, and keeps the faster code.

    All ranks decide by the mean of their times.

    Args:
        regions: The regions in their first mode; they are switched to uncompiled code.
        device: The device that computes the steps.

    Attributes:
        result: The decision in words; empty until it is made.
    """

    def __init__(self, regions: Sequence[Region], device: torch.device) -> None:
        self.regions = regions
        self.result = ""
        self._modes = [region.mode_index for region in regions]
        self._device = device
        self._clock = StepClock(device)
        self._steps = 0
        self._eager_seconds = 0.0
        self._run_eagerly()

    def _run_eagerly(self) -> None:
        for region in self.regions:
            region.use_mode(len(region.modes) - 1)

    def start_step(self) -> None:
        """Start the clock, after the device has finished earlier work."""
        if not self.result:
            wait_for(self._device)
            self._clock.start()

    def end_step(self, trainer: pl.Trainer) -> None:
        """End a step; after enough steps, continue with compiled code or decide."""
        if self.result:
            return
        wait_for(self._device)
        self._clock.stop()
        self._clock.pause()
        self._steps += 1
        if self._steps < WARMUP_STEPS + TIMED_STEPS:
            return
        median = statistics.median(self._clock.read(wait=True)[WARMUP_STEPS:])
        local_median = torch.tensor(median, device=trainer.strategy.root_device)
        median = float(trainer.strategy.reduce(local_median, reduce_op="mean"))
        self._steps = 0
        if self._eager_seconds:
            eager_ms = 1e3 * self._eager_seconds
            times = f"a step takes {1e3 * median:.3g} ms, and {eager_ms:.3g} ms uncompiled"
            is_faster = median <= (1 - MIN_SAVING_SHARE) * self._eager_seconds
            self.result = f"{'kept' if is_faster else 'reverted'}: {times}"
            if not is_faster:
                self._run_eagerly()
            return
        self._eager_seconds = median
        remaining_steps = _remaining_steps(trainer)
        if can_save_time(median, remaining_steps):
            for region, mode in zip(self.regions, self._modes, strict=True):
                region.use_mode(mode)
            return
        steps = f"{remaining_steps:.0f} steps of {1e3 * median:.3g} ms remain"
        self.result = f"not compiled: {steps}, which cannot save the time that compilation takes"


def _remaining_steps(trainer: pl.Trainer) -> float:
    steps = trainer.estimated_stepping_batches - trainer.global_step
    return max(0.0, steps * trainer.accumulate_grad_batches) if steps < math.inf else math.inf
