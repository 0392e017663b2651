"""Measures the memory that each block of a training step holds, and its recomputation time.

The measured step recomputes every block on its own, which needs the least memory. A block's
recomputation allocates the bytes that the block would hold if it were kept.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import Any, TypeAlias

import torch
from torch import nn

from lightning_opt.core.measure.timing import wait_for
from lightning_opt.core.modules.blocks import Block
from lightning_opt.core.modules.sharding import largest_over_ranks
from lightning_opt.core.modules.trial import TrialStep
from lightning_opt.memory.checkpointing.forward import InputChangedError
from lightning_opt.memory.checkpointing.policies import (
    AppliedPlan,
    Plan,
    every_layer,
    recompute,
    selective,
)
from lightning_opt.memory.checkpointing.selective import Operator, OperatorKey
from lightning_opt.memory.meters import Meter, measuring

# Number of timed runs of each option; the fastest counts.
TIMED_ROUNDS = 3
# Internal buffers of kernels as a share of the peak, on devices where they are not counted.
# Measured for convolutions on a CPU.
KERNEL_SHARE = 0.02


@dataclass(frozen=True)
class Option:
    """One way to treat a block.

    Attributes:
        kept: The operators whose outputs are kept; ``None`` keeps all outputs.
        nbytes: Bytes held between forward and backward pass, without the input.
        seconds: Time that it adds to a step; 0 if all outputs are kept.
    """

    kept: frozenset[OperatorKey] | None
    nbytes: int
    seconds: float


@dataclass(eq=False)
class Unit:
    """A block and its measurements.

    Attributes:
        block: The block.
        options: Ways to treat it. One of them keeps nothing.
        peak: Peak of the step during its forward and backward pass, with every block recomputed.
        calls: Number of its calls in the step.
        internal_bytes: Bytes that its recomputation allocates.
        expensive: The operators to keep if it is recomputed in part.
    """

    block: Block
    options: tuple[Option, ...] = ()
    peak: int = 0
    calls: int = 0
    internal_bytes: int = 0
    expensive: tuple[Operator, ...] = ()


class StepRunner:
    """Runs one training step under a plan.

    Args:
        step: The step.
        device: Device that computes the step.
        broadcast: Sends the first rank's value to every rank.
    """

    def __init__(
        self,
        step: TrialStep,
        device: torch.device,
        broadcast: Callable[[Any], Any] = lambda value: value,
    ) -> None:
        self.step = step
        self.device = device
        self.broadcast = broadcast

    def time(self, plan: Plan) -> float:
        with AppliedPlan(plan):
            return self.step.run()

    def peak(self, plan: Plan) -> int:
        """Return the peak of the step, in bytes above its start."""
        meters: list[Meter] = []
        with AppliedPlan(plan):
            self.step.run(lambda stack: meters.append(stack.enter_context(measuring(self.device))))
        return meters[0].mark()

    def largest(self, value: float) -> float:
        return largest_over_ranks([value], self.device)[0]


@dataclass
class StepProfile:
    """The measurements of one step.

    Attributes:
        blocks: All blocks that can be recomputed.
        units: The blocks that ran, in the order of their first call.
        head_peak: Peak between the last block's forward pass and the first recomputation.
        unchecked_peak: Peak with everything kept, in bytes.
        is_measured: Whether ``unchecked_peak`` was measured; otherwise it is predicted.
        reserve: Bytes that kernels may use in addition to each peak of this profile.
    """

    blocks: Sequence[Block]
    units: list[Unit]
    head_peak: int
    unchecked_peak: int = 0
    is_measured: bool = False
    reserve: int = 0

    def peak(self, kept_share: float = 0.0) -> float:
        """Return the predicted peak if each block kept this share of its internal bytes."""
        peak = held = 0.0
        for unit in self.units:
            peak = max(peak, held + unit.peak)
            held += kept_share * unit.internal_bytes
        return max(peak, held + self.head_peak)

    def calibrate(self) -> None:
        """Scale the internal bytes to match the measured peak with everything kept."""
        scale, held = 2.0, 0
        peaks = [*(unit.peak for unit in self.units), self.head_peak]
        for unit, next_peak in zip(self.units, peaks[1:], strict=True):
            held += unit.internal_bytes
            scale = min(scale, (self.unchecked_peak - next_peak) / max(held, 1))
        for unit in self.units:
            unit.internal_bytes = int(unit.internal_bytes * max(scale, 0.0))


def profile_step(
    runner: StepRunner, blocks: Sequence[Block], room: float = math.inf
) -> StepProfile:
    """Measure the memory and the time of each block.

    Args:
        runner: Runs the step.
        blocks: Blocks that may be recomputed.
        room: Bytes available for activations. A step that is predicted to need more is not run.
    """
    blocks = list(blocks)
    expensive = None
    while expensive is None:
        try:
            expensive = _expensive_operators(runner, blocks)
        except InputChangedError as error:
            blocks = [block for block in blocks if error.module not in block.modules]
    profile = _profile_memory(runner, blocks)
    profile.unchecked_peak = round(profile.peak(1.0))
    profile.is_measured = runner.largest(profile.unchecked_peak - room) < 0
    if profile.is_measured:
        profile.unchecked_peak = runner.peak([])
        profile.calibrate()
    if runner.device.type != "cuda":
        profile.reserve = round(KERNEL_SHARE * profile.unchecked_peak)
    for unit in profile.units:
        unit.expensive = expensive.get(unit.block.modules[0], ())
    _time_options(profile.units, runner)
    return profile


def _expensive_operators(
    runner: StepRunner, blocks: Sequence[Block]
) -> dict[nn.Module, tuple[Operator, ...]]:
    with AppliedPlan(selective(blocks, None)) as applied:
        runner.step.run()
        return {
            forward.module: forward.selection.chosen()
            for forward in applied.forwards
            if forward.selection is not None
        }


def _profile_memory(runner: StepRunner, blocks: Sequence[Block]) -> StepProfile:
    timelines: list[Timeline] = []
    with AppliedPlan(every_layer(blocks)) as applied:
        runner.step.run()  # a first run, which detects the buffers that blocks write

        def start(stack: ExitStack) -> None:
            timelines.append(Timeline(blocks, stack.enter_context(measuring(runner.device))))
            applied.attach(timelines[0].measure)

        runner.step.run(start)
    timelines[0].record_peak()
    return StepProfile(blocks, timelines[0].units, timelines[0].head_peak)


# Total seconds of a module's forward passes (False) or recomputations (True).
Seconds: TypeAlias = dict[tuple[nn.Module, bool], float]


def _time_blocks(runner: StepRunner, plan: Plan) -> Seconds:
    rounds: list[Seconds] = [defaultdict(float) for _ in range(TIMED_ROUNDS)]
    for seconds in rounds:
        with AppliedPlan(plan) as applied:
            applied.attach(partial(_stopwatch, runner.device, seconds))
            runner.step.run()
    return {key: min(seconds[key] for seconds in rounds) for key in rounds[0]}


@contextmanager
def _stopwatch(
    device: torch.device, seconds: Seconds, module: nn.Module, recomputes: bool
) -> Iterator[None]:
    wait_for(device)
    start = perf_counter()
    try:
        yield
    finally:
        wait_for(device)
        seconds[module, recomputes] += perf_counter() - start


def _time_options(units: Sequence[Unit], runner: StepRunner) -> None:
    """Time recomputation in full and in part, and set the options of each block.

    Blocks with equal internal bytes are assumed to be equally fast, so their mean time is used.
    """
    keys = {unit: frozenset(operator.key for operator in unit.expensive) for unit in units}
    full_times = _time_blocks(runner, every_layer([unit.block for unit in units]))
    partial_times: Seconds = {}
    if any(keys.values()):
        partial_times = _time_blocks(runner, [recompute(unit.block, keys[unit]) for unit in units])
    same_bytes: dict[int, list[Unit]] = defaultdict(list)
    for unit in units:
        same_bytes[unit.internal_bytes].append(unit)

    def mean(unit: Unit, seconds: Seconds, recomputes: bool) -> float:
        group = same_bytes[unit.internal_bytes]
        modules = (module for other in group for module in other.block.modules)
        return sum(seconds.get((module, recomputes), 0.0) for module in modules) / len(group)

    for unit in units:
        options = [
            Option(frozenset(), 0, mean(unit, full_times, True)),
            Option(None, unit.internal_bytes, 0.0),
        ]
        if keys[unit]:
            slowdown = mean(unit, partial_times, False) - mean(unit, full_times, False)
            held = sum(operator.nbytes for operator in unit.expensive) * unit.calls
            seconds = mean(unit, partial_times, True) + max(0.0, slowdown)
            options.append(Option(keys[unit], held, seconds))
        unit.options = tuple(options)


class Timeline:
    """Reads the meter whenever a block runs or is recomputed.

    Args:
        blocks: The blocks.
        meter: Measures bytes allocated since the start of the step.

    Attributes:
        units: The blocks that ran, in the order of their first call.
        head_peak: Peak between the last block's forward pass and the first recomputation.
    """

    def __init__(self, blocks: Iterable[Block], meter: Meter) -> None:
        self.units: list[Unit] = []
        self.head_peak = 0
        self._meter = meter
        self._unit_of = {m: unit for b in blocks for unit in [Unit(b)] for m in b.modules}
        self._current: Unit | None = None  # the unit whose backward pass runs

    @contextmanager
    def measure(self, module: nn.Module, recomputes: bool) -> Iterator[None]:
        unit = self._unit_of[module]
        is_first = module is unit.block.modules[0]
        if recomputes:
            if unit is not self._current or is_first:
                self.record_peak()
            self._current = unit
            before = self._meter.live()
            try:
                yield
            finally:  # the bytes still allocated
                unit.internal_bytes += self._meter.live() - before
            return
        if self._current is not None:  # a second forward pass, e.g. for a GAN discriminator
            self.record_peak()
            self._current = None
        # Memory used between blocks is attributed to the next block.
        yield
        unit.peak = max(unit.peak, self._meter.mark())
        unit.calls += is_first
        if unit not in self.units:
            self.units.append(unit)

    def record_peak(self) -> None:
        """Attribute the peak since the last reading to the current block, else to the head."""
        peak = self._meter.mark()
        if self._current is not None:
            self._current.peak = max(self._current.peak, peak)
        else:
            self.head_peak = max(self.head_peak, peak)
