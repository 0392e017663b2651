"""What is wrong with a step, told from its loss and the norm of its gradient.

Written once for Python floats and for tensors on a device (see :mod:`lightning_opt.core.scalars`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

from lightning_opt.core.scalars import (
    Condition,
    Scalar,
    isfinite,
    logical_and,
    read_scalars,
    stack_scalars,
    where,
)
from lightning_opt.core.sharding import mean_over_ranks
from lightning_opt.core.statistics import LogBand

Kind: TypeAlias = Literal[
    "nonfinite_loss", "nonfinite_gradient", "loss_spike", "gradient_spike", "nonfinite_weight"
]

LARGEST_NORM = math.sqrt(torch.finfo(torch.float32).max)
"""About 1.8e19. A gradient beyond it is finite, but its square is not, and an optimizer that keeps
second moments (Adam and its kin) would never move that parameter again."""


class Symptoms(NamedTuple):
    """What one step of one optimizer showed: two values, and flags that are 0 or not.

    Attributes:
        loss: Loss of the step, the mean over its micro-batches and over ranks.
        norm: Total norm of the gradient.
        bad_loss: Whether the loss of any rank is NaN or infinite.
        bad_norm: Whether the norm is NaN, infinite or above :data:`LARGEST_NORM`.
        high_loss: Whether the loss is a spike.
        high_norm: Whether the norm is a spike.
        overflow: Whether ``bad_norm`` is put down to the loss scale, not to the model or its data.
    """

    loss: Scalar
    norm: Scalar
    bad_loss: Scalar
    bad_norm: Scalar
    high_loss: Scalar
    high_norm: Scalar
    overflow: Scalar

    @property
    def skip(self) -> Condition:
        """Whether the update must not happen, for a fault or an overflow."""
        return self.bad_loss + self.bad_norm + self.high_loss + self.high_norm > 0

    @property
    def fault(self) -> Condition:
        """Whether the step is to leave no trace at all; the data of an overflow is sound."""
        return logical_and(self.skip, self.overflow == 0)

    @property
    def kind(self) -> Kind | None:
        """The gravest fault; None for a good step. Only for symptoms that were read to the host."""
        if self.bad_loss:
            return "nonfinite_loss"
        if self.bad_norm:
            return None if self.overflow else "nonfinite_gradient"
        if self.high_loss:
            return "loss_spike"
        return "gradient_spike" if self.high_norm else None

    def read(self) -> Symptoms:
        """Return the same as floats; waits for the device, once."""
        if not any(isinstance(value, Tensor) for value in self):
            return self
        return Symptoms(*read_scalars(self))


class Detector:
    """Finds symptoms. The state, a plain ``dict``, holds the history that spikes are told from.

    Args:
        spike: Deviations above the usual at which a loss or a norm is a spike, in the logarithm
            (see :class:`~lightning_opt.Robust`); None looks for no spikes.
        patience: Spikes in a row after which their level is accepted as the usual one.
    """

    def __init__(self, spike: float | None, patience: int) -> None:
        self._usual = None if spike is None else LogBand(k=spike, patience=patience)

    def init(self) -> dict[str, Any]:
        """Return the state before the first step."""
        if self._usual is None:
            return {}
        return {"loss": self._usual.init(), "norm": self._usual.init()}

    def examine(
        self,
        loss: Scalar,
        norm: Scalar,
        state: dict[str, Any],
        *,
        loss_scale: Scalar | None = None,
        reduce_on: torch.device | None = None,
    ) -> Symptoms:
        """Look at one step, and let it into the history.

        Args:
            loss: This rank's loss.
            norm: Total norm of the gradient, without loss scale.
            state: From :meth:`init`, updated in place.
            loss_scale: The scale of an fp16 loss scaler. A gradient that is not finite while the
                loss is is then an overflow: the scaler's business, which halves the scale. At a
                scale below 1 there is nothing left to blame on it.
            reduce_on: The device on which ranks reduce; None for a single process. All ranks then
                get the same symptoms, from one all-reduce of three numbers.
        """
        bad_norm = where(norm <= LARGEST_NORM, 0.0, 1.0)
        high_norm = self._is_spike(norm, state, "norm")
        if reduce_on is not None:
            # A NaN or an infinity of one rank is in the sum, so that the loss needs no flag.
            loss, bad_norm, high_norm = _of_all_ranks([loss, bad_norm, high_norm], reduce_on)
        bad_loss = where(isfinite(loss), 0.0, 1.0)
        high_loss = self._is_spike(loss, state, "loss")
        overflow: Scalar = 0.0
        if loss_scale is not None:
            overflow = where(
                logical_and(logical_and(bad_norm > 0, bad_loss == 0), loss_scale >= 1.0), 1.0, 0.0
            )
        return Symptoms(loss, norm, bad_loss, bad_norm, high_loss, high_norm, overflow)

    def _is_spike(self, value: Scalar, state: dict[str, Any], name: str) -> Scalar:
        if self._usual is None:
            return 0.0
        threshold = self._usual.limit(value, state[name])
        return where(logical_and(value > threshold, isfinite(value)), 1.0, 0.0)


def _of_all_ranks(values: Sequence[Scalar], device: torch.device) -> list[Scalar]:
    """Return the mean of each over all ranks: floats for floats, else tensors that nobody read."""
    if any(isinstance(value, Tensor) for value in values):
        return list(mean_over_ranks(stack_scalars(values).to(device)).unbind())
    # Numbers that were on the host go back there, which waits.
    return mean_over_ranks(torch.tensor(values, dtype=torch.float64, device=device)).tolist()
