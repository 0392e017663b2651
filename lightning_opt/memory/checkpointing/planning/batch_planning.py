"""Planning for the Trainer's batch: the budget in bytes, the measurement, and what came of it."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy
from torch import Tensor

from lightning_opt.core.arguments import positive
from lightning_opt.core.measure.memory import MB, MemoryLimits
from lightning_opt.core.modules.blocks import Block
from lightning_opt.core.modules.trial import TrialStep
from lightning_opt.memory.checkpointing.methods.arguments import parts_of
from lightning_opt.memory.checkpointing.methods.policies import Plan, count_recomputed
from lightning_opt.memory.checkpointing.planning.standing_memory import (
    bucket_bytes,
    present_bytes,
    standing_bytes,
)
from lightning_opt.memory.checkpointing.planning.step_planner import Agreement, Outcome, StepPlanner

if TYPE_CHECKING:
    import lightning.pytorch as pl

SHARE_OF_FREE = 0.9
"""What of the free memory is used without a budget: the rest is for kernels and fragmentation."""


class BudgetError(ValueError):
    """Raised if no plan meets the budget.

    Attributes:
        smallest_mb: The smallest ``budget_mb`` that can be met, as measured.
        smallest: The smallest ``budget``.
    """

    def __init__(self, given: str, smallest_mb: float, smallest: float) -> None:
        super().__init__(
            f"ActivationCheckpointing cannot meet {given}: even with every block recomputed, a "
            f"step of this batch takes {smallest_mb:.1f} MB, and its activations peak at "
            f"{smallest:.3f} of what they take without recomputation. Raise it to "
            f"budget_mb={math.ceil(10 * smallest_mb) / 10:.1f} or "
            f"budget={math.ceil(1000 * smallest) / 1000:.3f}, make the batch smaller, or pass "
            "strict=False to train with the smallest peak."
        )
        self.smallest_mb, self.smallest = smallest_mb, smallest


class Budget:
    """A bound for the memory of a step.

    Args:
        budget_mb: Megabytes for all that the run holds; or
        budget: a share of the activations' peak without recomputation; or
            neither, for what the device has free.
        strict: Whether missing it is an error.
    """

    def __init__(self, budget_mb: float | None, budget: float | None, strict: bool) -> None:
        if budget_mb is not None and budget is not None:
            raise ValueError(
                f"budget_mb={budget_mb!r} and budget={budget!r} are two bounds. Give one of them."
            )
        self.budget_mb = None if budget_mb is None else positive("budget_mb", budget_mb)
        self.share = None if budget is None else positive("budget", budget)
        self.strict = strict

    def __str__(self) -> str:
        if self.budget_mb is not None:
            return f"budget_mb={self.budget_mb:g}"
        if self.share is not None:
            return f"budget={self.share:g}"
        return "the memory that the device has free"

    def activations(self, unchecked_peak: float, standing: int, room: float) -> float:
        """Return the bytes that it leaves for activations."""
        if self.budget_mb is not None:
            return self.budget_mb * MB - standing
        if self.share is not None:
            return self.share * unchecked_peak
        return room


@dataclass
class Planning:
    """What was measured and planned for one batch.

    Attributes:
        planner: The measurements.
        outcome: The plan and its measured peak.
        budget: Bytes for activations.
        shapes: Of the batch.
        seconds: Of a step with everything kept, if that was tried, and under the plan.
    """

    planner: StepPlanner
    outcome: Outcome
    budget: float
    shapes: Shapes
    seconds: tuple[float | None, float]

    @property
    def plan(self) -> Plan:
        """What is recomputed."""
        return self.outcome.plan

    def serves(self, shapes: Shapes) -> bool:
        """Return whether a batch of these shapes surely stays within the budget under the plan."""
        factor = growth(self.shapes, shapes)
        return factor <= 1 or factor * (self.outcome.peak + self.planner.unseen) <= self.budget

    def scalars(self) -> dict[str, float]:
        """Return what is logged."""
        before, after = self.seconds
        return {
            "checkpointing/unchecked_peak_mb": self.planner.unchecked_peak / MB,
            "checkpointing/predicted_peak_mb": self.outcome.solution.peak / MB,
            "checkpointing/peak_mb": self.outcome.peak / MB,
            **({} if before is None else {"checkpointing/unchecked_step_ms": 1e3 * before}),
            "checkpointing/step_ms": 1e3 * after,
        }

    def summary(self) -> str:
        """Return one sentence on the whole."""
        values = self.scalars()
        measured = "" if self.planner.unchecked_measured else " (predicted)"
        before = values.get("checkpointing/unchecked_step_ms")
        return (
            f"ActivationCheckpointing('auto'): {count_recomputed(self.plan)} of "
            f"{len(self.planner.profile.units)} blocks recomputed. Peak of activations "
            f"{values['checkpointing/unchecked_peak_mb']:.1f} MB{measured} -> "
            f"{values['checkpointing/peak_mb']:.1f} MB (predicted "
            f"{values['checkpointing/predicted_peak_mb']:.1f}, budget {self.budget / MB:.1f}); "
            f"step {'not tried' if before is None else f'{before:.1f} ms'} -> "
            f"{values['checkpointing/step_ms']:.1f} ms."
        )

    def details(self, block: Block) -> dict[str, float | int]:
        """Return what is known of one block, for a table."""
        for order, unit in enumerate(self.planner.profile.units):
            if unit.block == block:
                return {
                    "order": order,
                    "calls": unit.calls,
                    "keeping MB": unit.internals / MB,
                    "recomputing ms": 1e3 * self.planner.items[order].options[0].seconds,
                }
        return {}


def plan_for_batch(
    trainer: pl.Trainer,
    pl_module: pl.LightningModule,
    batch: Any,
    batch_idx: int,
    blocks: Sequence[Block],
    budget: Budget,
    first: Planning | None,
) -> Planning:
    """Return a plan for this batch.

    With several processes only the first batch is measured, when all of them do it. For a larger
    batch that may miss the budget, and may be one rank's alone, that rank recomputes as much as
    there is; with sharded parameters the first plan stays, with a warning.

    Raises:
        BudgetError: If none meets the budget and that is strict.
    """
    shapes = batch_shapes(batch)
    sharded = isinstance(trainer.strategy, (FSDPStrategy, ModelParallelStrategy))
    if first is not None:
        if sharded:
            warnings.warn(
                "ActivationCheckpointing('auto'): a larger batch may exceed "
                f"{budget}. With sharded parameters all processes must recompute alike, and the "
                "others know nothing of this batch, so the plan stays. Have the largest batch "
                "first or as worst_batch, or lower the budget.",
                stacklevel=2,
            )
            return replace(first, shapes=shapes)
        if trainer.world_size > 1:
            least = first.planner.smallest()
            outcome = replace(first.outcome, plan=first.planner.make_plan(least), solution=least)
            return replace(first, outcome=outcome, shapes=shapes)
    step = TrialStep(trainer, pl_module, batch, batch_idx)
    full = standing_bytes(pl_module, trainer.optimizers)
    standing = full + bucket_bytes(trainer.strategy.model)
    pending = full - present_bytes(pl_module, trainer.optimizers)
    agreement = _agreement(trainer)
    limits = MemoryLimits(pl_module.device, host=pl_module.device.type != "cuda")
    room = -agreement.largest(pending - SHARE_OF_FREE * limits.room())
    # A recomputed segment of sharded blocks gathers parameters again, and in an order of its own.
    planner = StepPlanner(
        step, blocks, pl_module.device, segments=not sharded, room=room, agreement=agreement
    )
    unchecked_peak = planner.unchecked_peak + planner.unseen
    # What a share is of was settled by the first batch: a longer one has no larger budget.
    limit = first.budget if first else budget.activations(unchecked_peak, standing, room)
    outcome = planner.plan(limit)
    if not outcome.fits:
        peak = outcome.peak + planner.unseen
        error = BudgetError(str(budget), (peak + standing) / MB, peak / unchecked_peak)
        if budget.strict and first is None:  # later it would end a run in mid-epoch
            raise error
        warnings.warn(f"{error} The plan with the smallest peak is used.", stacklevel=2)
    before = min(planner.time([]) for _ in range(2)) if planner.unchecked_measured else None
    after = min(planner.time(outcome.plan) for _ in range(2))
    return Planning(planner, outcome, limit, shapes, (before, after))


def _agreement(trainer: pl.Trainer) -> Agreement:
    if trainer.world_size == 1:
        return Agreement()

    def largest(value: float) -> float:
        mine = torch.tensor(value, dtype=torch.float64, device=trainer.strategy.root_device)
        torch.distributed.all_reduce(mine, torch.distributed.ReduceOp.MAX)
        return float(mine)

    return Agreement(trainer.strategy.broadcast, largest)


Shapes: TypeAlias = tuple[tuple[int, ...], ...]
"""Of the tensors of a batch, in order."""


def batch_shapes(batch: Any) -> Shapes:
    """Return the shapes of the tensors of a batch, whatever it is made of."""
    return tuple(tuple(tensor.shape) for tensor in _tensors(batch, set()))


def _tensors(value: Any, seen: set[int]) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif id(value) not in seen:
        seen.add(id(value))
        for part in parts_of(value):
            yield from _tensors(part, seen)


def growth(known: Shapes, other: Shapes) -> float:
    """Return by what factor activations grow at most from one batch to another.

    They grow with the number of elements, and those of attention with one dimension once more. Of
    smaller batches it is at most 1.
    """
    elements = [sum(map(math.prod, shapes)) for shapes in (known, other)]
    more = elements[1] / max(1, elements[0])
    if [*map(len, known)] != [*map(len, other)]:
        return max(1.0, more) ** 2
    longer = (
        size / max(1, before)
        for shape, bound in zip(other, known, strict=True)
        for size, before in zip(shape, bound, strict=True)
    )
    return more * max(1.0, *longer) if known else 1.0
