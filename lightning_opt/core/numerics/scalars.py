"""Scalars of a training run: Python floats on a CPU, 0-dimensional tensors on a device.

On a CPU Python floats are cheapest. On an accelerator a scalar must stay a tensor, because reading
it makes the host wait for the device. Arithmetic operators work on both; these functions cover
other operations. They wait for the device, or copy from host memory, only if their docstring
mentions it.
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


def exp(x: float) -> float:
    """Return e to the power of ``x``; infinity on overflow, as PyTorch does."""
    try:
        return math.exp(x)
    except OverflowError:
        return math.inf


def where(condition: Condition, value: Scalar, other: Scalar) -> Scalar:
    """Return ``value`` where ``condition`` holds, else ``other``."""
    if isinstance(condition, Tensor):
        return torch.where(condition, value, other)
    return value if condition else other


class DeviceCache:
    """Constants and buffers of a statistic on a device. Checkpoints omit them."""

    def __init__(self, device: torch.device, **tensors: Any) -> None:
        self.device = device
        self.tensors: dict[str, Tensor] = {
            name: constant(value, device) for name, value in tensors.items()
        }


def constant(values: Any, device: torch.device) -> Tensor:
    """Return a number, or lists of them, as a tensor on ``device``. Copies from the host."""
    return torch.as_tensor(values, dtype=wide_dtype(device), device=device)


def wide_dtype(device: torch.device) -> torch.dtype:
    """Return the widest floating dtype of a device: float64, or float32 on MPS, which lacks it."""
    return torch.float32 if device.type == "mps" else torch.float64


def move(tensor: Tensor, device: torch.device) -> Tensor:
    """Return ``tensor`` on ``device``. A copy to the host waits for the device.

    Otherwise the host could read the copy before it is complete.
    """
    return tensor.to(device, non_blocking=device.type != "cpu")


def stack_scalars(values: Sequence[Scalar]) -> Tensor:
    """Return scalars as one tensor, on the first accelerator among their devices, else the CPU."""
    devices = [value.device for value in values if isinstance(value, Tensor)]
    home = next((device for device in devices if device.type != "cpu"), torch.device("cpu"))
    wide = wide_dtype(home)
    tensors = [
        move(v, home) if isinstance(v, Tensor) else torch.full((), v, dtype=wide, device=home)
        for v in values
    ]
    return torch.stack(tensors).to(wide)


def read_scalars(values: Sequence[Scalar]) -> list[float]:
    """Return scalars as floats. Waits for the device, once, if there are tensors."""
    if not any(isinstance(value, Tensor) for value in values):
        return [float(value) for value in values]
    return stack_scalars(values).tolist()


def _is_float_scalar(value: Any) -> bool:
    return isinstance(value, Tensor) and value.ndim == 0 and value.is_floating_point()


def to_plain(value: Any) -> Any:
    """Return ``value`` with tensors on the CPU and 0-dimensional tensors as numbers.

    For checkpoints and reports. It waits for the device, once for all numbers of a dict. Each
    :class:`DeviceCache` in a dict is omitted.
    """
    if isinstance(value, Tensor):
        return value.item() if value.ndim == 0 else value.detach().cpu().clone()
    if isinstance(value, dict):
        kept = {key: item for key, item in value.items() if not isinstance(item, DeviceCache)}
        scalars = {key: item for key, item in kept.items() if _is_float_scalar(item)}
        read = dict(zip(scalars, read_scalars([*scalars.values()]), strict=True))
        return {key: read[key] if key in read else to_plain(item) for key, item in kept.items()}
    if isinstance(value, (list, tuple)):
        return [to_plain(item) for item in value]
    return value
