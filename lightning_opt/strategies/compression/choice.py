"""Chooses the scheme of each step: Top-K's ramp, and the trials of ``ddp_compressed``."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Sequence
from statistics import median

import torch
from lightning_utilities.core.rank_zero import rank_zero_info

from lightning_opt.core.measure.timing import wait_for
from lightning_opt.core.modules.sharding import largest_over_ranks
from lightning_opt.core.output.report import Report
from lightning_opt.strategies.compressors import Compressor, TopK

Scheme = Compressor | torch.dtype | None
"""How buckets are sent: compressed, cast to a narrower dtype, or uncompressed (None)."""

UNTIMED_STEPS = 2
"""First steps of each trial, which are not timed: they create buffers."""

TIMED_STEPS = 6
"""Timed steps of each trial."""

MIN_SAVING = 0.1
"""A scheme is chosen over a less compressed one only if it saves this share of a step."""

MIN_SAVING_LATE = 0.25
"""The same for a scheme that sends most elements late, which costs about a tenth of the steps."""

RAMP_FACTOR = 4
"""Factor by which each stage of a ramp sends fewer elements: 25%, 6.2%, 1.6%, 0.4%, ..."""

MAX_RAMP = 30
"""Longest default ramp, as a multiple of ``1 / ratio`` steps: 3,000 steps for 1%."""


class Ramp:
    """The first compressed steps, in which Top-K sends more elements than later.

    Args:
        final: The compressor after the ramp.
        steps: Length of the ramp; None for half of the run, up to a maximum.

    Attributes:
        stages: The compressors before ``final``, the least compressed first; empty unless ``final``
            is Top-K.
        taken: Number of steps taken.

    Example:
        >>> Ramp(TopK(0.05), 300).stages
        [TopK(ratio=0.25), TopK(ratio=0.0625)]

    References:
        Lin, Han, Mao, Wang and Dally (2018), *Deep Gradient Compression: Reducing the Communication
        Bandwidth for Distributed Training*.
    """

    def __init__(self, final: Compressor, steps: int | None) -> None:
        self.final, self.taken = final, 0
        ratio = final.ratio if isinstance(final, TopK) else 1.0
        self.stages = [TopK(r) for r in (RAMP_FACTOR**-n for n in range(1, 20)) if r > ratio]
        self._longest, self._given = round(MAX_RAMP / ratio), steps
        self.set_length(math.inf)

    def set_length(self, planned: float) -> None:
        """Set the default length for a run of ``planned`` steps; unknown if infinite or below 0."""
        half = planned / 2 if planned >= 0 else math.inf
        self._steps = round(min(half, self._longest)) if self._given is None else self._given

    def next(self) -> Compressor:
        """Return the compressor of the next step."""
        step, self.taken = self.taken, self.taken + 1
        if step >= self._steps or not self.stages:
            return self.final
        return self.stages[step * len(self.stages) // self._steps]


class AutoChoice:
    """Tries each scheme for a few steps, and chooses one.

    The step times of the slowest rank count, so that all ranks make the same choice.

    Args:
        schemes: The schemes, the least compressed first. The first is None, for uncompressed.
        warmup_steps: Uncompressed backward passes before the first trial.
        device: Device of the gradients. Until the choice, each timed step waits for it.

    Attributes:
        schemes: The schemes that may be chosen.
        choice: Index of the chosen scheme; None before the choice.
    """

    def __init__(self, schemes: Sequence[Scheme], warmup_steps: int, device: torch.device) -> None:
        self.schemes = list(schemes)
        self._warmup_steps = warmup_steps
        self._device = device
        self.restore(None)

    def restore(self, name: str | None) -> None:
        """Restore the choice of a checkpoint by its :attr:`name`; None to choose."""
        names = [name_of(scheme) for scheme in self.schemes]
        self.choice = names.index(name) if name in names else None
        self._place = -1 - self._warmup_steps  # number of the latest step; trials start at 0
        self._step_start = 0.0
        self._seconds: dict[int, list[float]] = defaultdict(list)  # of each step, by trial
        self._medians: list[float] = []

    @property
    def name(self) -> str | None:
        return None if self.choice is None else name_of(self.schemes[self.choice])

    def begin_step(self) -> Scheme:
        """Start a step and return its scheme. Called at the step's first bucket."""
        if self.choice is None:
            trial = self._begin_trial_step()
            if trial < len(self.schemes):
                return self.schemes[max(trial, 0)]
            self._choose()
        assert self.choice is not None
        return self.schemes[self.choice]

    def _begin_trial_step(self) -> int:
        """Record the seconds of the previous step, and return the trial of this one."""
        length = UNTIMED_STEPS + TIMED_STEPS
        trial, step = divmod(self._place, length)
        if trial >= 0 and step >= UNTIMED_STEPS - 1:
            wait_for(self._device)
        now = time.perf_counter()
        if trial >= 0 and step >= UNTIMED_STEPS:
            self._seconds[trial].append(now - self._step_start)
        self._place += 1
        self._step_start = now
        return self._place // length

    def _choose(self) -> None:
        medians = [median(seconds) for seconds in self._seconds.values()]
        self._medians = largest_over_ranks(medians, self._device)
        margins = [
            MIN_SAVING_LATE if isinstance(scheme, Compressor) and scheme.late else MIN_SAVING
            for scheme in self.schemes
        ]
        self.choice = gentlest_that_pays(self._medians, margins)
        rank_zero_info(f"Compressed DDP: {self.report()}")

    def report(self) -> Report | None:
        """Return the step times and the choice; None if nothing was measured."""
        if not self._medians:
            return None
        rows = [
            {
                "scheme": name_of(scheme),
                "step ms": 1e3 * seconds,
                "of uncompressed": seconds / self._medians[0],
                "chosen": index == self.choice,
            }
            for index, (scheme, seconds) in enumerate(zip(self.schemes, self._medians, strict=True))
        ]
        return Report("How gradients are sent", rows, [f"Chosen: {self.name}."])


def gentlest_that_pays(seconds: Sequence[float], margins: Sequence[float]) -> int:
    """Return the first scheme that no later one beats by more than the later one's margin.

    Args:
        seconds: Step time of each scheme, the gentlest first.
        margins: Shares of the gentler scheme's time.
    """
    later = list(zip(seconds, margins, strict=True))
    return next(
        index
        for index, time_of_scheme in enumerate(seconds)
        if all(time_of_scheme * (1.0 - margin) <= other for other, margin in later[index + 1 :])
    )


def name_of(scheme: Scheme) -> str:
    return "uncompressed" if scheme is None else str(scheme).removeprefix("torch.")
