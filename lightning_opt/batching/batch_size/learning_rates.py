"""Scales learning rates during optimizer steps."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.optim import Optimizer


class ScaledRates:
    """Multiplies learning rates, but only while an optimizer steps.

    Schedulers and checkpoints see the unscaled rates.
    """

    def __init__(self, optimizers: Iterable[Optimizer], scale: float) -> None:
        self._scale = scale
        self._unscaled: list[tuple[dict[str, Any], Any]] = []
        self._handles = [
            handle
            for optimizer in optimizers
            for handle in (
                optimizer.register_step_pre_hook(self._multiply),
                optimizer.register_step_post_hook(self._restore),
            )
        ]

    def _multiply(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        for group in optimizer.param_groups:
            rate = group["lr"]
            self._unscaled.append((group, rate.clone() if isinstance(rate, Tensor) else rate))
            if isinstance(rate, Tensor):
                rate.mul_(self._scale)  # in place, because a captured CUDA graph reads this tensor
            else:
                group["lr"] = rate * self._scale

    def _restore(self, *args: Any) -> None:
        for group, rate in self._unscaled:
            if isinstance(rate, Tensor):
                group["lr"].copy_(rate)
            else:
                group["lr"] = rate
        self._unscaled = []

    def close(self) -> None:
        self._restore()
        for handle in self._handles:
            handle.remove()
