"""Weights of batches, their sums over ranks, and the factor that turns sums into means."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor

from lightning_opt.batching.loader_sizes import batch_size_of
from lightning_opt.core.arguments import check_at_least
from lightning_opt.core.modules.batches import UnsplittableBatchError, read_batch
from lightning_opt.core.modules.sharding import Groups, reads_are_free, reduce_over
from lightning_opt.core.numerics.scalars import Scalar, wide_dtype


def windows_by_step(schedule: int | Mapping[int, int]) -> dict[int, int]:
    """Return the number of batches per window by optimizer step, sorted by step."""
    if not isinstance(schedule, Mapping):
        return {0: check_at_least("schedule", schedule, 1)}
    if not schedule:
        raise ValueError("schedule must have an entry, such as {0: 1, 1000: 4}; it is empty.")
    # Keys from a configuration file may be strings.
    return {
        check_at_least("a step of schedule", int(step), 0): check_at_least("schedule", batches, 1)
        for step, batches in sorted(schedule.items(), key=lambda entry: int(entry[0]))
    }


def batches_for(effective_batch: int, loader: Any, ranks: int) -> int:
    """Return how many batches of all ranks together have about ``effective_batch`` samples."""
    size = batch_size_of(loader)
    if size is None:
        raise ValueError(
            "Accumulation(effective_batch=...) needs a DataLoader with a batch size, and "
            f"{type(loader).__name__} has none. Give schedule=, the number of batches, instead."
        )
    samples = size * ranks
    batches = max(1, round(effective_batch / samples))
    if batches * samples != effective_batch:
        rank_zero_warn(
            f"effective_batch={effective_batch} is not a multiple of the {samples} samples of a "
            f"batch over all ranks: windows have {batches} batches, that is {batches * samples} "
            "samples."
        )
    return batches


def count_samples(batches: Iterable[Any]) -> float:
    """Return the number of samples of all batches together."""
    try:
        return float(sum(read_batch(entry).samples for entry in batches))
    except UnsplittableBatchError as error:
        raise UnsplittableBatchError(
            f"Accumulation(normalize='samples') cannot count the samples: {error} Or give "
            "Accumulation(count=...), a function of the batch, or normalize='batches'."
        ) from error


def count_with(count: Callable[[Any], Any], batch: Any) -> Scalar:
    """Return the user's count of a batch: a tensor if it is on an accelerator, else a float."""
    weight = count(batch)
    if isinstance(weight, Tensor):
        weight = weight.detach()
        if not reads_are_free(weight.device):
            return weight.to(wide_dtype(weight.device))
    if weight < 0:
        raise ValueError(f"count must not return a negative number, got {weight}.")
    return float(weight)


def sum_over_ranks(total: Scalar, device: torch.device, groups: Groups) -> tuple[Scalar, int]:
    """Return the sum over ranks and the number of ranks. The sum is a tensor only on a GPU."""
    if not groups:
        return total, 1
    value = torch.as_tensor(total, dtype=torch.float64, device=device).clone()
    reduce_over(value, groups)
    world = dist.get_world_size(groups[0])
    return value.item() if reads_are_free(device) else value, world


def quotient(expected: float, total: Scalar) -> Scalar:
    """Return ``expected / total``, the factor on the gradients; 1 if the total weight is 0."""
    if isinstance(total, Tensor):
        return torch.where(total > 0, expected / total.clamp(min=1e-30), 1.0)
    return expected / total if total > 0 else 1.0
