"""Sizes of micro-batches that are planned from measured peaks, before memory runs out."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer

from lightning_opt.batching.memory_fit import MemoryFit
from lightning_opt.batching.micro_batching.agreement import Sharded
from lightning_opt.batching.micro_batching.closure import MicroBatchClosure, Workshop, split_with
from lightning_opt.batching.micro_batching.learned_sizes import MOST_SHAPES, kind_of
from lightning_opt.batching.peaks import PeakMeter
from lightning_opt.core.splitting import shape_of

FASTEST_GROWTH = 2
"""A planned size is at most this many times the largest one that was measured."""


MARGIN = 1.25
"""Samples beyond those that were measured are taken to need this many times their share."""


class Forecast:
    """Peaks of memory by shape of sample, and the most samples that they leave room for.

    Peaks are lines over the number of samples, one a shape, through the two largest numbers that
    were measured. A shape that was not measured takes no more than one of the same kind with more
    elements, and in proportion to the square of its elements at most compared with one of fewer.

    Args:
        device: The device that trains.
        safety: Share of each limit to be left free.
        budget_mb: A limit of one's own, see :class:`PeakMeter`.
    """

    def __init__(self, device: torch.device, safety: float, budget_mb: float | None) -> None:
        self._meter = PeakMeter(device, budget_mb, leave_out=("address space",))
        self._target = 1.0 - safety
        self._fits: dict[str, tuple[str, int, MemoryFit]] = {}

    def measured(self, shape: str) -> int:
        """Return the most samples of this shape that were measured; 0 for none."""
        known = self._fits.get(shape)
        return 0 if known is None else max(known[2].points)

    def largest(self, shape: str, elements: int) -> int | None:
        """Return how many samples fit, which may be 0; None if that is not known.

        It is not known either where no batch at all would leave enough free.
        """
        known = self._fits.get(shape)
        if known is not None:
            return self._room(known[2])
        kind, found = kind_of(shape), []
        for other, size, fit in self._fits.values():
            room = self._room(fit) if other == kind else None
            if room is not None:
                found.append(room if size >= elements else int(room * (size / elements) ** 2))
        return max(found, default=None)

    def _room(self, fit: MemoryFit) -> int | None:
        largest = fit.largest(self._target) if fit.rest < self._target else None
        measured = max(fit.points)
        if largest is None or largest <= measured:
            return largest
        return measured + int((largest - measured) / MARGIN)

    def begin(self) -> None:
        """Begin to measure a batch."""
        self._meter.start()

    def end(self, shape: str, elements: int, samples: int) -> None:
        """Note the peak since :meth:`begin`, of micro-batches of at most ``samples``."""
        peak = self._meter.read()
        known = self._fits.pop(shape, None)
        fit = MemoryFit() if known is None else known[2]
        fit.add(samples, peak.share, peak.rest)
        fit.points = dict(sorted(fit.points.items())[-2:])
        while len(self._fits) >= MOST_SHAPES:
            del self._fits[next(iter(self._fits))]
        self._fits[shape] = (kind_of(shape), elements, fit)

    def forget(self) -> None:
        """Forget everything."""
        self._fits.clear()


class Planner:
    """Sizes where out-of-memory cannot be taken back: small at first, larger as measured.

    Each shape begins with ``min_size``, or with the size that it had when a checkpoint was saved,
    or with what is known of others of its kind. From one batch to the next it at most doubles. All
    ranks have the same number of micro-batches: the most that any of them plans, and not more than
    the fewest samples of any.

    Args:
        shop: Of the run.
        ranks: Who has to agree.
        forecast: Of this rank's memory.
        min_size: Samples below which it does not go.
        every: Batches after which a size that was measured is measured again.
        sizes: What passed in an earlier run, by shape; kept up to date.
        changed: Called when the largest size of a shape changes: ``"planned"``, the samples of the
            batch, and the size.
        split_first: Called when a batch is about to be split, with the batch and the parts.
    """

    def __init__(
        self,
        shop: Workshop,
        ranks: Sharded,
        forecast: Forecast,
        min_size: int,
        every: int,
        sizes: dict[str, int],
        changed: Callable[[str, int, int], None],
        split_first: Callable[[Any, int], None],
    ) -> None:
        self._shop, self._ranks, self._forecast = shop, ranks, forecast
        self._min_size, self._every, self._sizes = min_size, every, sizes
        self._changed, self._split_first = changed, split_first
        self._start = shop.trainer.global_step
        self._settled = False
        self._looked: dict[str, int] = {}
        self._batches = 0

    def make_closure(
        self, kwargs: OrderedDict[str, Any], optimizer: Optimizer, batch_idx: int
    ) -> MicroBatchClosure:
        """Return what runs a batch in place of Lightning's closure."""
        batch, shop = kwargs["batch"], self._shop
        shape, elements = shape_of(batch)
        [(_, samples)] = split_with(shop.split, batch, 1)
        # The optimizer's state is there after its first update: peaks before that say too little.
        self._settled = self._settled or shop.trainer.global_step > self._start
        parts = self._ranks.agree(-(-samples // self._size_of(shape, elements)), samples)
        size = -(-samples // parts)
        if parts > 1:
            self._split_first(batch, parts)
        self._batches += 1
        stale = self._batches - self._looked.get(shape, 0) >= self._every
        measuring = self._settled and (stale or size > self._forecast.measured(shape))
        if measuring:
            self._forecast.begin()

        def succeeded() -> None:
            if measuring:
                self._looked[shape] = self._batches
                self._forecast.end(shape, elements, size)
            if size > self._sizes.get(shape, 0):
                self._sizes.pop(shape, None)
                while len(self._sizes) >= MOST_SHAPES:
                    del self._sizes[next(iter(self._sizes))]
                self._sizes[shape] = size
                self._changed("planned", samples, size)

        return MicroBatchClosure(shop, kwargs, optimizer, batch_idx, parts, succeeded=succeeded)

    def _size_of(self, shape: str, elements: int) -> int:
        """Return the size that this rank plans."""
        forecast = self._forecast
        room, measured = forecast.largest(shape, elements), forecast.measured(shape)
        if room is None or not self._settled:  # nothing to go by but what has passed
            return max(self._min_size, self._sizes.get(shape, 0))
        return max(self._min_size, min(room, FASTEST_GROWTH * measured) if measured else room)
