"""Micro-batch sizes by sample shape: learned from failures, or planned from measured peaks."""

from __future__ import annotations

import re
from typing import Any, NamedTuple, TypedDict

import torch

from lightning_opt.batching.peaks import LimitMeter

LONGEST_WAIT = 64
"""Growth that fails again and again is attempted every ``LONGEST_WAIT * regrow_every`` batches."""

MOST_SHAPES = 256
"""Shapes that are kept; the one changed longest ago is dropped."""

MOST_EVENTS = 1000

TARGET = 0.95
"""Share of the nearest memory limit that a planned size may take."""

FASTEST_GROWTH = 2
"""A planned size is at most this many times the measured one."""

MARGIN = 1.25
"""Each sample beyond the measured ones is assumed to need this many times its measured share."""


class Known(TypedDict):
    """The size of one shape.

    Attributes:
        size: Samples per micro-batch.
        elements: Elements per sample.
        failed: The most samples that did not fit; 0 for planned sizes.
    """

    size: int
    elements: int
    failed: int


class LearnedSizes:
    """One size per sample shape: halved after out-of-memory, doubled after a while.

    A size also applies to shapes with more elements per sample, but not to smaller ones: one long
    sequence does not shrink the micro-batches of short ones. All sizes double together, so ranks
    with equal tables need no communication.

    Attributes:
        shapes: The sizes, by shape as text.
        events: Changes of size, newest last.
        retries: Attempts that were rolled back.
        unlogged: The newest size that has not been logged.
    """

    def __init__(self, regrow_every: int) -> None:
        self._regrow_every = self._wait = regrow_every
        self._batches = 0  # since the last change
        self._grown = False  # whether the last change was growth
        self.shapes: dict[str, Known] = {}
        self.events: list[dict[str, Any]] = []
        self.retries = 0
        self.unlogged: int | None = None

    def size_for(self, shape: str, elements: int) -> int | None:
        """Return the size for a shape, else the least of any smaller shape, else None."""
        if shape in self.shapes:
            return self.shapes[shape]["size"]
        smaller = [known for known in self.shapes.values() if known["elements"] <= elements]
        return min((known["size"] for known in smaller), default=None)

    def record_success(self, step: int) -> None:
        self._batches += 1
        if not self.shapes or self._batches < self._wait:
            return
        if self._grown:  # the last growth did not fail
            self._wait = self._regrow_every
        self._batches, self._grown = 0, True
        for shape, known in list(self.shapes.items()):
            known["size"] *= 2
            self.record_event(step, "grown", 0, known["size"])
            if known["size"] >= known["failed"]:
                del self.shapes[shape]

    def record_failure(
        self, step: int, shape: str, elements: int, samples: int, failed: int
    ) -> int:
        """Halve the size of a shape and return it."""
        known = self.shapes.get(shape)
        if self._grown and known is not None:
            self._wait = min(2 * self._wait, LONGEST_WAIT * self._regrow_every)
            self._grown = False
        self._batches = 0
        most = max(failed, known["failed"] if known is not None else 0)
        size = -(-failed // 2)
        _store(self.shapes, shape, Known(size=size, elements=elements, failed=most))
        self.retries += 1
        self.record_event(step, "split", samples, size)
        return size

    def record_event(self, step: int, kind: str, samples: int, size: int) -> None:
        self.unlogged = size
        self.events.append({"step": step, "kind": kind, "samples": samples, "size": size})
        del self.events[:-MOST_EVENTS]

    def state_dict(self) -> dict[str, Any]:
        return {
            "shapes": {shape: dict(known) for shape, known in self.shapes.items()},
            "wait": self._wait,
            "age": self._batches,
            "grown": self._grown,
            "retries": self.retries,
            "events": [dict(event) for event in self.events],
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.shapes = {shape: known.copy() for shape, known in state_dict["shapes"].items()}
        self._wait, self._grown = state_dict["wait"], state_dict["grown"]
        self._batches, self.retries = state_dict["age"], state_dict["retries"]
        self.events = [dict(event) for event in state_dict["events"]]


class Measured(NamedTuple):
    """The memory peak of one batch."""

    kind: str  # the shape without its lengths
    elements: int  # per sample
    size: int  # samples of the largest micro-batch
    peak: float  # as a share of the nearest limit
    rest: float  # share in use without a batch
    batch: int = 0  # number of the batch

    def room_for(self, elements: int) -> int:
        """Return the largest size to try next, for samples with this many elements.

        The memory of a longer sample is assumed to grow with the square of its length. A shorter
        one is assumed to need as much as the measured one.
        """
        longer = max(1.0, elements / self.elements) ** 2 if self.elements else 1.0
        each = (self.peak - self.rest) / self.size * longer
        most = int(FASTEST_GROWTH * self.size / longer)
        if each <= 0:
            return most
        more = (TARGET - self.peak) / each
        return min(most, int(self.size / longer + (more / MARGIN if more > 0 else more)))


class PlannedSizes:
    """Sizes for runs in which out-of-memory cannot be rolled back: small first, then measured.

    Each shape begins with one sample, or with the size in a checkpoint, or with a size that
    measurements of similar shapes allow. From one batch to the next it at most doubles.
    """

    def __init__(
        self, sizes: LearnedSizes, device: torch.device, remeasure_every: int, first_step: int
    ) -> None:
        self._sizes, self._every, self._first_step = sizes, remeasure_every, first_step
        self._meter = LimitMeter(device)
        self._measured: dict[str, Measured] = {}
        self._batches = 0

    def size_for(self, shape: str, elements: int) -> int:
        """Return the size that this rank plans for a shape."""
        measured = self._measured.get(shape)
        if measured is not None:
            return max(1, measured.room_for(elements))
        alike = [m for m in self._measured.values() if m.kind == kind_of(shape)]
        known = self._sizes.shapes.get(shape)
        passed = known["size"] if known is not None else 0
        return max(1, max((m.room_for(elements) for m in alike), default=passed))

    def begin(self, step: int, shape: str, elements: int, samples: int, size: int) -> None:
        """Start to measure a batch if its peak is unknown or out of date."""
        self._batches += 1
        measured = self._measured.get(shape)
        last_size, last_batch = (measured.size, measured.batch) if measured is not None else (0, 0)
        outdated = size > last_size or self._batches - last_batch >= self._every
        # Before the first update of the optimizer, peaks do not include its state.
        self._measures = step > self._first_step and outdated
        self._current = shape, elements, samples, size
        if self._measures:
            self._meter.start()

    def record_success(self, step: int) -> None:
        """Store the measurement, and the size if it is larger than before."""
        shape, elements, samples, size = self._current
        if self._measures:
            peak = self._meter.read()
            kind = kind_of(shape)
            measured = Measured(kind, elements, size, peak.share, peak.current, self._batches)
            _store(self._measured, shape, measured)
        known = self._sizes.shapes.get(shape)
        if known is None or size > known["size"]:
            known = Known(size=size, elements=elements, failed=0)
            _store(self._sizes.shapes, shape, known)
            self._sizes.record_event(step, "planned", samples, size)


def _store(by_shape: dict[str, Any], shape: str, value: Any) -> None:
    by_shape.pop(shape, None)
    while len(by_shape) >= MOST_SHAPES:
        del by_shape[next(iter(by_shape))]
    by_shape[shape] = value


def kind_of(shape: str) -> str:
    return re.sub(r"\d+(?=[,\]])", "n", shape)


class PassedBatches:
    """Micro-batches that fitted. Those with no more samples of no more elements fit too."""

    def __init__(self) -> None:
        self._kinds: dict[str, list[tuple[int, int]]] = {}

    def covers(self, kind: str, elements: int, samples: int) -> bool:
        return any(e >= elements and s >= samples for e, s in self._kinds.get(kind, ()))

    def add(self, kind: str, elements: int, samples: int) -> None:
        if self.covers(kind, elements, samples):
            return
        passed = self._kinds.setdefault(kind, [])
        passed[:] = [(e, s) for e, s in passed if e > elements or s > samples]
        passed.append((elements, samples))
        del passed[:-MOST_SHAPES]
