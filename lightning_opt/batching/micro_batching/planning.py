"""Sizes of micro-batches that are planned from measured peaks, before memory runs out."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch.optim import Optimizer

from lightning_opt.batching.micro_batching.agreement import Sharded
from lightning_opt.batching.micro_batching.closure import MicroBatchClosure, Workshop
from lightning_opt.batching.micro_batching.sizes import kind_of, put_last
from lightning_opt.batching.peaks import LimitMeter
from lightning_opt.core.modules.batches import shape_of

TARGET = 0.95
"""Share of the nearest limit that a planned size may take."""

FASTEST_GROWTH = 2
"""A planned size is at most this many times the one that was measured."""

MARGIN = 1.25
"""Samples beyond those that were measured are taken to need this many times their share."""


@dataclass(frozen=True)
class Measured:
    """The peak of a batch.

    Attributes:
        kind: The shape of its samples without lengths.
        elements: Of one sample.
        size: Samples of its largest micro-batch.
        peak: Share of the nearest limit.
        rest: The share that is in use without a batch.
    """

    kind: str
    elements: int
    size: int
    peak: float
    rest: float

    def room_for(self, elements: int) -> int:
        """Return the most samples to try next, if each has so many elements.

        A longer sample is taken to need memory by the square of its length, a shorter one as much.
        """
        longer = max(1.0, elements / self.elements) ** 2 if self.elements else 1.0
        each = (self.peak - self.rest) / self.size * longer
        most = int(FASTEST_GROWTH * self.size / longer)
        if each <= 0:
            return most
        more = (TARGET - self.peak) / each
        return min(most, int(self.size / longer + (more / MARGIN if more > 0 else more)))


class Planning:
    """Sizes where out-of-memory cannot be taken back: small at first, larger as measured.

    Each shape begins with one sample, or with the size that it had when a checkpoint was saved,
    or with what is known of others of its kind. From one batch to the next it at most doubles. All
    ranks have the same number of micro-batches: the most that any of them plans, and not more than
    the fewest samples of any.

    Args:
        shop: Of the run.
        ranks: Who has to agree.
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
        every: int,
        sizes: dict[str, int],
        changed: Callable[[str, int, int], None],
        split_first: Callable[[Any, int], None],
    ) -> None:
        self._shop, self._ranks, self._every, self._sizes = shop, ranks, every, sizes
        self._changed, self._split_first = changed, split_first
        self._meter = LimitMeter(shop.device)
        self._measured: dict[str, Measured] = {}
        self._looked: dict[str, int] = {}
        self._start = shop.trainer.global_step
        self._batches = 0

    def make_closure(
        self, kwargs: OrderedDict[str, Any], optimizer: Optimizer, batch_idx: int
    ) -> MicroBatchClosure:
        """Return what runs a batch in place of Lightning's closure."""
        batch, shop = kwargs["batch"], self._shop
        shape, elements = shape_of(batch)
        samples = shop.samples(batch)
        parts = self._ranks.agree(-(-samples // self._size_of(shape, elements)), samples)
        size = -(-samples // parts)
        if parts > 1:
            self._split_first(batch, parts)
        self._batches += 1
        known = self._measured.get(shape)
        stale = self._batches - self._looked.get(shape, 0) >= self._every
        # The optimizer's state is there after its first update: peaks before that say too little.
        settled = shop.trainer.global_step > self._start
        measuring = settled and (stale or known is None or size > known.size)
        if measuring:
            self._meter.start()

        def succeeded() -> None:
            if measuring:
                peak = self._meter.read()
                self._looked[shape] = self._batches
                measured = Measured(kind_of(shape), elements, size, peak.share, peak.rest)
                put_last(self._measured, shape, measured)
            if size > self._sizes.get(shape, 0):
                put_last(self._sizes, shape, size)
                self._changed("planned", samples, size)

        return MicroBatchClosure(shop, kwargs, optimizer, batch_idx, parts, succeeded=succeeded)

    def _size_of(self, shape: str, elements: int) -> int:
        """Return the size that this rank plans."""
        known = self._measured.get(shape)
        kind = kind_of(shape)
        alike = [m for m in self._measured.values() if m.kind == kind] if known is None else [known]
        planned = max((m.room_for(elements) for m in alike), default=None)
        return max(1, self._sizes.get(shape, 0) if planned is None else planned)
