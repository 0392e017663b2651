"""Running statistics of a scalar: a window of its values, and a band of its usual range.

The state of a statistic is a plain ``dict``, which a checkpoint can store as it is. For Python
floats the state is on the host. For a 0-dimensional tensor it is on the tensor's device, in a few
tensors, because each operator costs a kernel launch. Only finite values above 0 are added. Other
values leave the state unchanged.

Example:
    >>> window = Window(size=2)
    >>> state = window.init()
    >>> for value in (5.0, 1.0, 3.0, float("nan")):
    ...     window.update(state, value)
    >>> window.mean_plus_std(state, 1.0)
    3.0
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence
from itertools import product
from typing import Any, TypeAlias

import torch
from torch import Tensor

from lightning_opt.core.arguments import check_at_least, check_fraction, check_positive
from lightning_opt.core.numerics.scalars import DeviceCache, Scalar, constant, exp

State: TypeAlias = dict[str, Any]
"""A statistic's state by name: numbers and lists of numbers on a CPU, tensors on a device."""


class Window:
    """The last ``size`` values, or all of them, with mean, deviation and quantiles.

    Args:
        size: Number of values to keep, at least 2. ``None`` keeps every value, at eight bytes each.
            A value then costs one insertion on a CPU; on a device each quantile sorts all values.
    """

    def __init__(self, size: int | None) -> None:
        self.size = None if size is None else check_at_least("window", size, 2)

    def init(self) -> State:
        """Return the state before any value."""
        return {"count": 0, "pushed": 0, "values": []}

    def update(self, state: State, value: Scalar) -> None:
        """Add ``value`` if it is above 0 and finite. In a full window it replaces the oldest."""
        if isinstance(value, Tensor):
            # `pushed` is at least the count, and known on the host: it sets the buffer's size.
            state["pushed"] += 1
            self.place(state, value)
            valid = value * 0 < value  # False for NaN, infinity and 0
            shifted = torch.cat([state["values"][1:], value[None]])
            state["values"] = torch.where(valid, shifted, state["values"])
            state["count"] = state["count"] + valid
        elif 0.0 < value < math.inf:
            self.place(state, value)
            if self.size is None:
                bisect.insort(state["values"], value)  # quantiles need sorted values
            else:
                state["values"] = [*state["values"][1 - self.size :], value]
            state["count"] = state["pushed"] = state["count"] + 1

    def place(self, state: State, like: Scalar) -> None:
        """Move the state to where ``like`` is: to its device, or to the host for a float.

        The values are ordered from old to new. On a device, unused entries come first and are NaN.
        On the host the values are sorted if ``size`` is None. :meth:`update` calls this too. Call
        it before reading a statistic from a resumed state.
        """
        values, count = state["values"], state["count"]
        if not isinstance(like, Tensor):
            if isinstance(values, Tensor):  # only once, after a run on a device
                values = values[~values.isnan()].tolist()
                state["values"] = sorted(values) if self.size is None else values
                state["count"] = int(count)
            return
        length = self.size or max(64, 1 << (state["pushed"] - 1).bit_length())
        if not isinstance(values, Tensor) or values.device != like.device:
            values = constant(values, like.device)  # only at the start of a new or resumed run
        if len(values) < length:
            values = torch.cat([values.new_full((length - len(values),), math.nan), values])
        state["values"] = values
        if not isinstance(count, Tensor):
            state["count"] = torch.full((), count, dtype=values.dtype, device=like.device)

    def mean_plus_std(self, state: State, k: float) -> Scalar:
        """Return the mean plus ``k`` population standard deviations; 0 for an empty window."""
        values = state["values"]
        if isinstance(values, Tensor):
            n = state["count"].clamp(1, self.size)
            mean = values.nansum() / n
            distance = torch.linalg.vector_norm((values - mean).nan_to_num(0.0))
            return torch.addcdiv(mean, distance, n.sqrt(), value=k)
        if not values:
            return 0.0
        center = math.fsum(values) / len(values)
        # `hypot` does not overflow where squares would.
        return center + k * math.hypot(*[x - center for x in values]) / math.sqrt(len(values))

    def quantile(self, state: State, q: float) -> Scalar:
        """Return the ``q``-quantile, interpolated linearly; infinity for an empty window."""
        values = state["values"]
        if isinstance(values, Tensor):
            ordered = values.sort().values  # NaN comes last
            # The count is float64. An integer tensor times a float would become float32.
            position = (state["count"].clamp(1, self.size) - 1) * q
            low = position.floor()
            pair = ordered[torch.stack([low, position.ceil()]).long()]
            return torch.lerp(pair[0], pair[1], position - low).nan_to_num(math.inf, math.inf)
        if not values:
            return math.inf
        numbers = values if self.size is None else sorted(values)
        place = q * (len(numbers) - 1)
        below = math.floor(place)
        above = numbers[min(below + 1, len(numbers) - 1)]
        return float(numbers[below] + (above - numbers[below]) * (place - below))


FAR = 1e15
"""Stands for infinity in logarithms, because 0 times infinity is NaN. Its square is finite."""

MISSING, WITHIN, BEYOND = range(3)
"""The case of a value: invalid (not finite or not above 0), at most the threshold, above it."""


class LogBand:
    """The usual range of a series of positive values. Spikes do not widen it.

    Losses and gradient norms vary by factors, so the mean and deviation are exponential averages of
    the logarithm. The threshold is ``exp(mean + k * deviation)``. A value further than
    ``winsor`` deviations from the mean counts as ``winsor`` deviations. A value above the threshold
    moves the mean but leaves the deviation unchanged. After ``patience`` values in a row above the
    threshold the mean moves to their average.

    The update for a value with logarithm x, where ``clamp`` limits to ``winsor`` deviations::

        mean     += weight * clamp(x - mean)
        variance  = keep * variance + square * clamp(x - mean)**2 + rough * clamp(x - previous)**2
        level    += level_weight * (x - level)

    :meth:`_weights` and :meth:`_next_streak` return the coefficients, for this class and for
    :class:`DeviceBands`. ``level`` is the average of the last ``streak`` values, all above the
    threshold. In the warm-up the variance is half the mean square of the differences between
    neighbours (von Neumann's estimate), so a trend hardly adds to it. The weight after ``n`` values
    is ``3 / (n + 3)``, at least ``1 - decay``.

    Args:
        k: Standard deviations from the mean to the threshold, above 0.
        decay: Share of the old estimate that is kept at each value, in [0, 1); at most 0.9999.
        winsor: Deviations to which a value is clamped, above 0.
        warmup: Values before the threshold is finite, at least 2.
        patience: Values in a row above the threshold after which the mean moves; None for never.
        min_std: Lower bound of the deviation of the natural logarithm.
    """

    WARMUP_STD = 0.5
    """Lower bound of the deviation for clamping in the warm-up: a factor of exp(0.5) = 1.6."""

    LEAD = 3.0
    """Initial weight of a new value, as a multiple of its weight in the arithmetic mean."""

    def __init__(
        self,
        k: float = 3.0,
        decay: float = 0.99,
        winsor: float = 2.0,
        warmup: int = 20,
        patience: int | None = 25,
        min_std: float = 0.1,
    ) -> None:
        self.k, self.decay = check_positive("k", k), check_fraction("decay", decay)
        self.winsor = check_positive("winsor", winsor)
        self.warmup = check_at_least("warmup", warmup, 2)
        self.patience = None if patience is None else check_at_least("patience", patience, 1)
        self.min_std = check_positive("min_std", min_std)
        # From the count `_last` on, the coefficients are constant.
        settled = math.ceil(self.LEAD / max(1.0 - self.decay, 1e-4) - self.LEAD)
        self._last = max(self.warmup, settled)

    def _weights(self, count: int, beyond: bool) -> tuple[float, float, float, float]:
        """Return ``weight``, ``keep``, ``square`` and ``rough`` after ``count`` values."""
        weight = max(1.0 - self.decay, self.LEAD / (count + self.LEAD))
        if beyond:
            return weight, 1.0, 0.0, 0.0
        if count >= self.warmup:
            return weight, 1.0 - weight, weight * (1.0 - weight), 0.0
        return weight, 1.0 - 1.0 / max(count, 1), 0.0, 0.5 / count if count else 0.0

    def _next_streak(self, streak: int, beyond: bool) -> tuple[float, int, bool]:
        """Return ``level_weight``, the next streak, and whether the mean moves to the level."""
        if not beyond or self.patience is None:
            return 0.0, 0, False
        ends = streak + 1 >= self.patience
        return 1.0 / (streak + 1), 0 if ends else streak + 1, ends

    def _least_deviations(self, count: int) -> tuple[float, float]:
        """Return the lower bounds of the deviation after ``count`` values.

        The first one is for the threshold, the second one for clamping.
        """
        if count >= self.warmup:
            return self.min_std, self.min_std
        return FAR, max(self.WARMUP_STD, self.min_std) if count else FAR

    def init(self) -> State:
        """Return the state before any value: the matrix that :class:`DeviceBands` describes."""
        return {"band": [[0.0] * 3 for _ in range(3)]}

    def limit(self, value: Scalar, state: State) -> Scalar:
        """Return the threshold for this value, then add the value to the band.

        A tensor must be finite and at least 0; 0 is not added.
        """
        if isinstance(value, Tensor):
            bands = state.get("device")
            if bands is None or bands.device != value.device:
                bands = state["device"] = DeviceBands(self, [state], value.device)
            threshold: Tensor = bands.thresholds()[0]
            bands.advance(value.log()[None])
            return threshold
        if isinstance(state["band"], Tensor):  # only once, after a run on a device
            state.update({"band": state["band"].tolist(), "device": None})
        (mean, _, count), (previous, var, _), (level, _, streak) = state["band"]
        n = min(int(count), self._last)
        std = math.sqrt(var)
        least, least_width = self._least_deviations(n)
        limit = exp(mean + self.k * max(std, least))
        if not 0.0 < value < math.inf:
            return limit
        x, beyond, width = math.log(value), value > limit, self.winsor * max(std, least_width)
        weight, keep, square, rough = self._weights(n, beyond)
        level_weight, next_streak, ends = self._next_streak(int(streak), beyond)
        delta = min(max(x - mean, -width), width)
        jump = min(max(x - previous, -width), width)
        var = keep * var + square * delta * delta + rough * jump * jump
        level += level_weight * (x - level)
        mean = level if ends else mean + weight * delta
        n = min(n + 1, self._last)
        state["band"] = [[mean, 0.0, n], [x, var, n], [level, 0.0, next_streak]]
        return limit


class DeviceBands(DeviceCache):
    """Several bands with the same settings on a device, updated by few kernel launches.

    The state of a band is a 3 by 3 matrix. Every value, valid or not, updates it by::

        e     = clamp(x - state[:, :1], lowest, highest)
        state = keep * state + gain * e ** [1, 2, 0]

    The rows of the matrix are:

    1. mean, variance term of the distance from the mean, count
    2. previous value, variance, count
    3. level, unused, streak

    A table by count and case holds ``keep`` and ``gain``, which are the coefficients of
    :class:`LogBand`. After the update, the variance term of row 1 is added to the variance of
    row 2. If a streak ends, the mean is set to the level.

    Args:
        band: The settings.
        states: One state per band, from :meth:`LogBand.init` or a checkpoint. Each update stores
            views of the matrices in them.
        device: The device.
    """

    def __init__(self, band: LogBand, states: Sequence[State], device: torch.device) -> None:
        super().__init__(device)
        self._states = states
        # Each bound is an offset plus a multiple of its band's deviation. The first bounds are the
        # edges between cases. The others are the lowest and highest `e` of each matrix entry.
        size = len(states)
        offsets, slopes = [-FAR, 0.0] * size, torch.zeros(20 * size, size, 2)
        slopes[1 : 2 * size : 2, :, 0] = band.k * torch.eye(size)
        for sign, row, own, column in product((-1, 1), range(3), range(size), range(3)):
            clamped = (row, column) in ((0, 0), (0, 1), (1, 1))
            slopes[len(offsets), own, 1] = sign * band.winsor * clamped
            offsets.append(0.0 if clamped else sign * FAR)
        self._rows = torch.arange(3, device=device)[:, None]
        self._powers = constant([1.0, 2.0, 0.0], device)
        self._offsets, self._slopes = constant(offsets, device), constant(slopes.flatten(1), device)
        self._table = constant(_band_table(band), device)
        matrix = torch.stack([constant(state["band"], device) for state in states], 1)
        matrix[:2, :, 2].clamp_(max=band._last)
        self._store(matrix, self._table[0, matrix[0, :, 2].long(), MISSING, 7:9])

    def thresholds(self) -> Tensor:
        """Return the threshold of each band."""
        return (self._matrix[0, :, 0] + self._edges[:, 1]).exp()

    def advance(self, x: Tensor) -> Tensor:
        """Add one value to each band.

        Args:
            x: The logarithms of the values; minus infinity for an invalid value.

        Returns:
            The case of each value: :data:`MISSING`, :data:`WITHIN` or :data:`BEYOND`.
        """
        matrix = self._matrix
        distance = x[None, :, None] - matrix[:, :, :1]
        case = torch.searchsorted(self._edges, distance[0])[:, 0]
        coefficients = self._table[self._rows, matrix[:, :, 2].long(), case]
        powers = distance.clamp(self._lowest, self._highest).pow(self._powers)
        matrix = torch.addcmul(matrix * coefficients[..., :3], coefficients[..., 3:6], powers)
        matrix[0, :, 0].lerp_(matrix[2, :, 0], coefficients[2, :, 6])
        matrix[1, :, 1].add_(matrix[0, :, 1])
        self._store(matrix, coefficients[0, :, 7:9])
        return case

    def _store(self, matrix: Tensor, floors: Tensor) -> None:
        """Store the matrices in the states, and compute the bounds for the next value."""
        self._matrix, size = matrix, len(self._states)
        for state, own in zip(self._states, matrix.unbind(1), strict=True):
            state["band"] = own
        deviations = torch.maximum(matrix[1, :, 1:2].sqrt(), floors)
        bounds = torch.addmv(self._offsets, self._slopes, deviations.flatten())
        self._edges = bounds[: 2 * size].view(size, 2)
        self._lowest, self._highest = bounds[2 * size :].view(2, 3, size, 3).unbind()


def _band_table(band: LogBand) -> Tensor:
    """Return the coefficients of :class:`LogBand` for :class:`DeviceBands`.

    The dimensions are: row, count (streak for row 3), case, coefficient. The coefficients are three
    of ``keep``, three of ``gain``, whether the mean is set to the level, and the two lower bounds
    of the deviation for the next value.
    """
    table: list[list[list[list[float]]]] = [[], [], []]
    for n in range(max(band._last + 1, band.patience or 1)):
        count = min(n, band._last)
        floors, increment = band._least_deviations(count + 1), float(n < band._last)
        unchanged = [1.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0, *band._least_deviations(count)]
        # Row 1 has the variance term of one value only; an invalid value clears it.
        cases = [[[1.0, 0.0, *unchanged[2:]]], [unchanged], [unchanged]]
        for beyond in (False, True):
            weight, keep, square, rough = band._weights(count, beyond)
            level_weight, next_streak, ends = band._next_streak(n, beyond)
            cases[0].append([1.0, 0.0, 1.0, weight, square, increment, 0.0, *floors])
            cases[1].append([1.0, keep, 1.0, 1.0, rough, increment, 0.0, *floors])
            cases[2].append([1.0, 0.0, 0.0, level_weight, 0.0, next_streak, ends, 0.0, 0.0])
        for row, entries in zip(table, cases, strict=True):
            row.append(entries)
    return torch.tensor(table, dtype=torch.float64)
