"""Detect a faulty step by its loss and its gradient norm."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import product
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_opt.core.modules.sharding import Groups
from lightning_opt.core.numerics.scalars import Condition, DeviceCache, Scalar, move, stack_scalars
from lightning_opt.core.numerics.statistics import BEYOND, WITHIN, DeviceBands, LogBand

if TYPE_CHECKING:
    import lightning.pytorch as pl

Kind: TypeAlias = Literal[
    "nonfinite_loss", "nonfinite_gradient", "loss_spike", "gradient_spike", "nonfinite_weight"
]

SPIKES = ("loss_spike", "gradient_spike")

KINDS_BY_CODE: tuple[Kind | None, ...] = (
    None, None, "gradient_spike", "loss_spike", "nonfinite_gradient", "nonfinite_loss",
)  # fmt: skip
"""The fault of each code, from mild to severe.

Code 0 is a good step. Code 1 is an overflow caused by the loss scale.
"""

OVERFLOW = 1

LARGEST_NORM = math.sqrt(torch.finfo(torch.float32).max)
"""About 1.8e19. The square of a larger gradient overflows float32.

A second moment (such as Adam's) would become infinite, and the parameter would never move again.
"""


def mean_loss(
    trainer: pl.Trainer, losses: Sequence[Tensor], loss_scale: Scalar | None, *, read: bool
) -> Scalar:
    """Return the unscaled mean loss of a step; 0 if ``losses`` is empty.

    Args:
        trainer: The Trainer.
        losses: One per backward pass. Lightning has multiplied them by the loss scale and divided
            them by ``accumulate_grad_batches``.
        loss_scale: The loss scale in ``losses``; None without one.
        read: Whether to return a float. Reading it waits for the device.
    """
    if not losses:
        return 0.0
    summed = losses[0] if len(losses) == 1 else stack_scalars(losses).sum()
    total: Scalar = summed.item() if read else summed
    if loss_scale is not None:
        total = total / loss_scale
    # Lightning divides by the length of a full window, even if the last window is shorter.
    part = trainer.accumulate_grad_batches / len(losses)
    return total if part == 1.0 else total * part


class Detection(NamedTuple):
    """The result for one step of one optimizer.

    Attributes:
        loss: Mean loss of the step, over its micro-batches and over ranks.
        norm: Total norm of the gradient, the largest over ranks.
        code: Index into :data:`KINDS_BY_CODE`.
        skip: Whether to skip the update, for a fault or an overflow; 0 or 1 on a device.
        fault: Whether the step has a fault. After a fault the buffers are restored. After an
            overflow they are kept, because the forward pass was finite.
        barrier: Infinity for a skipped step, else 0 (see :class:`GradientCallback`).
    """

    loss: Scalar
    norm: Scalar
    code: Scalar
    skip: Condition
    fault: Condition
    barrier: Scalar

    @property
    def kind(self) -> Kind | None:
        """The kind of fault; None for a good step or an overflow. The code must be on the host."""
        return KINDS_BY_CODE[int(self.code)]

    def on_host(self, code: float) -> Detection:
        """Return a copy with a code that was read to the host."""
        barrier = math.inf if code > 0 else 0.0
        return Detection(self.loss, self.norm, code, code > 0, code > OVERFLOW, barrier)


def fault_code(
    bad_loss: bool, bad_norm: bool, high_loss: bool, high_norm: bool, scaled: bool
) -> int:
    """Return the code of the most severe finding.

    Args:
        bad_loss: Whether the loss is NaN or infinite.
        bad_norm: Whether the norm is NaN, infinite or above :data:`LARGEST_NORM`.
        high_loss: Whether the loss is a spike.
        high_norm: Whether the norm is a spike.
        scaled: Whether there is a loss scale of at least 1. A bad norm is then an overflow.
    """
    found = (bad_loss, 5), (bad_norm, OVERFLOW if scaled else 4), (high_loss, 3), (high_norm, 2)
    return next((code for condition, code in found if condition), 0)


def _device_table() -> Tensor:
    """Return a table of ``code``, ``skip``, ``fault`` and ``barrier`` for all findings.

    Its dimensions are:

    1. loss: below its bounds (0), inside (1) or above (2, or NaN)
    2. norm: the same
    3. loss: ``MISSING``, ``WITHIN`` or ``BEYOND`` the :class:`LogBand`
    4. norm: the same
    5. whether the loss scale is at least 1
    6. the four fields
    """
    cases = product(*map(range, (3, 3, 3, 3, 2)))
    codes = [
        fault_code(a != 1, b != 1, c == BEYOND, d == BEYOND, bool(e)) for a, b, c, d, e in cases
    ]
    code = torch.tensor(codes, dtype=torch.float32).view(3, 3, 3, 3, 2)
    barrier = torch.where(code > 0, math.inf, 0.0)
    return torch.stack([code, code > 0, code > OVERFLOW, barrier], -1)


class Detector:
    """Detects faults, and spikes relative to the optimizer's history.

    The history is a plain ``dict``. On a CPU the detector computes with floats. On a device it
    looks up :func:`fault_code` in a table, which needs few kernel launches.

    Args:
        spike: A loss or a norm is a spike if its logarithm lies this many deviations above the mean
            (see :class:`~lightning_opt.Robust`). None detects no spikes.
        patience: Spikes in a row after which their level counts as the usual one.
    """

    def __init__(self, spike: float | None, patience: int) -> None:
        self._band = None if spike is None else LogBand(k=spike, patience=patience)

    def detect(
        self,
        loss: Scalar,
        norm: Scalar,
        history: dict[str, Any],
        *,
        loss_scale: Scalar | None,
        reduce_on: torch.device,
        groups: Groups,
    ) -> Detection:
        """Examine one step, and add it to the history.

        Args:
            loss: This rank's loss.
            norm: Total norm of the gradient, without loss scale.
            history: The optimizer's history, empty at first; updated in place.
            loss_scale: The scale of an fp16 loss scaler; None without one.
            reduce_on: The device for collectives.
            groups: The ranks that decide together; empty for a single process. One all-gather of
                two numbers gives all of them the same result.
        """
        if groups:
            loss, norm = _mean_loss_and_largest_norm(loss, norm, reduce_on, groups[0])
        if self._band is not None and "loss" not in history:
            history.update(loss=self._band.init(), norm=self._band.init())
        if isinstance(loss, Tensor) or isinstance(norm, Tensor):
            return self._detect_on_device(stack_scalars([loss, norm]), history, loss_scale)
        high = []
        for name, value in (("loss", loss), ("norm", norm)):
            limit = math.inf if self._band is None else self._band.limit(value, history[name])
            high.append(bool(limit < value < math.inf))
        scaled = loss_scale is not None and bool(loss_scale >= 1.0)
        bad_loss, bad_norm = not math.isfinite(loss), not norm <= LARGEST_NORM
        code = fault_code(bad_loss, bad_norm, high[0], high[1], scaled)
        return Detection(loss, norm, code, code > 0, code > OVERFLOW, math.inf if code else 0.0)

    def _detect_on_device(
        self, both: Tensor, history: dict[str, Any], loss_scale: Scalar | None
    ) -> Detection:
        cache = history.get("device")
        if cache is None or cache.device != both.device:
            largest = torch.finfo(both.dtype).max
            bounds = [[-largest, largest], [-largest, LARGEST_NORM]]
            cache = history["device"] = DeviceCache(both.device, bounds=bounds)
            cache.tensors["table"] = _device_table().to(both.device)
            if self._band is not None:
                states = [history["loss"], history["norm"]]
                history["bands"] = DeviceBands(self._band, states, both.device)
        # 0 is below the bounds, 1 inside, and 2 above or NaN.
        inside = torch.searchsorted(cache.tensors["bounds"], both[:, None])[:, 0]
        cases: list[Any] = [WITHIN, WITHIN]
        if self._band is not None:
            x = both.log().nan_to_num(-math.inf, -math.inf, -math.inf)
            cases = list(history["bands"].advance(x).split(1))
        scaled: Any = 0
        if loss_scale is not None:
            scaled = move(torch.as_tensor(loss_scale), both.device).ge(1.0).long().view(1)
        # The indices are 1-dimensional, because PyTorch reads a 0-dimensional index on the host.
        found = cache.tensors["table"][(*inside.split(1), *cases, scaled)][0]
        return Detection(*both.unbind(), *found.unbind())


def _mean_loss_and_largest_norm(
    loss: Scalar, norm: Scalar, device: Any, group: Any
) -> tuple[Scalar, Scalar]:
    """Return the mean loss and the largest norm over ranks; floats if both inputs are floats."""
    read = not (isinstance(loss, Tensor) or isinstance(norm, Tensor))
    own = stack_scalars([loss, norm]).to(device)
    ranks = own.new_empty(dist.get_world_size(group), 2)
    dist.all_gather(list(ranks.unbind()), own, group=group)
    # `mean` and `amax` propagate a NaN or an infinity of a single rank.
    both = torch.stack([ranks[:, 0].mean(), ranks[:, 1].amax()])
    mean, largest = both.tolist() if read else both.unbind()
    return mean, largest
