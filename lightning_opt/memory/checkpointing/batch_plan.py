"""Plans recomputation for a batch: profile the step, choose a plan, measure the plan.

Finding the fastest plan below a peak is a knapsack problem over the blocks of a step. While a block
runs forward or backward, all earlier blocks hold the bytes that they keep. The peak of a plan is
the maximum over all blocks.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeAlias

from torch import Tensor

from lightning_opt.core.arguments import check_positive
from lightning_opt.core.measure.memory import MB, MemoryLimits
from lightning_opt.core.modules.blocks import Block
from lightning_opt.core.modules.sharding import largest_over_ranks
from lightning_opt.core.modules.trial import TrialStep
from lightning_opt.memory.checkpointing.forward import parts_of
from lightning_opt.memory.checkpointing.policies import (
    Plan,
    count_recomputed,
    every_layer,
    recompute,
)
from lightning_opt.memory.checkpointing.step_profile import (
    Option,
    StepProfile,
    StepRunner,
    Unit,
    profile_step,
)
from lightning_opt.memory.meters import allocated_bytes, bucket_bytes, persistent_bytes
from lightning_opt.trainer.lightning import FSDPStrategy, ModelParallelStrategy

if TYPE_CHECKING:
    import lightning.pytorch as pl

# Default budget as a share of the free memory. Kernels and fragmentation need the remainder.
SHARE_OF_FREE = 0.9

# `solve` keeps one solution per bin of held bytes, so it may miss the fastest plan. It always finds
# a plan that meets the limit if one exists.
MAX_BINS = 400

# The shapes of the tensors of a batch, in order.
Shapes: TypeAlias = tuple[tuple[int, ...], ...]


class BudgetError(ValueError):
    """Raised if no plan meets the budget.

    Attributes:
        smallest_mb: The smallest ``budget_mb`` that can be met, as measured.
        smallest: The same as a ``budget``.
    """

    def __init__(self, given: str, smallest_mb: float, smallest: float) -> None:
        super().__init__(
            f"ActivationCheckpointing cannot meet {given}: even with every block recomputed, a "
            f"step of this batch takes {smallest_mb:.1f} MB, and its activations peak at "
            f"{smallest:.3f} of their peak without recomputation. Raise the budget to "
            f"budget_mb={math.ceil(10 * smallest_mb) / 10:.1f} or "
            f"budget={math.ceil(1000 * smallest) / 1000:.3f}, make the batch smaller, or pass "
            "strict=False to train with the smallest peak. Policies 'block' and 'sqrt' may need "
            "less where blocks hold little more than their input."
        )
        self.smallest_mb, self.smallest = smallest_mb, smallest


class Budget:
    """A limit for the memory of a step.

    Args:
        budget_mb: Megabytes for all memory of the run.
        budget: Share of the activations' peak without recomputation. Give at most one of the two;
            without them the budget is the device's free memory.
        strict: Whether a budget that cannot be met is an error.
    """

    def __init__(self, budget_mb: float | None, budget: float | None, strict: bool) -> None:
        if budget_mb is not None and budget is not None:
            raise ValueError(
                f"budget_mb={budget_mb!r} and budget={budget!r} are alternatives. Give one of them."
            )
        self.budget_mb = None if budget_mb is None else check_positive("budget_mb", budget_mb)
        self.share = None if budget is None else check_positive("budget", budget)
        self.strict = strict

    def __str__(self) -> str:
        if self.budget_mb is not None:
            return f"budget_mb={self.budget_mb:g}"
        if self.share is not None:
            return f"budget={self.share:g}"
        return "the free memory of the device"

    def for_activations(self, unchecked_peak: float, persistent: int, room: float) -> float:
        """Return the bytes that the budget leaves for activations."""
        if self.budget_mb is not None:
            return self.budget_mb * MB - persistent
        if self.share is not None:
            return self.share * unchecked_peak
        return room


# --- one step -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Solution:
    """One option for each of the first units of a step, in order of execution.

    Attributes:
        options: The options.
        held: Bytes that these units hold.
        peak: Predicted peak in bytes.
        seconds: Predicted time of the recomputation.
    """

    options: tuple[Option, ...] = ()
    held: int = 0
    peak: int = 0
    seconds: float = 0.0

    def extended(self, option: Option, unit_peak: int) -> Solution:
        return Solution(
            (*self.options, option),
            self.held + option.nbytes,
            max(self.peak, self.held + unit_peak),
            self.seconds + option.seconds,
        )


def solve(units: Sequence[Unit], head_peak: int, limit: float) -> Solution | None:
    """Return the fastest plan with a predicted peak of at most ``limit`` bytes, or ``None``.

    ``head_peak`` is the peak between the last block's forward and backward pass, with every block
    recomputed.
    """
    total = sum(max(option.nbytes for option in unit.options) for unit in units)
    bin_bytes = max(1, total // MAX_BINS)
    solutions = [Solution()]
    for unit in units:
        extended = [
            solution.extended(option, unit.peak)
            for solution in solutions
            if solution.held + unit.peak <= limit
            for option in unit.options
        ]
        solutions = _fastest(extended, bin_bytes)
    complete = [
        replace(solution, peak=max(solution.peak, solution.held + head_peak))
        for solution in solutions
        if solution.held + head_peak <= limit
    ]
    return min(complete, key=lambda solution: (solution.seconds, solution.peak), default=None)


def _fastest(solutions: list[Solution], bin_bytes: int) -> list[Solution]:
    """Return the Pareto front of held bytes and seconds, with one solution per bin of bytes.

    The solution that holds the fewest bytes is always included: it meets the limit if any does.
    """
    fastest: list[Solution] = []
    for solution in sorted(solutions, key=lambda solution: (solution.held, solution.seconds)):
        if fastest and solution.seconds >= fastest[-1].seconds:
            continue
        if len(fastest) > 1 and fastest[-1].held // bin_bytes == solution.held // bin_bytes:
            fastest.pop()
        fastest.append(solution)
    return fastest


@dataclass
class StepPlan:
    """A plan for one step, with its measurements.

    Attributes:
        profile: The measurements of the step's blocks.
        plan: The blocks to recompute.
        limit: Bytes for activations.
        predicted: Predicted peak of the activations, in bytes.
        peak: Measured peak of the activations, in bytes.
        excess: Bytes above the limit, as the maximum over ranks.
        shapes: Shapes of the batch.
        unchecked_seconds: Time of a step without recomputation; None if it was not run.
        seconds: Time of a step under the plan.
    """

    profile: StepProfile
    plan: Plan
    limit: float
    predicted: int
    peak: int
    excess: float
    shapes: Shapes = ()
    unchecked_seconds: float | None = None
    seconds: float = 0.0

    @property
    def fits(self) -> bool:
        return self.excess <= 0

    def covers(self, shapes: Shapes) -> bool:
        """Return whether a batch of these shapes certainly stays within the limit."""
        factor = growth(self.shapes, shapes)
        return factor <= 1 or factor * (self.peak + self.profile.reserve) <= self.limit

    def scalars(self) -> dict[str, float]:
        scalars = {
            "checkpointing/unchecked_peak_mb": self.profile.unchecked_peak / MB,
            "checkpointing/predicted_peak_mb": self.predicted / MB,
            "checkpointing/peak_mb": self.peak / MB,
            "checkpointing/step_ms": 1e3 * self.seconds,
        }
        if self.unchecked_seconds is not None:
            scalars["checkpointing/unchecked_step_ms"] = 1e3 * self.unchecked_seconds
        return scalars

    def summary(self) -> str:
        """Summarize the plan in two sentences."""
        profile, before = self.profile, self.unchecked_seconds
        predicted = "" if profile.is_measured else " (predicted)"
        unchecked = "not run" if before is None else f"{1e3 * before:.1f} ms"
        return (
            f"ActivationCheckpointing('auto'): {count_recomputed(self.plan)} of "
            f"{len(profile.units)} blocks recomputed. Peak of activations "
            f"{profile.unchecked_peak / MB:.1f} MB{predicted} -> {self.peak / MB:.1f} MB "
            f"(predicted {self.predicted / MB:.1f}, budget {self.limit / MB:.1f}); "
            f"step {unchecked} -> {1e3 * self.seconds:.1f} ms."
        )

    def details(self, block: Block) -> dict[str, float | int]:
        for order, unit in enumerate(self.profile.units):
            if unit.block == block:
                return {
                    "order": order,
                    "calls": unit.calls,
                    "keeping MB": unit.internal_bytes / MB,
                    "recomputing ms": 1e3 * unit.options[0].seconds,
                }
        return {}


def plan_step(runner: StepRunner, profile: StepProfile, limit: float) -> StepPlan:
    """Return the fastest plan within ``limit`` bytes, or the one that recomputes every block.

    The peak of the plan is measured. If it exceeds the limit, a second plan is made for a limit
    lowered by the excess.
    """
    target = limit - profile.reserve
    for _ in range(2):
        solution = solve(profile.units, profile.head_peak, target)
        names = [unit.block.name for unit in profile.units]
        names, solution = runner.broadcast((names, solution))
        if solution is None:
            break
        plan = to_plan(profile.blocks, dict(zip(names, solution.options, strict=True)))
        step_plan = _measure(runner, profile, plan, solution.peak, limit)
        if step_plan.fits:
            return step_plan
        target -= 1.1 * step_plan.excess
    every = every_layer(profile.blocks)
    return _measure(runner, profile, every, round(profile.peak()), limit)


def _measure(
    runner: StepRunner, profile: StepProfile, plan: Plan, predicted: int, limit: float
) -> StepPlan:
    peak = runner.peak(plan)
    excess = runner.largest(peak + profile.reserve - limit)
    return StepPlan(profile, plan, limit, predicted, peak, excess)


def to_plan(blocks: Sequence[Block], options: Mapping[str, Option]) -> Plan:
    """Convert options by block name to a plan for the model.

    A block without an option did not run in the profiled step (layers may be skipped at random). It
    is recomputed if any other block is.
    """
    if all(option.kept is None for option in options.values()):
        return []
    kept = {name: option.kept for name, option in options.items()}
    pairs = ((block, kept.get(block.name, frozenset())) for block in blocks)
    return [recompute(block, operators) for block, operators in pairs if operators is not None]


# --- one batch ------------------------------------------------------------------------------------


def plan_batch(
    trainer: pl.Trainer,
    pl_module: pl.LightningModule,
    batch: Any,
    batch_idx: int,
    blocks: Sequence[Block],
    budget: Budget,
    first: StepPlan | None,
) -> StepPlan:
    """Return a plan for this batch.

    With several ranks, all ranks measure the first batch. No rank measures a later batch, because
    it may be larger on one rank only. That rank then uses the plan with the smallest peak; with
    sharded parameters, it keeps the first plan.

    Raises:
        BudgetError: If no plan meets a strict budget.
    """
    shapes = batch_shapes(batch)
    sharded = isinstance(trainer.strategy, (FSDPStrategy, ModelParallelStrategy))
    if first is not None:
        if sharded:
            warnings.warn(
                "ActivationCheckpointing('auto'): a larger batch may exceed "
                f"{budget}. With sharded parameters all ranks must recompute the same blocks, so "
                "the plan is kept. Pass the largest batch as worst_batch, or lower the budget.",
                stacklevel=2,
            )
            return replace(first, shapes=shapes)
        if trainer.world_size > 1:
            return replace(first, plan=every_layer(first.profile.blocks), shapes=shapes)
    device = pl_module.device
    states = persistent_bytes(pl_module, trainer.optimizers)
    persistent = states + bucket_bytes(trainer.strategy.model)
    unallocated = states - allocated_bytes(pl_module, trainer.optimizers)
    free = SHARE_OF_FREE * MemoryLimits(device, host=device.type != "cuda").room()
    room = -largest_over_ranks([unallocated - free], device)[0]
    step = TrialStep(trainer, pl_module, batch, batch_idx)
    runner = StepRunner(step, device, trainer.strategy.broadcast)
    profile = profile_step(runner, blocks, room)
    unchecked_peak = profile.unchecked_peak + profile.reserve
    # A larger batch keeps the limit of the first one.
    limit = first.limit if first else budget.for_activations(unchecked_peak, persistent, room)
    step_plan = plan_step(runner, profile, limit)
    if not step_plan.fits:
        peak = step_plan.peak + profile.reserve
        error = BudgetError(str(budget), (peak + persistent) / MB, peak / unchecked_peak)
        # Later batches only warn: an error would end the run in mid-epoch.
        if budget.strict and first is None:
            raise error
        warnings.warn(f"{error} The plan with the smallest peak is used.", stacklevel=2)
    step_plan.shapes = shapes
    if profile.is_measured:
        step_plan.unchecked_seconds = min(runner.time([]) for _ in range(2))
    step_plan.seconds = min(runner.time(step_plan.plan) for _ in range(2))
    return step_plan


def batch_shapes(batch: Any) -> Shapes:
    """Return the shapes of the tensors in a batch of any structure."""
    tensors = _tensors(batch, set())
    return tuple((one.numel(),) if one.is_nested else tuple(one.shape) for one in tensors)


def _tensors(value: Any, seen: set[int]) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif id(value) not in seen:
        seen.add(id(value))
        for part in parts_of(value):
            yield from _tensors(part, seen)


def growth(known: Shapes, other: Shapes) -> float:
    """Return an upper bound of the factor by which activations grow between two batches.

    Activations grow with the number of elements. In attention they also grow with the length, so
    the bound is multiplied by the largest growth of a dimension. For a smaller batch it is at most
    1.
    """
    elements = [sum(map(math.prod, shapes)) for shapes in (known, other)]
    element_growth = elements[1] / max(1, elements[0])
    if [*map(len, known)] != [*map(len, other)]:
        return max(1.0, element_growth) ** 2
    dimension_growth = [
        size / max(1, before)
        for shape, known_shape in zip(other, known, strict=True)
        for size, before in zip(shape, known_shape, strict=True)
    ]
    return element_growth * max([1.0, *dimension_growth]) if known else 1.0
