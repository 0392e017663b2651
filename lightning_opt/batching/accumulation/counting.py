"""What batches count in an accumulated gradient, and what it is divided by."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_opt.core.arguments import at_least
from lightning_opt.core.modules.batches import UnsplittableBatchError, batch_length
from lightning_opt.core.modules.sharding import Groups, reads_are_free, sum_over
from lightning_opt.core.numerics.scalars import Scalar, wide_dtype


def windows_by_step(schedule: int | dict[int, int]) -> dict[int, int]:
    """Return from which optimizer step on windows have how many batches."""
    if not isinstance(schedule, dict):
        return {0: at_least("schedule", schedule, 1)}
    if not schedule:
        raise ValueError("schedule must have an entry, such as {0: 1, 1000: 4}; it is empty.")
    # Keys of a configuration file may be text.
    return {
        at_least("a step of schedule", int(step), 0): at_least("schedule", batches, 1)
        for step, batches in sorted(schedule.items(), key=lambda entry: int(entry[0]))
    }


def count_samples(batch: Any, several: bool = False) -> float:
    """Return how many samples a batch has.

    Args:
        batch: Of a loader.
        several: Whether it has an entry for each of several loaders, None for one at its end; then
            those of all.

    Raises:
        UnsplittableBatchError: If that cannot be told.
    """
    try:
        if several:
            entries = batch.values() if isinstance(batch, Mapping) else batch
            return float(sum(batch_length(each) for each in entries if each is not None))
        return float(batch_length(batch))
    except UnsplittableBatchError as error:
        raise UnsplittableBatchError(
            f"Accumulation(normalize='samples') cannot count the samples: {error} Or give "
            "Accumulation(count=...), a function of the batch, or normalize='batches'."
        ) from error


def count_with(count: Callable[[Any], Any], batch: Any) -> Scalar:
    """Return what the user's function counts: a float where reading it is free."""
    counted = count(batch)
    if not isinstance(counted, Tensor):
        return float(counted)
    counted = counted.detach()
    return (
        float(counted) if reads_are_free(counted.device) else counted.to(wide_dtype(counted.device))
    )


def sum_over_ranks(total: Scalar, device: torch.device, groups: Groups) -> tuple[Scalar, int]:
    """Return the sum over ranks, a float where reading it is free, and how many there are."""
    if not groups:
        return total, 1
    value = torch.as_tensor(total, dtype=torch.float64, device=device).clone()
    sum_over(value, groups)
    world = dist.get_world_size(groups[0])
    return value.item() if reads_are_free(device) else value, world  # free on a CPU


def quotient(expected: float, total: Scalar) -> Scalar:
    """Return what gradients are multiplied with; 1 where nothing was counted and all are zero."""
    if isinstance(total, Tensor):
        return torch.where(total > 0, expected / total.clamp(min=1e-30), 1.0)
    return expected / total if total > 0 else 1.0
