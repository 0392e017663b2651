"""Scalar arithmetic that is written once and runs on the host or on a device.

A statistic of a training run is a handful of scalars. On a CPU they are cheapest as Python floats;
on an accelerator they must stay 0-dimensional tensors, because reading one stops the host until
the device has caught up. Operators work alike on both; the functions here cover the rest. None of
them reads a tensor, and none creates one from host memory, which would also wait for the device.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

Scalar: TypeAlias = "float | Tensor"
"""A Python number, or a 0-dimensional tensor (float64 where the device has it)."""

Condition: TypeAlias = "bool | Tensor"


def isfinite(x: Scalar) -> Condition:
    """Return whether ``x`` is neither infinite nor NaN."""
    return torch.isfinite(x) if isinstance(x, Tensor) else math.isfinite(x)


def log(x: Scalar) -> Scalar:
    """Return the natural logarithm; minus infinity at 0, NaN below (on the host too)."""
    if isinstance(x, Tensor):
        return torch.log(x)
    if x > 0:
        return math.log(x)
    return -math.inf if x == 0 else math.nan


def exp(x: Scalar) -> Scalar:
    """Return e to the power of ``x``; infinity where that overflows (on the host too)."""
    if isinstance(x, Tensor):
        return torch.exp(x)
    try:
        return math.exp(x)
    except OverflowError:
        return math.inf


def sqrt(x: Scalar) -> Scalar:
    """Return the square root."""
    return torch.sqrt(x) if isinstance(x, Tensor) else math.sqrt(x)


def minimum(a: Scalar, b: Scalar) -> Scalar:
    """Return the smaller of two scalars, of which ``b`` wins where ``a`` is NaN on the host."""
    return where(a < b, a, b)


def maximum(a: Scalar, b: Scalar) -> Scalar:
    """Return the larger of two scalars, of which ``b`` wins where ``a`` is NaN on the host."""
    return where(a > b, a, b)


def clamp(x: Scalar, bound: Scalar) -> Scalar:
    """Return ``x`` brought into ``[-bound, bound]``."""
    return maximum(minimum(x, bound), -bound)


def logical_and(a: Condition, b: Condition) -> Condition:
    """Return ``a and b`` without reading either of them."""
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        return a & b
    return a and b


def where(condition: Condition, a: Scalar, b: Scalar) -> Scalar:
    """Return ``a`` where ``condition`` holds and ``b`` elsewhere; both are already evaluated."""
    if not isinstance(condition, Tensor):
        return a if condition else b
    if not isinstance(a, Tensor) and not isinstance(b, Tensor):
        # Two Python numbers would give the default dtype, float32, and lose digits.
        a = fill_like(condition, a)
    return torch.where(condition, a, b)


def as_kind_of(like: Scalar, value: Scalar) -> Scalar:
    """Return ``value`` as a tensor if ``like`` is one: a resumed state is numbers at first."""
    if isinstance(like, Tensor) and not isinstance(value, Tensor):
        return fill_like(like, value)
    return value


def fill_like(like: Tensor, value: float) -> Tensor:
    """Return a 0-dimensional tensor of ``value`` on the device of ``like``, made on that device."""
    return torch.full((), value, dtype=wide_dtype(like.device), device=like.device)


def wide_dtype(device: torch.device) -> torch.dtype:
    """Return the widest floating dtype of a device: float64, or float32 on MPS, which lacks it."""
    return torch.float32 if device.type == "mps" else torch.float64


def stack_scalars(values: Sequence[Scalar]) -> Tensor:
    """Return scalars, of which at least one is a tensor, as a tensor on its device; reads none."""
    like = next(value for value in values if isinstance(value, Tensor))
    return torch.stack(
        [
            value.to(like.device, wide_dtype(like.device), non_blocking=True)
            if isinstance(value, Tensor)
            else fill_like(like, value)
            for value in values
        ]
    )


def read_scalars(values: Sequence[Scalar]) -> list[float]:
    """Return scalars as floats; where they are tensors this waits for the device, once."""
    if not any(isinstance(value, Tensor) for value in values):
        return [float(value) for value in values]
    return stack_scalars(values).tolist()  # as its caller asked


def to_plain(value: Any) -> Any:
    """Return ``value`` with every tensor in it on the CPU and every 0-dimensional one a number.

    This waits for the device. It is meant for checkpoints and reports.
    """
    if isinstance(value, Tensor):
        return value.item() if value.ndim == 0 else value.detach().cpu().clone()  # see above
    if isinstance(value, dict):
        return {key: to_plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_plain(item) for item in value]
    return value
