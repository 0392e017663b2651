"""Running statistics of a scalar: a window of its values, and a band of what is usual.

Each is a small rule over a plain ``dict`` that holds its state, so that a checkpoint can take the
state as it is. A value that is a Python float is handled with Python floats; a value that is a
0-dimensional tensor is handled on its device without ever reading it. NaN and infinity never enter:
an update with one of them changes nothing.

Example:
    >>> window = Window(size=2)
    >>> state = window.init()
    >>> for value in (5.0, 1.0, 3.0, float("nan")):
    ...     window.update(state, value)
    >>> window.mean_std(state)
    (2.0, 1.0)
"""

from __future__ import annotations

import bisect
import math
from typing import Any, TypeAlias

import torch
from torch import Tensor

from lightning_opt.core.arguments import at_least, fraction, positive
from lightning_opt.core.scalars import (
    Scalar,
    as_kind_of,
    clamp,
    exp,
    isfinite,
    log,
    logical_and,
    maximum,
    sqrt,
    where,
    wide_dtype,
)

State: TypeAlias = dict[str, Any]
"""A statistic's state: numbers, lists of numbers, or tensors of them on a device."""


class Window:
    """The last ``size`` values, or all of them, with their mean, deviation and quantiles.

    Args:
        size: How many values to keep, at least 2; ``None`` keeps every value: eight bytes each, and
            a quantile costs an insertion on a CPU but a sort of the whole history on a device.
    """

    def __init__(self, size: int | None) -> None:
        self.size = None if size is None else at_least("window", size, 2)

    def init(self) -> State:
        """Return the state before any value."""
        return {"count": 0, "pushed": 0, "values": []}

    def update(self, state: State, value: Scalar) -> None:
        """Let ``value`` in, if it is finite; the oldest makes room in a full window."""
        if isinstance(value, Tensor):
            self._update_on_device(state, value)
        elif math.isfinite(value):
            values, count = self._on_host(state), int(state["count"])
            if self.size is None:
                bisect.insort(values, value)  # arrival order is not needed, so keep them sorted
            elif len(values) < self.size:
                values.append(value)
            else:
                values[count % self.size] = value
            state["count"] = state["pushed"] = count + 1

    def _update_on_device(self, state: State, value: Tensor) -> None:
        # The host does not know how many values were finite, only how many were offered, which is
        # enough to know that the buffer has room.
        state["pushed"] += 1
        self.place(state, value)
        values, count = state["values"], state["count"]
        slot = count % self.size if self.size is not None else count
        at_slot = torch.arange(len(values), device=value.device) == slot
        taken = torch.isfinite(value)
        state["values"] = torch.where(at_slot & taken, value, values)
        state["count"] = count + where(taken, 1, 0)

    def place(self, state: State, like: Scalar) -> None:
        """Move a resumed state to the device of ``like``, if that is a tensor.

        An update does this by itself; a statistic asked for before it does not know the device.
        """
        if isinstance(like, Tensor):
            _on_device(state, like, self.size or max(64, 1 << (state["pushed"] - 1).bit_length()))

    def mean_std(self, state: State) -> tuple[Scalar, Scalar]:
        """Return mean and population standard deviation of the values held; zeros if none."""
        values = state["values"]
        if isinstance(values, Tensor) and isinstance(state["count"], Tensor):
            held = self._held(state)
            n = held.sum().clamp(min=1)
            mean = torch.where(held, values, 0.0).sum() / n
            return mean, (torch.where(held, values - mean, 0.0).square().sum() / n).sqrt()
        listed = self._on_host(state)
        if not listed:
            return 0.0, 0.0
        center = math.fsum(listed) / len(listed)
        # `hypot` does not overflow where squares would.
        return center, math.hypot(*[x - center for x in listed]) / math.sqrt(len(listed))

    def quantile(self, state: State, q: float) -> Scalar:
        """Return the ``q``-quantile (0 to 1, linear in between); infinity if none is held."""
        values = state["values"]
        if isinstance(values, Tensor) and isinstance(state["count"], Tensor):
            held = self._held(state)
            ordered = torch.where(held, values, math.inf).sort().values
            # In float64: an integer tensor times a float would be float32.
            place = (held.sum() - 1).clamp(min=0).to(values.dtype) * q
            low = place.floor()
            pair = ordered[torch.stack([low, place.ceil()]).long()]
            # At a whole position both neighbours are one value, also where that is infinity.
            return torch.where(low == place, pair[0], torch.lerp(pair[0], pair[1], place - low))
        ordered_list = self._on_host(state) if self.size is None else sorted(self._on_host(state))
        if not ordered_list:
            return math.inf
        position = q * (len(ordered_list) - 1)
        below = math.floor(position)
        above = ordered_list[min(below + 1, len(ordered_list) - 1)]
        return float(ordered_list[below] + (above - ordered_list[below]) * (position - below))

    def _on_host(self, state: State) -> list[float]:
        """Return the values as a list, in order of size where all are kept."""
        if isinstance(state["values"], Tensor):  # once, after a run that kept them on a device
            values = state["values"][: int(state["count"])].tolist()
            state["values"] = sorted(values) if self.size is None else values
        return state["values"]  # type: ignore[no-any-return]

    @staticmethod
    def _held(state: State) -> Tensor:
        values, count = state["values"], state["count"]
        return torch.arange(len(values), device=values.device).lt(count)


class LogBand:
    """The usual values of a positive series, as a band of their logarithm that no spike can widen.

    Losses and norms of a training spread over factors, not over differences, so mean and deviation
    are those of the logarithm, averaged exponentially. The band ends at ``exp(mean + k * std)``. A
    value enters the average only as far as ``winsor`` deviations from the mean, and one beyond the
    band moves the mean without widening it. After ``patience`` values in a row beyond it the band
    moves to their level.

    In the warm-up the deviation is that from one value to the next (von Neumann's estimate, half
    the mean square of the differences), which a trend does not enter, and the weight of a new value
    in the average is ``3 / (n + 3)`` after ``n`` values until it reaches ``1 - decay``.

    Args:
        k: Standard deviations above the mean, above 0.
        decay: Share of the old estimate that is kept at each value, in [0, 1).
        winsor: Deviations from the mean beyond which a value counts as no further, above 0.
        warmup: Values to see before the band ends anywhere, at least 2.
        patience: Values in a row beyond the band after which it moves; None for never.
        min_std: The band's deviation is at least this (of the natural logarithm).
    """

    WARMUP_STD = 0.5
    """Deviation assumed at least while it is not yet known; a factor of 1.6."""

    LEAD = 3.0
    """How much more than an equal share a new value weighs at first."""

    def __init__(
        self,
        k: float = 3.0,
        decay: float = 0.99,
        winsor: float = 2.0,
        warmup: int = 20,
        patience: int | None = 25,
        min_std: float = 0.1,
    ) -> None:
        self.k, self.decay = positive("k", k), fraction("decay", decay)
        self.winsor = positive("winsor", winsor)
        self.warmup = at_least("warmup", warmup, 2)
        self.patience = None if patience is None else at_least("patience", patience, 1)
        self.min_std = positive("min_std", min_std)

    def init(self) -> State:
        """Return the state before any value."""
        return {
            "count": 0,
            "mean": 0.0,
            "var": 0.0,
            "previous": 0.0,
            "streak": 0,
            "streak_sum": 0.0,
        }

    def limit(self, value: Scalar, state: State) -> Scalar:
        """Return the threshold for this value, then move the band."""
        # A device rounds `exp` and division otherwise than Python does, and the step after a resume
        # must round as the steps around it.
        count, mean, var = (as_kind_of(value, state[key]) for key in ("count", "mean", "var"))
        x = log(value)  # minus infinity for a value of 0, which then does not enter
        finite, warm, first = isfinite(x), count < self.warmup, count < 1
        std = maximum(sqrt(var), self.min_std)
        threshold = where(warm, math.inf, exp(mean + self.k * std))
        over = logical_and(value > threshold, finite)

        width = self.winsor * where(warm, maximum(std, self.WARMUP_STD), std)
        weight = maximum(1.0 - self.decay, self.LEAD / (count + self.LEAD))
        delta = where(first, x - mean, clamp(x - mean, width))
        jump = where(first, 0.0, clamp(x - state["previous"], width))
        settling = var + (0.5 * jump * jump - var) / maximum(count, 1)
        following = where(over, var, (1.0 - weight) * (var + weight * delta * delta))

        # A value that is not finite changes nothing; it neither extends nor ends a streak.
        state["count"] = count + where(finite, 1, 0)
        state["mean"] = where(finite, mean + weight * delta, mean)
        state["var"] = where(finite, where(warm, settling, following), var)
        state["previous"] = where(finite, x, state["previous"])
        broken = logical_and(value <= threshold, finite)
        state["streak"] = where(broken, 0, state["streak"] + where(over, 1, 0))
        state["streak_sum"] = where(broken, 0.0, state["streak_sum"] + where(over, x, 0.0))
        if self.patience is not None:
            moved = state["streak"] >= self.patience
            level = state["streak_sum"] / maximum(state["streak"], 1)
            state["mean"] = where(moved, level, state["mean"])
            state["streak"] = where(moved, 0, state["streak"])
            state["streak_sum"] = where(moved, 0.0, state["streak_sum"])
        return threshold


def _on_device(state: State, like: Tensor, length: int) -> None:
    """Make the values a buffer of at least ``length`` on the device of ``like``."""
    values = state["values"]
    if not isinstance(values, Tensor) or values.device != like.device:
        # A new or a resumed run: the only copy from the host.
        values = torch.as_tensor(values, dtype=wide_dtype(like.device), device=like.device)
    if len(values) < length:
        values = torch.cat([values, values.new_zeros(length - len(values))])
    if not isinstance(state["count"], Tensor):
        state["count"] = torch.full((), state["count"], dtype=values.dtype, device=like.device)
    state["values"] = values
