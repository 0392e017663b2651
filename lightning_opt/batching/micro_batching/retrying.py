"""What ``MicroBatching("auto")`` does with batches: tries them, takes them back, learns sizes."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer

from lightning_opt.batching.micro_batching.closure import MicroBatchClosure, Workshop, split_with
from lightning_opt.batching.micro_batching.sizes import LearnedSizes, Proven, kind_of
from lightning_opt.core.modules.batches import UnsplittableBatchError, shape_of

log = logging.getLogger(__name__)

CAREFUL = 200
"""Batches for which the last backward pass is run as one that may fail, after one that has."""


class Retrying:
    """Makes closures that survive out-of-memory, with sizes that are the same on all ranks.

    What one rank learns, it tells the others.

    Args:
        shop: Of the run.
        sizes: What was learned, kept up to date.
        changed: Called with ``"split"`` or ``"grown"``, the samples of the batch and the size.
        split_first: Called when a batch is about to be split, with the batch and the parts.
    """

    def __init__(
        self,
        shop: Workshop,
        sizes: LearnedSizes,
        changed: Callable[[str, int, int], None],
        split_first: Callable[[Any, int], None],
    ) -> None:
        self._shop, self._sizes = shop, sizes
        self._changed, self._split_first = changed, split_first
        self._proven = Proven()  # in this run
        self._careful = 0

    def make_closure(
        self, kwargs: OrderedDict[str, Any], optimizer: Optimizer, batch_idx: int
    ) -> MicroBatchClosure:
        """Return what runs a batch in place of Lightning's closure."""
        batch, ranks = kwargs["batch"], self._shop.ranks
        parts, proof = 1, None
        if self._sizes.shapes:  # on all ranks or on none
            size = self._sizes.of(*shape_of(batch))
            parts = 1 if size is None else -(-self._shop.samples(batch) // size)
            parts = self._agree_on(batch, parts)
        if ranks.several:
            proof = self._proof_of(batch, parts)
            self._careful -= 1
            risky = proof is None or self._careful > 0 or not self._proven.covers(*proof)
            ranks.begin(risky)
        if parts > 1:
            self._split_first(batch, parts)

        def succeeded() -> None:
            if proof is not None:
                self._proven.add(*proof)
            for size in self._sizes.passed():
                self._changed("grown", 0, size)

        return MicroBatchClosure(
            self._shop, kwargs, optimizer, batch_idx, parts, self._again, succeeded
        )

    def _proof_of(self, batch: Any, parts: int) -> tuple[str, int, int] | None:
        """Return kind, elements of a sample, and samples of a micro-batch; None if unknown."""
        shape, elements = shape_of(batch)
        try:
            return kind_of(shape), elements, -(-self._shop.samples(batch) // parts)
        except UnsplittableBatchError:
            return None

    def _agree_on(self, batch: Any, parts: int) -> int:
        """Return the most parts that any rank needs, as far as there are samples for them."""
        most = self._shop.ranks.most(parts)
        return parts if most == parts else min(most, max(parts, self._shop.samples(batch)))

    def _again(self, batch: Any, failed: int, parts: int, problem: str) -> int:
        """Return the number of parts of the next attempt after one that ran out of memory.

        Args:
            batch: The batch.
            failed: Samples of the largest micro-batch; 0 for all.
            parts: Of the failed attempt.
            problem: The allocator's words; empty if it was another rank that ran out.

        Raises:
            MemoryError: If no smaller micro-batch is left to be tried, on any rank.
        """
        self._proven = Proven()
        self._careful = CAREFUL
        own: dict[str, Any] | None = None
        error: UnsplittableBatchError | None = None
        samples = 1
        if problem:
            shape, elements = shape_of(batch)
            try:
                [(_, samples)] = split_with(self._shop.split, batch, 1)
            except UnsplittableBatchError as unsplittable:
                error = unsplittable
            failed = failed or samples
            own = {"shape": shape, "elements": elements, "samples": samples, "failed": failed}
            own["hopeless"] = str(error or _hopeless(own, parts, problem))
        failures = [failure for failure in self._shop.ranks.gather(own) if failure is not None]
        if error is not None:
            raise error
        for failure in failures:
            if failure["hopeless"]:
                raise MemoryError(failure["hopeless"])
            size = self._sizes.shrink(failure["shape"], failure["elements"], failure["failed"])
            self._changed("split", failure["samples"], size)
            log.info(
                "Out of memory with %d samples of %d: the batch is tried again in parts of at "
                "most %d.",
                failure["failed"],
                failure["samples"],
                size,
            )
        if own is not None:
            parts = max(parts + 1, -(-samples // self._sizes.shapes[own["shape"]]["size"]))
        parts = self._agree_on(batch, parts)
        if parts > 1:
            self._split_first(batch, parts)
        return parts


def _hopeless(failure: dict[str, Any], parts: int, problem: str) -> str:
    """Return why there is no smaller micro-batch to try; empty if there is."""
    if parts < failure["samples"] and failure["failed"] > 1:
        return ""
    return (
        "Even one sample does not fit into memory: one of a batch of "
        f"{failure['samples']} ({failure['shape'] or 'no tensors'}) ran out of it. What may help: "
        "lo.ActivationCheckpointing, precision='bf16-mixed', shorter or smaller samples. "
        f"The allocator said: {problem}"
    )
