"""Decides by measurement whether compiled steps are kept."""

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

# Steps before the timed ones, and the timed ones; of uncompiled code, then of compiled code.
WARMUP = 2
TIMED = 5
# Minimum seconds that compilation and new processes take.
STARTUP = 20.0
# Largest share of a step that compiling is expected to save.
BEST_SAVING = 0.5
# Share of a step that compiling must save to be kept.
REQUIRED_SAVING = 0.02


def may_pay(eager: float, remaining: float) -> bool:
    """Return whether the remaining steps could save more time than the startup takes.

    Args:
        eager: Seconds of an uncompiled step.
        remaining: Number of remaining steps.
    """
    return eager * remaining * BEST_SAVING > STARTUP


class Comparison:
    """Times the first steps of a training uncompiled, then compiled, and keeps the faster code.

    All ranks decide by the mean of their times.

    Args:
        regions: The regions in their first mode; they are switched to uncompiled code.
        device: The device that computes the steps.

    Attributes:
        result: The decision in words; empty before it.
    """

    def __init__(self, regions: Sequence[Region], device: torch.device) -> None:
        self.regions = regions
        self.result = ""
        self._modes = [region.mode_index for region in regions]
        self._device = device
        self._clock = StepClock(device)
        self._steps = 0
        self._eager = 0.0
        self._run_eagerly()

    def _run_eagerly(self) -> None:
        for region in self.regions:
            region.use_mode(len(region.modes) - 1)

    def start_step(self) -> None:
        """Start to time a step, when the device has finished earlier work."""
        wait_for(self._device)
        self._clock.start()

    def end_step(self, trainer: pl.Trainer) -> None:
        """End a step; after enough steps, continue with compiled code or decide."""
        wait_for(self._device)
        self._clock.stop()
        self._clock.pause()
        self._steps += 1
        if self._steps < WARMUP + TIMED:
            return
        median = statistics.median(self._clock.read(wait=True)[WARMUP:])
        own = torch.tensor(median, device=trainer.strategy.root_device)
        median = float(trainer.strategy.reduce(own, reduce_op="mean"))
        self._steps = 0
        if self._eager:
            times = f"a step takes {1e3 * median:.3g} ms, and {1e3 * self._eager:.3g} ms uncompiled"
            is_faster = median <= (1 - REQUIRED_SAVING) * self._eager
            self.result = f"{'kept' if is_faster else 'reverted'}: {times}"
            if not is_faster:
                self._run_eagerly()
            return
        self._eager = median
        remaining = _remaining_steps(trainer)
        if may_pay(median, remaining):
            for region, mode in zip(self.regions, self._modes, strict=True):
                region.use_mode(mode)
            return
        few = f"{remaining:.0f} steps of {1e3 * median:.3g} ms remain"
        self.result = f"not compiled: {few}, which cannot save the time that the start takes"


def _remaining_steps(trainer: pl.Trainer) -> float:
    steps = trainer.estimated_stepping_batches - trainer.global_step
    return max(0.0, steps * trainer.accumulate_grad_batches) if steps < math.inf else math.inf
