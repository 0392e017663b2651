"""Clipping what enters the residual, so that an outlier does not drip out of it for steps to come.

References:
    Lin, Han, Mao, Wang and Dally (2018), *Deep Gradient Compression: Reducing the Communication
    Bandwidth for Distributed Training* (local gradient clipping).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lightning_opt.core.numerics.scalars import Scalar
from lightning_opt.strategies.chunks import is_finite


def clip_locally(gradient: Tensor, bound: Scalar, algorithm: str, world: int) -> None:
    """Clip one rank's gradient before compression, in place; one that is not finite stays so.

    Nothing is read, so that a device is not waited for.

    The mean over ``world`` ranks of independent gradients of norm ``bound / sqrt(world)`` each has
    a norm of at most that, and would of aligned ones be no longer than ``bound``.

    Args:
        gradient: A bucket, flat.
        bound: ``gradient_clip_val``, in the gradient's unit.
        algorithm: ``"norm"`` or ``"value"``.
        world: Number of ranks.
    """
    if algorithm == "value":
        limit = torch.where(is_finite(gradient), bound, math.inf)
        gradient.clamp_(-limit, limit)
        return
    wide = torch.promote_types(gradient.dtype, torch.float32)
    norm = torch.linalg.vector_norm(gradient, dtype=wide)
    gradient.mul_((bound / math.sqrt(world) / norm).clamp_(max=1.0))
