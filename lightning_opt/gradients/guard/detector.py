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

VERDICTS: tuple[Kind | None, ...] = (
    None, None, "gradient_spike", "loss_spike", "nonfinite_gradient", "nonfinite_loss",
)  # fmt: skip
"""From good to grave. At place 1 stands an overflow that is put down to the loss scale, not to the
model or its data."""

OVERFLOW = 1

LARGEST_NORM = math.sqrt(torch.finfo(torch.float32).max)
"""About 1.8e19. A gradient beyond it is finite, but its square is not, and an optimizer that keeps
second moments (Adam and its kin) would never move that parameter again."""


class Symptoms(NamedTuple):
    """What one step of one optimizer showed.

    Attributes:
        loss: Loss of the step, the mean over its micro-batches and over ranks.
        norm: Total norm of the gradient.
        verdict: A place in :data:`VERDICTS`.
    """

    loss: Scalar
    norm: Scalar
    verdict: Scalar

    @property
    def skip(self) -> Condition:
        """Whether the update must not happen, for a fault or an overflow."""
        return self.verdict > 0

    @property
    def fault(self) -> Condition:
        """Whether the step is to leave no trace at all; the data of an overflow is sound."""
        return self.verdict > OVERFLOW

    @property
    def kind(self) -> Kind | None:
        """The fault; None for a good step. Only for symptoms that were read to the host."""
        return VERDICTS[int(self.verdict)]

    def read(self) -> Symptoms:
        """Return the same as floats; waits for the device, once."""
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
        spike = where(self._is_spike(loss, state, "loss") > 0, 3.0, where(high_norm > 0, 2.0, 0.0))
        bad_gradient: Scalar = 4.0
        if loss_scale is not None:
            bad_gradient = where(loss_scale >= 1.0, float(OVERFLOW), 4.0)
        finite = where(bad_norm > 0, bad_gradient, spike)
        return Symptoms(loss, norm, where(isfinite(loss), finite, 5.0))

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
