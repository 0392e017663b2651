"""What is wrong with a step, told from its loss and the norm of its gradient.

On a CPU that is arithmetic of floats. On a device a table is asked, which costs few launches.
"""

from __future__ import annotations

import math
from itertools import product
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_opt.core.modules.sharding import Groups
from lightning_opt.core.numerics.scalars import Condition, DeviceCache, Scalar, move, stack_scalars
from lightning_opt.core.numerics.statistics import BEYOND, WITHIN, DeviceBands, LogBand

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
        norm: Total norm of the gradient, the largest over ranks.
        verdict: A place in :data:`VERDICTS`.
        skip: Whether the update must not happen, for a fault or an overflow; 0 or 1 on a device.
        fault: Whether the step is to leave no trace at all; the data of an overflow is sound.
        barrier: On a device what keeps a skipped step out of statistics if it is added to the norm.
    """

    loss: Scalar
    norm: Scalar
    verdict: Scalar
    skip: Condition
    fault: Condition
    barrier: Scalar = 0.0

    @property
    def kind(self) -> Kind | None:
        """The fault; None for a good step. Only for symptoms that were read to the host."""
        return VERDICTS[int(self.verdict)]

    def known(self, verdict: float) -> Symptoms:
        """Return the same with a verdict that was read."""
        return Symptoms(self.loss, self.norm, verdict, verdict > 0, verdict > OVERFLOW)


def judge(bad_loss: bool, bad_norm: bool, high_loss: bool, high_norm: bool, scaled: bool) -> int:
    """Return the place in :data:`VERDICTS` for what was found; the gravest counts.

    Args:
        bad_loss: Whether the loss is NaN or infinite.
        bad_norm: Whether the norm is, or beyond :data:`LARGEST_NORM`.
        high_loss: Whether the loss is a spike.
        high_norm: Whether the norm is.
        scaled: Whether a loss scale of 1 or more is to blame for a bad gradient.
    """
    found = (bad_loss, 5), (bad_norm, OVERFLOW if scaled else 4), (high_loss, 3), (high_norm, 2)
    return next((place for here, place in found if here), 0)


def verdict_table() -> Tensor:
    """Return verdicts, by what was found of loss and norm, and what :class:`Symptoms` says of them.

    The first two dimensions are places among the finite numbers, which is 1 for those; the next two
    places in the band; the fifth whether there is a loss scale.
    """
    cases = product(*map(range, (3, 3, 3, 3, 2)))
    places = [judge(a != 1, b != 1, c == BEYOND, d == BEYOND, bool(e)) for a, b, c, d, e in cases]
    verdict = torch.tensor(places, dtype=torch.float32).view(3, 3, 3, 3, 2)
    barrier = torch.where(verdict > 0, math.inf, 0.0)
    return torch.stack([verdict, verdict > 0, verdict > OVERFLOW, barrier], -1)


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
        loss_scale: Scalar | None,
        reduce_on: torch.device,
        groups: Groups,
    ) -> Symptoms:
        """Look at one step, and let it into the history.

        Args:
            loss: This rank's loss.
            norm: Total norm of the gradient, without loss scale.
            state: From :meth:`init`, updated in place.
            loss_scale: The scale of an fp16 loss scaler; None without one. At 1 or more it is to
                blame for a gradient that is not finite.
            reduce_on: The device on which ranks gather.
            groups: Those ranks; none for a process that decides by itself. All of them then get the
                same symptoms, from one all-gather of two numbers.
        """
        if groups:
            loss, norm = _of_ranks(loss, norm, reduce_on, groups[0])
        if isinstance(loss, Tensor) or isinstance(norm, Tensor):
            return self._examine_on_device(stack_scalars([loss, norm]), state, loss_scale)
        high = []
        for name, value in (("loss", loss), ("norm", norm)):
            limit = math.inf if self._usual is None else self._usual.limit(value, state[name])
            high.append(bool(limit < value < math.inf))
        scaled = loss_scale is not None and bool(loss_scale >= 1.0)
        bad = not math.isfinite(loss), not norm <= LARGEST_NORM
        verdict = judge(*bad, high[0], high[1], scaled)
        return Symptoms(loss, norm, 0, False, False).known(verdict)

    def _examine_on_device(
        self, both: Tensor, state: dict[str, Any], loss_scale: Scalar | None
    ) -> Symptoms:
        copy = state.get("device")
        if copy is None or copy.device != both.device:
            largest = torch.finfo(both.dtype).max
            bounds = [[-largest, largest], [-largest, LARGEST_NORM]]
            copy = state["device"] = DeviceCache(both.device, bounds=bounds)
            copy.tensors["verdicts"] = verdict_table().to(both.device)
            if self._usual is not None:
                states = [state["loss"], state["norm"]]
                state["bands"] = DeviceBands(self._usual, states, both.device)
        places = torch.searchsorted(copy.tensors["bounds"], both[:, None])[:, 0]  # NaN is last
        high: list[Any] = [WITHIN, WITHIN]
        if self._usual is not None:
            x = both.log().nan_to_num(-math.inf, -math.inf, -math.inf)
            high = list(state["bands"].advance(x).split(1))
        scaled: Any = 0
        if loss_scale is not None:
            scaled = move(torch.as_tensor(loss_scale), both.device).ge(1.0).long().view(1)
        # An index of no dimension would be read by the host.
        found = copy.tensors["verdicts"][(*places.split(1), *high, scaled)][0]
        return Symptoms(*both.unbind(), *found.unbind())


def _of_ranks(loss: Scalar, norm: Scalar, device: Any, group: Any) -> tuple[Scalar, Scalar]:
    """Return the mean loss and the largest norm: floats for floats, else tensors, unread."""
    on_host = not (isinstance(loss, Tensor) or isinstance(norm, Tensor))
    own = stack_scalars([loss, norm]).to(device)
    every = own.new_empty(dist.get_world_size(group), 2)
    dist.all_gather(list(every.unbind()), own, group=group)
    # A NaN or an infinity of one rank is in both.
    both = torch.stack([every[:, 0].mean(), every[:, 1].amax()])
    mean, largest = both.tolist() if on_host else both.unbind()  # what was on the host goes back
    return mean, largest
