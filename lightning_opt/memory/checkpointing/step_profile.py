"""Measures the memory that each block of a training step holds, and its recomputation time.

The measurement recomputes every block on its own, which needs the least memory. A recomputation
allocates as many bytes as keeping the block would have held.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from lightning_opt.core.modules.blocks import Block
from lightning_opt.core.modules.sharding import largest_over_ranks
from lightning_opt.core.modules.trial import TrialStep
from lightning_opt.memory.checkpointing.forward import InputChangedError, Probe
from lightning_opt.memory.checkpointing.knapsack import Item, Option
from lightning_opt.memory.checkpointing.policies import AppliedPlan, BlockGroup, Plan, every_layer
from lightning_opt.memory.checkpointing.probes import OperatorProbe, Stopwatch, Timeline, Unit
from lightning_opt.memory.checkpointing.selective import OperatorKey, OperatorProfile
from lightning_opt.memory.meters import Meter, measuring

# Number of timed runs of each option; the fastest counts.
TIMED_ROUNDS = 3
# Maximum number of blocks in a segment: longer ones save little and take long to plan.
MAX_SEGMENT_LENGTH = 8
# Bytes that kernels use internally, as a share of the peak, on devices where they are not counted.
# Convolutions on a CPU took this share.
KERNEL_SHARE = 0.02
# Maximum number of selections between keeping nothing and keeping everything.
MAX_SELECTIONS = 8
# Operators are considered if they take at least this share of their block's recomputation.
MIN_OPERATOR_SHARE = 0.02
# Minimum cost of a recomputation, as a share of the block's time; lower measurements are noise.
MIN_COST_SHARE = 0.05

Seconds: TypeAlias = dict[OperatorKey, float]


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
        self._step = step
        self.device = device
        self.broadcast = broadcast

    def time(self, plan: Plan) -> float:
        with AppliedPlan(plan):
            return self._step.run()

    def peak(self, plan: Plan) -> int:
        """Return the peak of the step, in bytes above its start."""
        meters: list[Meter] = []
        with AppliedPlan(plan):
            self._step.run(lambda stack: meters.append(stack.enter_context(measuring(self.device))))
        return meters[0].mark()

    def probe(self, plan: Plan, probe: Probe, keep_all: bool = False) -> None:
        """Run the step with a probe around each block."""
        with AppliedPlan(plan) as applied:
            self._step.run(lambda _: applied.attach(probe, keep_all))

    def timeline(self, blocks: Sequence[Block]) -> Timeline:
        """Run the step with every block recomputed on its own, and return its memory timeline.

        Raises:
            InputChangedError: If a block cannot be recomputed.
        """
        timelines: list[Timeline] = []

        def start(stack: ExitStack) -> None:
            timelines.append(Timeline(blocks, stack.enter_context(measuring(self.device))))
            applied.attach(timelines[0])

        with AppliedPlan(every_layer(blocks)) as applied:
            self._step.run()  # the first run also records which buffers are written
            self._step.run(start)
        return timelines[0]

    def largest(self, value: float) -> float:
        return largest_over_ranks([value], self.device)[0]


@dataclass
class StepProfile:
    """The measurements of one step.

    Attributes:
        units: The blocks that ran, in the order of their first call.
        head_peak: Peak between the last block's forward pass and the first recomputation.
        runner: Runs the step.
        lengths: Numbers of blocks that a segment may have, in the order in which they are tried.
        unchecked_peak: Peak with everything kept, in bytes.
        is_measured: Whether ``unchecked_peak`` was measured; otherwise it is predicted.
        reserve: Bytes that kernels may use in addition to each peak of this profile.
    """

    units: list[Unit]
    head_peak: int
    runner: StepRunner
    lengths: tuple[int, ...] = (1,)
    unchecked_peak: int = 0
    is_measured: bool = False
    reserve: int = 0

    def peak(self, kept: float = 0.0) -> float:
        """Return the predicted peak if each block kept this share of its internal bytes."""
        peak = held = 0.0
        for unit in self.units:
            peak = max(peak, held + max(unit.forward_peak, unit.backward_peak))
            held += kept * unit.internal_bytes
        return max(peak, held + self.head_peak)

    def calibrate(self) -> None:
        """Scale the internal bytes to match the measured peak with everything kept."""
        low, high = 0.0, 2.0
        for _ in range(20):
            middle = (low + high) / 2
            if self.peak(kept=middle) > self.unchecked_peak:
                high = middle
            else:
                low = middle
        for unit in self.units:
            unit.internal_bytes = int(unit.internal_bytes * low)


def profile_step(
    runner: StepRunner, blocks: Sequence[Block], join: bool = True, room: float = math.inf
) -> StepProfile:
    """Measure the memory and the time of each block.

    Args:
        runner: Runs the step.
        blocks: Blocks that may be recomputed.
        join: Whether consecutive blocks may form segments.
        room: Bytes available for activations. A step that is predicted to need more is not run.
    """
    profile = _profile_memory(runner, list(blocks))
    units = profile.units
    if join:
        # Segments longer than the best length are only tried if no other plan meets the limit.
        profile.lengths = (best_segment_length(units), MAX_SEGMENT_LENGTH)
    groups = _group_by_operators(units)
    for group in groups:
        if len(group[0].profiles) == 1:
            selections = nested_selections(group)
            for unit in group:
                unit.selections = [] if unit.profiles[0].recomputed_twice else selections
    for unit, selections in zip(
        units, runner.broadcast([unit.selections for unit in units]), strict=True
    ):
        unit.selections = selections
    profile.unchecked_peak = round(profile.peak(kept=1.0))
    profile.is_measured = runner.largest(profile.unchecked_peak - room) < 0
    if profile.is_measured:
        profile.unchecked_peak = runner.peak([])
        profile.calibrate()
    if runner.device.type != "cuda":
        profile.reserve = round(KERNEL_SHARE * profile.unchecked_peak)
    costs = _time_options(profile)
    for group in groups:
        # Times of equal blocks differ only by noise.
        means = {
            name: sum(seconds[unit.block] for unit in group) / len(group)
            for name, seconds in costs.items()
        }
        for unit in group:
            _set_options(unit, means, operator_seconds(group))
    return profile


# --- memory ---------------------------------------------------------------------------------------


def _profile_memory(runner: StepRunner, blocks: list[Block]) -> StepProfile:
    """Measure peaks and held bytes, and record the operators."""
    timeline = None
    while timeline is None:
        try:
            timeline = runner.timeline(blocks)
        except InputChangedError as error:
            blocks = [block for block in blocks if error.module not in block.modules]
    timeline.finish()
    profile = StepProfile(timeline.units, timeline.head_peak, runner)
    operators = {module: OperatorProfile() for u in profile.units for module in u.block.modules}
    runner.probe(every_layer([unit.block for unit in profile.units]), OperatorProbe(operators))
    for unit in profile.units:
        unit.profiles = tuple(operators[module] for module in unit.block.modules)
    for unit, following in zip(profile.units, profile.units[1:], strict=False):
        if unit.profiles[-1].recomputes_output and unit.calls == 1:
            # Its last saved tensor is its output, which counts as the input of the next unit.
            unit.internal_bytes = max(0, unit.internal_bytes - following.inputs)
    return profile


def best_segment_length(units: Sequence[Item]) -> int:
    """Return the number of blocks a segment may have; 1 where segments save nothing.

    Segments of k out of n blocks hold n / k inputs and recompute the internal bytes of k blocks.
    The sum is smallest for k = sqrt(n * inputs / internal_bytes): about one in transformers, four
    in an MLP. The last segments of a plan are longer, because fewer blocks follow them.
    """
    inputs = sum(unit.inputs for unit in units)
    internal_bytes = sum(unit.internal_bytes for unit in units)
    best = round(math.sqrt(len(units) * inputs / max(1, internal_bytes)))
    return min(MAX_SEGMENT_LENGTH, 2 * best) if best > 1 else 1


# --- time -----------------------------------------------------------------------------------------


def _time_options(profile: StepProfile) -> dict[str, dict[Block, float]]:
    """Return the seconds that recomputation and the largest selection add to each block.

    The cost of smaller selections is computed from the times of single operators, which come from
    one run and are therefore less noisy.
    """
    units = profile.units
    blocks = [unit.block for unit in units]
    recompute = every_layer(blocks)
    runs: dict[str, tuple[Plan, bool]] = {"recompute": (recompute, False)}
    if profile.is_measured:
        runs["keep"] = (recompute, True)
    if any(unit.selections for unit in units):
        plan = [
            BlockGroup((u.block,), u.selection_factory(-1) if u.selections else None) for u in units
        ]
        runs["select"] = (plan, False)
    best = {name: dict.fromkeys(blocks, math.inf) for name in runs}
    for _ in range(TIMED_ROUNDS):
        for name, (plan, keep_all) in runs.items():
            stopwatch = Stopwatch(blocks, profile.runner.device)
            profile.runner.probe(plan, stopwatch, keep_all)
            for block, seconds in stopwatch.seconds.items():
                best[name][block] = min(best[name][block], seconds)
    # If keeping was not timed, the whole time counts as recomputation.
    kept = best.pop("keep", dict.fromkeys(blocks, 0.0))
    return {
        name: {
            block: max(MIN_COST_SHARE * seconds, seconds - kept[block])
            for block, seconds in times.items()
        }
        for name, times in best.items()
    }


def _set_options(unit: Unit, cost: Mapping[str, float], seconds: Seconds) -> None:
    """Set the options of a block from the cost of each option and the seconds of each operator."""
    repeated = unit.repeated_operators
    total = sum(seconds[op.key] for op in repeated) * unit.calls
    # Recording an operator makes it slower.
    scale = min(1.0, cost["recompute"] / total) * unit.calls if total else 0.0
    options = [
        Option("recompute", 0, cost["recompute"]),
        Option("keep", unit.internal_bytes, 0.0),
    ]
    saved = [scale * sum(seconds[key] for key in keys) for keys in unit.selections]
    # The contexts of a selection take time themselves.
    overhead = max(0.0, cost["select"] - cost["recompute"] + saved[-1]) if saved else 0.0
    for index, keys in enumerate(unit.selections):
        held = sum(op.nbytes for op in repeated if op.key in keys) * unit.calls
        min_cost = MIN_COST_SHARE * cost["recompute"]
        cost_of_selection = max(min_cost, cost["recompute"] - saved[index] + overhead)
        options.append(Option(str(index), held, cost_of_selection))
    unit.options = tuple(options)
    last = unit.profiles[-1]
    skipped = last.operators[len(last.repeated_operators()) :]
    unit.remainder = scale * sum(seconds[op.key] for op in skipped)


def _group_by_operators(units: Sequence[Unit]) -> list[list[Unit]]:
    groups: dict[Hashable, list[Unit]] = defaultdict(list)
    for unit in units:
        operators = tuple((op.key, op.nbytes) for op in unit.operators)
        groups[len(unit.profiles), operators].append(unit)
    return list(groups.values())


def operator_seconds(group: Sequence[Unit]) -> Seconds:
    """Return each operator's time, as the median over blocks that run the same operators."""
    times: dict[OperatorKey, list[float]] = defaultdict(list)
    for operator in (operator for unit in group for operator in unit.operators):
        times[operator.key].append(operator.seconds)
    return {key: statistics.median(values) for key, values in times.items()}


def nested_selections(group: Sequence[Unit]) -> list[frozenset[OperatorKey]]:
    """Return growing sets of operators to keep, in the order of time saved per byte."""
    seconds = operator_seconds(group)
    repeated = group[0].repeated_operators
    total = sum(seconds[operator.key] for operator in repeated)
    candidates = [
        operator
        for operator in repeated
        if operator.keepable
        and operator.nbytes
        and seconds[operator.key] > MIN_OPERATOR_SHARE * total
    ]
    candidates.sort(key=lambda operator: seconds[operator.key] / operator.nbytes, reverse=True)
    sets = [
        frozenset(op.key for op in candidates[:count]) for count in range(1, len(candidates) + 1)
    ]
    stride = math.ceil(len(sets) / MAX_SELECTIONS) or 1
    return sets[::stride]
