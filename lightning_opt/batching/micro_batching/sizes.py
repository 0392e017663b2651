"""Micro-batch sizes by sample shape: learned from failures, or planned from measured peaks."""

from __future__ import annotations

import logging
import re
from typing import Any, NamedTuple

import torch

from lightning_opt.batching.peaks import LimitMeter

log = logging.getLogger(__name__)

MAX_WAIT_FACTOR = 64
"""After repeated failures, sizes still grow every ``MAX_WAIT_FACTOR * regrow_every`` batches."""

MAX_SHAPES = 256
"""Maximum number of stored shapes. Beyond it, the shape that changed longest ago is dropped."""

MAX_EVENTS = 1000

TARGET_SHARE = 0.95
"""Share of the nearest memory limit that a planned size may take."""

MAX_GROWTH = 2
"""A planned size is at most this multiple of the measured size."""

MEMORY_MARGIN = 1.25
"""Each additional sample is assumed to need this many times the measured memory per sample."""


class LearnedSizes:
    """One size per sample shape: halved after an out-of-memory error, doubled later.

    A size also applies to shapes with more elements per sample, but not to smaller shapes: one long
    sequence does not shrink the micro-batches of short sequences. All sizes double together, so
    ranks with equal sizes need no communication.

    Attributes:
        shapes: By shape: ``size``, the samples per micro-batch; ``elements`` per sample; and
            ``failed``, the largest size that did not fit (0 for planned sizes).
        events: Changes of size, newest last.
        retries: Attempts that were rolled back.
        unlogged: The newest size that has not been logged.
    """

    def __init__(self, regrow_every: int) -> None:
        self._regrow_every = self._interval = regrow_every  # batches until sizes grow
        self._batches = 0  # since the last change
        self._last_change_was_growth = False
        self.shapes: dict[str, dict[str, int]] = {}
        self.events: list[dict[str, Any]] = []
        self.retries = 0
        self.unlogged: int | None = None

    def size_for(self, shape: str, elements: int) -> int | None:
        """Return the size of this shape, else the smallest size of smaller shapes, else None."""
        if shape in self.shapes:
            return self.shapes[shape]["size"]
        smaller = [entry for entry in self.shapes.values() if entry["elements"] <= elements]
        return min((entry["size"] for entry in smaller), default=None)

    def record_success(self, step: int) -> None:
        self._batches += 1
        if not self.shapes or self._batches < self._interval:
            return
        if self._last_change_was_growth:  # the last growth did not fail
            self._interval = self._regrow_every
        self._batches, self._last_change_was_growth = 0, True
        for shape, entry in list(self.shapes.items()):
            entry["size"] *= 2
            self.record_event(step, "grown", 0, entry["size"])
            if entry["size"] >= entry["failed"]:
                del self.shapes[shape]

    def record_failure(
        self, step: int, shape: str, elements: int, samples: int, failed: int
    ) -> None:
        """Halve the size of a shape."""
        entry = self.shapes.get(shape)
        if self._last_change_was_growth and entry is not None:
            self._interval = min(2 * self._interval, MAX_WAIT_FACTOR * self._regrow_every)
            self._last_change_was_growth = False
        self._batches = 0
        max_failed = max(failed, entry["failed"] if entry is not None else 0)
        size = -(-failed // 2)
        entry = {"size": size, "elements": elements, "failed": max_failed}
        _store(self.shapes, shape, entry)
        self.retries += 1
        self.record_event(step, "split", samples, size)

    def record_event(self, step: int, kind: str, samples: int, size: int) -> None:
        self.unlogged = size
        self.events.append({"step": step, "kind": kind, "samples": samples, "size": size})
        del self.events[:-MAX_EVENTS]
        log.info("Micro-batches now have at most %d samples (%s).", size, kind)

    def state_dict(self) -> dict[str, Any]:
        return {
            "shapes": {shape: dict(entry) for shape, entry in self.shapes.items()},
            "wait": self._interval,
            "age": self._batches,
            "grown": self._last_change_was_growth,
            "retries": self.retries,
            "events": [dict(event) for event in self.events],
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.shapes = {shape: entry.copy() for shape, entry in state_dict["shapes"].items()}
        self._interval, self._last_change_was_growth = state_dict["wait"], state_dict["grown"]
        self._batches, self.retries = state_dict["age"], state_dict["retries"]
        self.events = [dict(event) for event in state_dict["events"]]


class MeasuredPeak(NamedTuple):
    """The memory peak of one batch."""

    pattern: str  # as returned by pattern_of
    elements: int  # per sample
    size: int  # samples of the largest micro-batch
    peak: float  # as a share of the nearest limit
    baseline: float  # memory without a batch, as a share of the limit
    batch: int = 0  # index of the batch

    def largest_size(self, elements: int) -> int:
        """Return the largest size to try next, for samples with this many elements.

        The memory of a sample is assumed to grow with the square of its length. A shorter sample
        than the measured one is assumed to need the same memory.
        """
        factor = max(1.0, elements / self.elements) ** 2 if self.elements else 1.0
        per_sample = (self.peak - self.baseline) / self.size * factor
        max_size = int(MAX_GROWTH * self.size / factor)
        if per_sample <= 0:
            return max_size
        change = (TARGET_SHARE - self.peak) / per_sample
        if change > 0:
            change /= MEMORY_MARGIN
        return min(max_size, int(self.size / factor + change))


class PlannedSizes:
    """Sizes for runs that cannot roll back a batch: small first, then from measured peaks.

    Each shape begins with the size that measurements of similar shapes allow, else the size in a
    checkpoint, else one sample. From one batch to the next, a size at most doubles.
    """

    def __init__(
        self, sizes: LearnedSizes, device: torch.device, remeasure_every: int, first_step: int
    ) -> None:
        self._sizes, self._every, self._first_step = sizes, remeasure_every, first_step
        self._meter = LimitMeter(device)
        self._measured: dict[str, MeasuredPeak] = {}
        self._batches = 0

    def size_for(self, shape: str, elements: int) -> int:
        """Return the size that this rank plans for a shape."""
        measured = self._measured.get(shape)
        if measured is not None:
            return max(1, measured.largest_size(elements))
        similar = [m for m in self._measured.values() if m.pattern == pattern_of(shape)]
        entry = self._sizes.shapes.get(shape)
        stored_size = entry["size"] if entry is not None else 0
        return max(1, max((m.largest_size(elements) for m in similar), default=stored_size))

    def begin(self, step: int, shape: str, elements: int, samples: int, size: int) -> None:
        """Start measuring a batch if its peak is unknown or out of date."""
        self._batches += 1
        measured = self._measured.get(shape)
        last_size, last_batch = (measured.size, measured.batch) if measured is not None else (0, 0)
        is_due = size > last_size or self._batches - last_batch >= self._every
        # Before the first update of the optimizer, peaks do not include its state.
        self._measures = step > self._first_step and is_due
        self._current = shape, elements, samples, size
        if self._measures:
            self._meter.start()

    def record_success(self, step: int) -> None:
        """Store the measurement, and the size if it is larger than before."""
        shape, elements, samples, size = self._current
        if self._measures:
            peak = self._meter.read()
            measured = MeasuredPeak(pattern_of(shape), elements, size, *peak, self._batches)
            _store(self._measured, shape, measured)
        entry = self._sizes.shapes.get(shape)
        if entry is None or size > entry["size"]:
            entry = {"size": size, "elements": elements, "failed": 0}
            _store(self._sizes.shapes, shape, entry)
            self._sizes.record_event(step, "planned", samples, size)


def _store(by_shape: dict[str, Any], shape: str, value: Any) -> None:
    by_shape.pop(shape, None)
    while len(by_shape) >= MAX_SHAPES:
        del by_shape[next(iter(by_shape))]
    by_shape[shape] = value


def pattern_of(shape: str) -> str:
    """Return the shape with each length replaced by ``n``."""
    return re.sub(r"\d+(?=[,\]])", "n", shape)
