"""Running statistics of a scalar: a window of its values, and a band of what is usual.

Each is a small rule over a plain ``dict`` that holds its state, so that a checkpoint can take the
state as it is. A Python float is handled with Python floats. A 0-dimensional tensor is handled on
its device with a few operators on tensors of the whole state, since a device pays by the operator.
Only what is above 0 and finite enters; an update with anything else changes nothing.

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
from collections.abc import Sequence
from itertools import product
from typing import Any, TypeAlias

import torch
from torch import Tensor

from lightning_opt.core.arguments import at_least, fraction, positive
from lightning_opt.core.numerics.scalars import DeviceCopy, Scalar, constant, exp, wide_dtype

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
        """Let ``value`` in, if it is above 0 and finite; the oldest makes room in a full window."""
        if isinstance(value, Tensor):
            # The host does not know how many values got in, only how many were offered, which is
            # enough to know that the buffer has room.
            state["pushed"] += 1
            self.place(state, value)
            taken = value * 0 < value  # NaN times anything is below nothing
            shifted = torch.cat([state["values"][1:], value[None]])
            state["values"] = torch.where(taken, shifted, state["values"])
            state["count"] = state["count"] + taken
        elif 0.0 < value < math.inf:
            values, count = self._on_host(state), int(state["count"])
            if self.size is None:
                bisect.insort(values, value)  # arrival order is not needed, so keep them sorted
            elif len(values) < self.size:
                values.append(value)
            else:
                values[count % self.size] = value
            state["count"] = state["pushed"] = count + 1

    def place(self, state: State, like: Scalar) -> None:
        """Move a resumed state to the device of ``like``, if that is a tensor.

        The newest value is the last one there, and NaN fills the rest. An update does this by
        itself; a statistic asked for before it does not know the device.
        """
        if not isinstance(like, Tensor):
            return
        values, count = state["values"], state["count"]
        length = self.size or max(64, 1 << (state["pushed"] - 1).bit_length())
        if not isinstance(values, Tensor) or values.device != like.device:
            # A new or a resumed run: the only copy from the host.
            if isinstance(values, list) and self.size and count > self.size:
                values = values[count % self.size :] + values[: count % self.size]
            values = constant(values, like.device)
        if len(values) < length:
            values = torch.cat([values.new_full((length - len(values),), math.nan), values])
        state["values"] = values
        if not isinstance(count, Tensor):
            state["count"] = torch.full((), count, dtype=values.dtype, device=like.device)

    def mean_std(self, state: State) -> tuple[Scalar, Scalar]:
        """Return mean and population standard deviation of the values held; zeros if none."""
        values = state["values"]
        if isinstance(values, Tensor) and isinstance(state["count"], Tensor):
            n = state["count"].clamp(1, self.size)
            mean = values.nansum() / n
            away = torch.linalg.vector_norm((values - mean).nan_to_num(0.0))
            return mean, away / n.sqrt()
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
            ordered = values.sort().values  # NaN comes last
            # In float64: an integer tensor times a float would be float32.
            place = (state["count"].clamp(1, self.size) - 1) * q
            low = place.floor()
            pair = ordered[torch.stack([low, place.ceil()]).long()]
            return torch.lerp(pair[0], pair[1], place - low).nan_to_num(math.inf, math.inf)
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
            values = [value for value in state["values"].tolist() if not math.isnan(value)]
            state["values"] = sorted(values) if self.size is None else values
            state["count"] = len(values)
        return state["values"]  # type: ignore[no-any-return]


FAR = 1e15
"""Beyond any logarithm of a number, while its square is still a number."""


class LogBand:
    """The usual values of a positive series, as a band of their logarithm that no spike can widen.

    Losses and norms of a run spread over factors, not over differences, so mean and deviation
    are those of the logarithm, averaged exponentially. The band ends at ``exp(mean + k * std)``. A
    value enters the average only as far as ``winsor`` deviations from the mean, and one beyond the
    band moves the mean without widening it. After ``patience`` values in a row beyond it the band
    moves to their level.

    In the warm-up the deviation is that from one value to the next (von Neumann's estimate, half
    the mean square of the differences), which a trend does not enter, and the weight of a new value
    in the average is ``3 / (n + 3)`` after ``n`` values until it reaches ``1 - decay``.

    Args:
        k: Standard deviations above the mean, above 0.
        decay: Share of the old estimate that is kept at each value, in [0, 1); 0.9999 at most.
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
        # By count, until an average runs on. A device looks it up, so it must end somewhere.
        settled = math.ceil(self.LEAD / max(1.0 - self.decay, 1e-4) - self.LEAD)
        self._shares = [self._shares_of(n) for n in range(max(self.warmup, settled) + 1)]

    def _shares_of(self, n: int) -> list[float]:
        """Return what a value changes after ``n`` others, and how far the band reaches for it.

        That is the weight of its deviation in the mean, what is kept of the variance, the weights
        of the squares of its deviation and of its jump, and the least deviations for the threshold
        and for how much of it counts.
        """
        weight = max(1.0 - self.decay, self.LEAD / (n + self.LEAD))
        if n >= self.warmup:
            return [weight, 1.0 - weight, weight * (1.0 - weight), 0.0, self.min_std, self.min_std]
        width = max(self.WARMUP_STD, self.min_std) if n else FAR
        return [weight, 1.0 - 1.0 / max(n, 1), 0.0, 0.5 / n if n else 0.0, FAR, width]

    def init(self) -> State:
        """Return the state before any value: the matrix that :class:`DeviceBands` describes."""
        return {"band": [[0.0] * 3 for _ in range(3)]}

    def limit(self, value: Scalar, state: State) -> Scalar:
        """Return the threshold for this value, then move the band."""
        if isinstance(value, Tensor):
            bands = state.get("device")
            if bands is None or bands.device != value.device:
                bands = state["device"] = DeviceBands(self, [state], value.device)
            threshold: Tensor = bands.thresholds()[0]
            bands.advance(value.log()[None])
            return threshold
        if isinstance(state["band"], Tensor):  # once, after a run that kept it on a device
            state.update({"band": state["band"].tolist(), "device": None})
        (mean, _, count), (previous, var, _), (level, _, streak) = state["band"]
        last = len(self._shares) - 1
        weight, keep, square, rough, least, widest = self._shares[min(int(count), last)]
        std = math.sqrt(var)
        limit = exp(mean + self.k * max(std, least))
        if not 0.0 < value < math.inf:
            return limit  # it changes nothing; it neither extends nor ends a streak
        x, over, width = math.log(value), value > limit, self.winsor * max(std, widest)
        delta, jump = x - mean, x - previous
        delta = min(max(delta, -width), width)
        if not over:
            jump = min(max(jump, -width), width)
            var = keep * var + square * delta * delta + rough * jump * jump
        mean += weight * delta
        streak = streak + 1.0 if over and self.patience is not None else 0.0
        level = level + (x - level) / streak if streak else 0.0
        if streak and streak == self.patience:
            mean, streak = level, 0.0
        state["band"] = [[mean, 0.0, count + 1.0], [x, var, count + 1.0], [level, 0.0, streak]]
        return limit


MISSING, WITHIN, BEYOND = range(3)
"""Where a value lies: it is none, it is in the band, it is above it."""


class DeviceBands(DeviceCopy):
    """The states of bands with the same settings on a device, where each operator costs a launch.

    The state of a band is a matrix of 3 by 3, and any value moves it in the same way::

        e     = clamp(x - state[:, :1], -width, width)
        state = keep * state + gain * e ** [1, 2, 0]

    Its rows are (mean, variance from the mean, count), (previous value, variance, count) and (level
    of the streak, nothing, its length); ``keep`` and ``gain`` come from a table by count and by
    where the value lies. The sum of the variances and the end of a streak are all that is added.

    Args:
        band: The settings.
        states: What :meth:`LogBand.init` returned for each, possibly long ago. They are kept up to
            date, as views.
        device: The device.
    """

    def __init__(self, band: LogBand, states: Sequence[State], device: torch.device) -> None:
        super().__init__(device)
        self._states = states
        # Each bound is an offset and, for its own band, a multiple of the deviation that stands for
        # thresholds or of that for widths: edges first, then how far down and up a row may move.
        size = len(states)
        offsets, slopes = [-FAR, 0.0] * size, torch.zeros(20 * size, size, 2)
        slopes[1 : 2 * size : 2, :, 0] = band.k * torch.eye(size)
        for sign, row, own, column in product((-1, 1), range(3), range(size), range(3)):
            held = (row, column) in ((0, 0), (0, 1), (1, 1))
            slopes[len(offsets), own, 1] = sign * band.winsor * held
            offsets.append(0.0 if held else sign * FAR)
        self._rows = torch.arange(3, device=device)[:, None]
        self._powers = constant([1.0, 2.0, 0.0], device)
        self._offsets, self._slopes = constant(offsets, device), constant(slopes.flatten(1), device)
        self._table = band_table(band).to(device, wide_dtype(device))
        matrix = torch.stack([constant(state["band"], device) for state in states], 1)
        matrix[:2, :, 2].clamp_(max=len(band._shares) - 1.0)
        self._put(matrix, self._table[0, matrix[0, :, 2].long(), MISSING, 7:9])

    def thresholds(self) -> Tensor:
        """Return where each band ends."""
        return (self._matrix[0, :, 0] + self._edges[:, 1]).exp()

    def advance(self, x: Tensor) -> Tensor:
        """Take in the logarithm of one value a band, minus infinity for none.

        Returns:
            For each, :data:`MISSING`, :data:`WITHIN` or :data:`BEYOND`.
        """
        matrix = self._matrix
        away = x[None, :, None] - matrix[:, :, :1]
        where = torch.searchsorted(self._edges, away[0])[:, 0]
        found = self._table[self._rows, matrix[:, :, 2].long(), where]
        powers = away.clamp(self._lowest, self._highest).pow(self._powers)
        matrix = torch.addcmul(matrix * found[..., :3], found[..., 3:6], powers)
        matrix[0, :, 0].lerp_(matrix[2, :, 0], found[2, :, 6])
        matrix[1, :, 1].add_(matrix[0, :, 1])
        self._put(matrix, found[0, :, 7:9])
        return where

    def _put(self, matrix: Tensor, floors: Tensor) -> None:
        """Keep the states, and set the edges and widths for the next value."""
        self._matrix, size = matrix, len(self._states)
        for state, own in zip(self._states, matrix.unbind(1), strict=True):
            state["band"] = own
        deviations = torch.maximum(matrix[1, :, 1:2].sqrt(), floors)
        bounds = torch.addmv(self._offsets, self._slopes, deviations.flatten())
        self._edges = bounds[: 2 * size].view(size, 2)
        self._lowest, self._highest = bounds[2 * size :].view(2, 3, size, 3).unbind()


def band_table(band: LogBand) -> Tensor:
    """Return what :class:`DeviceBands` multiplies with, by row, count and where the value lies.

    In the last dimension stand three of ``keep``, three of ``gain``, whether a streak ends, and the
    least deviations for the thresholds and for the widths of the next value.
    """
    shares = torch.tensor(band._shares, dtype=torch.float64)
    shares = torch.cat([shares, shares[-1:].expand(max(band.patience or 0, 1), -1)])[:, :, None]
    weight, keep, square, rough, *now = shares.unbind(1)
    n = torch.arange(len(shares), dtype=torch.float64)[:, None]
    zero, one, more = (
        torch.zeros_like(n),
        torch.ones_like(n),
        (n + 1.0 < len(band._shares)).double(),
    )
    then = [torch.cat([floor[1:], floor[-1:]]) for floor in now]
    end, streak = (n + 1.0 == (band.patience or 0)).double(), one if band.patience else zero
    # Of the second column the first row's share is added to the second row's.
    table = [
        [one, zero, one, zero, zero, zero, zero, *now],
        [one, zero, one, weight, square, more, zero, *then],
        [one, zero, one, weight, zero, more, zero, *then],
        [one, one, one, zero, zero, zero, zero, *now],
        [one, keep, one, one, rough, more, zero, *then],
        [one, one, one, one, zero, more, zero, *then],
        [one, one, one, zero, zero, zero, zero, *now],
        [zero] * 9,
        [streak, zero, streak - end, streak / (n + 1.0), zero, streak - end, end, zero, zero],
    ]
    rows = torch.stack([torch.cat(row, 1) for row in table], 1)
    return rows.view(-1, 3, 3, 9).transpose(0, 1)
