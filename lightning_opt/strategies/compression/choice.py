"""Chooses each step's scheme: the ramp of Top-K, and the trials of ``ddp_compressed``."""

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
from lightning_opt.strategies.compressors import Compressor, Quantize, TopK

Scheme = Compressor | torch.dtype | None
"""How buckets are sent: compressed, cast to a narrower dtype, or uncompressed (None)."""

UNTIMED_STEPS = 2
"""First steps of each trial, which are not timed: they create buffers."""

TIMED_STEPS = 6
"""Timed steps of each trial."""

MIN_SAVING = 0.1
"""A harsher scheme must save this share of a step, or the gentler one is chosen."""

MIN_SAVING_LATE = 0.25
"""Minimum saving of a scheme that sends most elements late: lateness costs a tenth of the steps."""

RAMP_FACTOR = 4
"""Each stage of a ramp sends this many times fewer elements: 25%, 6.2%, 1.6%, 0.4%, ..."""

RAMP_SHARE = 1 / 2
"""Share of the run that a ramp takes by default."""

MAX_RAMP = 30
"""Longest default ramp, in steps in which each element could be sent once: 3,000 steps for 1%."""


class Ramp:
    """The steps in which Top-K sends more elements than it will later.

    Args:
        final: The compressor after the ramp.
        steps: Length of the ramp.

    Attributes:
        stages: The compressors before ``final``, the gentlest first; none unless it is Top-K.

    Example:
        >>> Ramp(TopK(0.05), 300).stages
        [TopK(ratio=0.25), TopK(ratio=0.0625)]

    References:
        Lin, Han, Mao, Wang and Dally (2018), *Deep Gradient Compression: Reducing the Communication
        Bandwidth for Distributed Training*.
    """

    def __init__(self, final: Compressor, steps: int) -> None:
        self.final = final
        self.steps = steps
        self.stages: list[Compressor] = []
        ratio = 1.0 / RAMP_FACTOR
        while isinstance(final, TopK) and ratio > final.ratio:
            self.stages.append(TopK(ratio))
            ratio /= RAMP_FACTOR

    def at(self, step: int) -> Compressor:
        """Return the compressor of a step of the ramp (the first is 0)."""
        if step >= self.steps or not self.stages:
            return self.final
        return self.stages[step * len(self.stages) // self.steps]


def default_ramp_steps(compressor: Compressor, planned: float = math.inf) -> int:
    """Return the default length of a ramp.

    Args:
        compressor: The compressor after the ramp.
        planned: Optimizer steps of the whole run; infinite or below 0 if unknown.
    """
    if not isinstance(compressor, TopK):
        return 0
    longest = MAX_RAMP / compressor.ratio
    return round(min(RAMP_SHARE * planned, longest) if planned >= 0 else longest)


class AutoChoice:
    """Tries each scheme for a few steps, and chooses one.

    The slowest rank's step times count, so all ranks choose alike.

    Args:
        schemes: The schemes, the gentlest for the gradients first: None, for uncompressed.
        first_trial: Backward pass (the first is 0) of the first trial. The ``TIMED_STEPS``
            uncompressed steps before it are timed as well.
        ramp: Precedes its last compressor, if that compressor is chosen.
        device: Device of the gradients. Until the choice, each timed step waits for it.

    Attributes:
        schemes: See above.
        choice: Index of the chosen scheme; None before the choice.
        ramped: Number of steps sent by the ramp.
    """

    def __init__(
        self, schemes: Sequence[Scheme], first_trial: int, ramp: Ramp, device: torch.device
    ) -> None:
        self.schemes = list(schemes)
        self._first_trial = first_trial
        self._ramp = ramp
        self._device = device
        self.restore(None, 0)

    def restore(self, name: str | None, ramped: int) -> None:
        """Restore the choice of a checkpoint, or reset.

        Args:
            name: :attr:`name` of the checkpoint; None to choose.
            ramped: See :class:`AutoChoice`.
        """
        names = [name_of(scheme) for scheme in self.schemes]
        self.choice = names.index(name) if name in names else None
        self.ramped = ramped
        self._backward_pass = -1
        self._step_start = 0.0
        self._seconds: dict[int, list[float]] = defaultdict(list)  # of the steps of each trial
        self._medians: list[float] = []

    @property
    def name(self) -> str | None:
        return None if self.choice is None else name_of(self.schemes[self.choice])

    def begin_step(self) -> Scheme:
        """Return how to send the buckets of a step. Called at its first bucket."""
        if self.choice is None:
            trial = self._begin_trial_step()
            if trial < len(self.schemes):
                return self.schemes[trial]
            self._choose()
        assert self.choice is not None
        scheme = self.schemes[self.choice]
        if scheme is self._ramp.final:
            scheme = self._ramp.at(self.ramped)
            self.ramped += 1
        return scheme

    def _begin_trial_step(self) -> int:
        """Record the seconds of the previous step, and return the trial of this one."""
        trial, step = self._trial_and_step()
        if step >= UNTIMED_STEPS - 1:
            wait_for(self._device)
        now = time.perf_counter()
        if step >= UNTIMED_STEPS:
            self._seconds[trial].append(now - self._step_start)
        self._backward_pass += 1
        self._step_start = now
        return self._trial_and_step()[0]

    def _trial_and_step(self) -> tuple[int, int]:
        """Return the trial of this backward pass, and the step within the trial.

        Trial 0 is uncompressed and ends at ``first_trial``; its earlier steps are not timed.
        """
        length = UNTIMED_STEPS + TIMED_STEPS
        trial, step = divmod(self._backward_pass - self._first_trial + length, length)
        return max(trial, 0), (step if trial >= 0 else 0)

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
    if scheme is None:
        return "uncompressed"
    if isinstance(scheme, TopK):
        return f"TopK({scheme.ratio:g})"
    if isinstance(scheme, Quantize):
        return f"Quantize({scheme.bits})"
    return str(scheme).removeprefix("torch.")
