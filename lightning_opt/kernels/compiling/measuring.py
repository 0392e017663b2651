"""Whether compiling pays: eager steps beside compiled ones, and the start beside what is left."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from lightning_opt.core.measure.timing import wait_for
from lightning_opt.kernels.compiling.regions import Region

if TYPE_CHECKING:
    import lightning.pytorch as pl

WARM, TIMED = 2, 5
"""Steps before the timed ones, and the timed ones: of eager code, then of compiled code."""

START = 20.0
"""Seconds that a start takes at least, as compilation and new processes go."""

AT_BEST = 0.5
"""Share of a step that compiling saves at best."""

GAIN = 0.02
"""Share of a step that it must save to stay."""


def may_pay(eager: float, left: float) -> bool:
    """Return whether the steps that are left could make up for the start.

    Args:
        eager: Seconds of an eager step.
        left: Steps that are left.
    """
    return eager * left * AT_BEST > START


class Race:
    """Times the first steps of a training uncompiled, then compiled, and keeps what is faster.

    All ranks decide by the mean of their times. The timed steps wait for the device.

    Args:
        regions: What is compiled, in its modes at the start; it begins uncompiled.

    Attributes:
        verdict: What was decided; empty before that.
    """

    def __init__(self, regions: Sequence[Region]) -> None:
        self.regions, self.verdict = regions, ""
        self._rungs = [region.rung for region in regions]
        self._times: list[float] = []
        self._eager = self._begun = 0.0
        self._go_eager()

    def _go_eager(self) -> None:
        for region in self.regions:
            region.go_to(len(region.modes) - 1)

    def begin(self, device: torch.device) -> None:
        """Begin a step."""
        wait_for(device)
        self._begun = time.perf_counter()

    def end(self, trainer: pl.Trainer) -> None:
        """End a step, and decide when there are enough; ``verdict`` says what was decided."""
        root = trainer.strategy.root_device
        wait_for(root)
        self._times.append(time.perf_counter() - self._begun)
        if len(self._times) < WARM + TIMED:
            return
        own = torch.tensor(statistics.median(self._times[WARM:]), device=root)
        median = float(trainer.strategy.reduce(own, reduce_op="mean"))  # a few times in a training
        self._times = []
        if self._eager:
            times = f"a step takes {1e3 * median:.3g} ms, and {1e3 * self._eager:.3g} ms uncompiled"
            pays = median <= (1 - GAIN) * self._eager
            self.verdict = f"{'kept' if pays else 'taken back'}: {times}"
            if not pays:
                self._go_eager()
            return
        self._eager, left = median, _left(trainer)
        if may_pay(median, left):
            for region, rung in zip(self.regions, self._rungs, strict=True):
                region.go_to(rung)
            return
        few = f"{left:.0f} steps of {1e3 * median:.3g} ms are left"
        self.verdict = f"not compiled: {few}, which would not make up for the start"


def _left(trainer: pl.Trainer) -> float:
    steps = trainer.estimated_stepping_batches - trainer.global_step
    return max(0.0, steps * trainer.accumulate_grad_batches) if steps < math.inf else math.inf
