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

HOST = torch.device("cpu")


def exp(x: float) -> float:
    """Return e to the power of ``x``; infinity where that overflows, as on a device."""
    try:
        return math.exp(x)
    except OverflowError:
        return math.inf


class DeviceCopy:
    """What a device works with in place of a state that stands beside it, and its constants."""

    def __init__(self, device: torch.device, **tensors: Any) -> None:
        self.device = device
        self.tensors: dict[str, Tensor] = {
            name: constant(value, device) for name, value in tensors.items()
        }


def constant(values: Any, device: torch.device) -> Tensor:
    """Return a number, or lists of them, as a tensor on ``device``. A copy from the host."""
    return torch.as_tensor(values, dtype=wide_dtype(device), device=device)


def wide_dtype(device: torch.device) -> torch.dtype:
    """Return the widest floating dtype of a device: float64, or float32 on MPS, which lacks it."""
    return torch.float32 if device.type == "mps" else torch.float64


def move(tensor: Tensor, device: torch.device) -> Tensor:
    """Return ``tensor`` on ``device``, without waiting unless that is the host.

    A copy to the host that does not wait is garbage until the device has caught up.
    """
    return tensor.to(device, non_blocking=device.type != "cpu")


def stack_scalars(values: Sequence[Scalar]) -> Tensor:
    """Return scalars as a tensor on the first of their devices but the host, and read none."""
    devices = [value.device for value in values if isinstance(value, Tensor)] or [HOST]
    home = next((device for device in devices if device.type != "cpu"), devices[0])
    wide = wide_dtype(home)
    tensors = [
        move(v, home) if isinstance(v, Tensor) else torch.full((), v, dtype=wide, device=home)
        for v in values
    ]
    return torch.stack(tensors).to(wide)


def read_scalars(values: Sequence[Scalar]) -> list[float]:
    """Return scalars as floats; where they are tensors this waits for the device, once."""
    if not any(isinstance(value, Tensor) for value in values):
        return [float(value) for value in values]
    return stack_scalars(values).tolist()  # as its caller asked


def to_plain(value: Any) -> Any:
    """Return ``value`` with every tensor in it on the CPU and every 0-dimensional one a number.

    This waits for the device. It is meant for checkpoints and reports. A :class:`DeviceCopy` in a
    dict is left out.
    """
    if isinstance(value, Tensor):
        return value.item() if value.ndim == 0 else value.detach().cpu().clone()  # see above
    if isinstance(value, dict):
        return {key: to_plain(own) for key, own in value.items() if not isinstance(own, DeviceCopy)}
    if isinstance(value, (list, tuple)):
        return [to_plain(item) for item in value]
    return value
