"""Weights and buffers that a run has damaged."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_opt.core.modules.sharding import Groups, local_part
from lightning_opt.core.numerics.norms import as_real


class DamageWatch:
    """Finds what became NaN or infinite. A mask of minus infinity was made so, and is no damage.

    Buffers are compared with what they were when they were first looked at; a weight has no reason
    to be anything but finite.
    """

    def __init__(self) -> None:
        self._seen: set[str] = set()
        self._meant: set[str] = set()

    def find(self, tensors: Mapping[str, Tensor], buffers: list[str], groups: Groups) -> list[str]:
        """Return the names of what is damaged on any rank. A collective, and waits for the device.

        Call it once before the first step, so that it knows how buffers are made.

        Args:
            tensors: Weights and buffers by name.
            buffers: Which of them are buffers.
            groups: The ranks that train together.
        """
        bad = nonfinite_names(tensors)
        self._meant |= set(bad) & (set(buffers) - self._seen)
        self._seen.update(buffers)
        of_ranks = gather([name for name in bad if name not in self._meant], groups)
        return list(dict.fromkeys(name for names in of_ranks for name in names))


def nonfinite_names(tensors: Mapping[str, Tensor]) -> list[str]:
    """Return the names of the floating tensors that hold a NaN or an infinity on this rank.

    Waits for the device.
    """
    parts = {name: as_real(local_part(tensor.detach())) for name, tensor in tensors.items()}
    floating = {n: t for n, t in parts.items() if t.is_floating_point() and t.numel()}
    if not floating:
        return []
    # The largest magnitude is NaN if any is, and unlike a sum of squares it cannot overflow.
    largest = [torch.linalg.vector_norm(tensor, math.inf) for tensor in floating.values()]
    flags = torch.stack([torch.isfinite(value).to(largest[0].device) for value in largest])
    return [name for name, finite in zip(floating, flags.tolist(), strict=True) if not finite]


def gather(value: Any, groups: Groups) -> list[Any]:
    """Return the value of every rank, in order. A collective, if there is more than one."""
    if not groups:
        return [value]
    values: list[Any] = [None] * dist.get_world_size(groups[0])
    dist.all_gather_object(values, value, group=groups[0])
    return values
