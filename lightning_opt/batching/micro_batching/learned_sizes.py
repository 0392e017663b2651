"""Which size of micro-batch each shape of sample has been found to need."""

from __future__ import annotations

import re
from typing import TypedDict

LONGEST_WAIT = 64
"""Times ``regrow_every`` that a shape waits at most after growth has failed again and again."""

MOST_SHAPES = 256


class Known(TypedDict):
    """What one shape has taught.

    Attributes:
        size: Samples that a micro-batch may have.
        elements: Of one sample.
        since: The batch at which the size last changed, or was looked at.
        wait: Batches from then to the next attempt to grow.
        fallback: The size before growth, until the next change; 0 if there was none.
    """

    size: int
    elements: int
    since: int
    wait: int
    fallback: int


class LearnedSizes:
    """Halves at out-of-memory, doubles after a while, and waits longer where that was wrong.

    What a shape needs binds those with more elements a sample, and none with fewer: one long
    sequence does not shrink the micro-batches of the short ones.

    Args:
        min_size: Samples below which a micro-batch is not halved.
        regrow_every: Batches from one size to the attempt at the next larger one.
    """

    def __init__(self, min_size: int, regrow_every: int) -> None:
        self.min_size, self.regrow_every = min_size, regrow_every
        self.batches = 0
        self.shapes: dict[str, Known] = {}

    def binding(self, shape: str, elements: int) -> str | None:
        """Return the shape whose size holds for this one: its own, or that of a smaller one."""
        if shape in self.shapes:
            return shape
        smaller = [key for key, known in self.shapes.items() if known["elements"] <= elements]
        return min(smaller, key=lambda key: self.shapes[key]["size"], default=None)

    def is_due(self, shape: str) -> bool:
        """Return whether it is time to look whether a larger size fits."""
        known = self.shapes[shape]
        return self.batches - known["since"] >= known["wait"]

    def grow(self, shape: str, fits: bool) -> None:
        """Double the size if that ``fits``, else look again later."""
        known = self.shapes[shape]
        known["since"] = self.batches
        if fits:
            known["fallback"] = known["size"]
            known["size"] *= 2

    def shrink(self, shape: str, elements: int, failed: int) -> int | None:
        """Return the next size to try after ``failed`` samples did not fit; None if there is none.

        Args:
            shape: Of the batch.
            elements: Of one of its samples.
            failed: Samples of the micro-batch that did not fit.
        """
        if failed <= self.min_size:
            return None
        known = self.shapes.get(shape)
        wait = self.regrow_every if known is None else known["wait"]
        size = -(-failed // 2)
        if known is not None and known["fallback"] and failed > known["fallback"]:
            size, wait = known["fallback"], min(2 * wait, LONGEST_WAIT * self.regrow_every)
        size = max(self.min_size, size)
        self.shapes.pop(shape, None)
        while len(self.shapes) >= MOST_SHAPES:
            del self.shapes[next(iter(self.shapes))]  # the one that changed longest ago
        self.shapes[shape] = Known(
            size=size, elements=elements, since=self.batches, wait=wait, fallback=0
        )
        return size


def kind_of(shape: str) -> str:
    """Return what ``shape_of`` says of a batch, without the lengths."""
    return re.sub(r"\d+(?=[,\]])", "n", shape)


class Proven:
    """What has passed already: how many samples of how many elements, by the kind of batch.

    What has no more samples, and no more elements in each, needs no more memory.
    """

    def __init__(self) -> None:
        self._kinds: dict[str, list[tuple[int, int]]] = {}

    def covers(self, kind: str, elements: int, samples: int) -> bool:
        """Return whether as many samples of as many elements have passed, or more of both."""
        return any(e >= elements and s >= samples for e, s in self._kinds.get(kind, ()))

    def add(self, kind: str, elements: int, samples: int) -> None:
        """Note what has passed."""
        if self.covers(kind, elements, samples):
            return
        passed = self._kinds.setdefault(kind, [])
        passed[:] = [(e, s) for e, s in passed if e > elements or s > samples]
        passed.append((elements, samples))
        del passed[:-MOST_SHAPES]

    def clear(self) -> None:
        """Forget everything."""
        self._kinds.clear()
