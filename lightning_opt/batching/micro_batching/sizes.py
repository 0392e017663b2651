"""Which size of micro-batch each shape of sample has been found to need."""

from __future__ import annotations

import re
from typing import Any, TypedDict

LONGEST_WAIT = 64
"""Times ``regrow_every`` between attempts to grow at most, after these have failed again."""

MOST_SHAPES = 256


class Known(TypedDict):
    """What one shape has taught.

    Attributes:
        size: Samples that a micro-batch may have.
        elements: Of one sample.
        failed: The most samples that did not fit; as large a size says nothing any more.
    """

    size: int
    elements: int
    failed: int


class LearnedSizes:
    """Halves at out-of-memory, doubles after a while, and waits longer where that was wrong.

    What a shape needs binds those with more elements a sample, and none with fewer: one long
    sequence does not shrink the micro-batches of the short ones. All shapes grow at once, so that
    ranks which have learned the same need not talk about it.

    Args:
        regrow_every: Batches from one change to the attempt at larger sizes.
    """

    def __init__(self, regrow_every: int) -> None:
        self._regrow_every = self._wait = regrow_every
        self._batches = self._since = 0
        self._grown = False
        self.shapes: dict[str, Known] = {}

    def of(self, shape: str, elements: int) -> int | None:
        """Return the size that holds for a shape: its own, or that of a smaller one."""
        if shape in self.shapes:
            return self.shapes[shape]["size"]
        smaller = [known for known in self.shapes.values() if known["elements"] <= elements]
        return min((known["size"] for known in smaller), default=None)

    def passed(self) -> list[int]:
        """Count a batch, and return the sizes that are larger from now on."""
        self._batches += 1
        if not self.shapes or self._batches - self._since < self._wait:
            return []
        if self._grown:  # the last attempt was right
            self._wait = self._regrow_every
        self._since, self._grown = self._batches, True
        for known in self.shapes.values():
            known["size"] *= 2
        sizes = [known["size"] for known in self.shapes.values()]
        self.shapes = {s: k for s, k in self.shapes.items() if k["size"] < k["failed"]}
        return sizes

    def shrink(self, shape: str, elements: int, failed: int) -> int:
        """Return the next size to try after ``failed`` samples, at least 2, did not fit."""
        known = self.shapes.get(shape)
        if self._grown and known is not None:
            self._wait = min(2 * self._wait, LONGEST_WAIT * self._regrow_every)
            self._grown = False
        self._since = self._batches
        most = max(failed, known["failed"] if known is not None else 0)
        put_last(self.shapes, shape, Known(size=-(-failed // 2), elements=elements, failed=most))
        return self.shapes[shape]["size"]

    def state_dict(self) -> dict[str, Any]:
        """Return everything, as plain types."""
        return {
            "shapes": {shape: dict(known) for shape, known in self.shapes.items()},
            "wait": self._wait,
            "age": self._batches - self._since,
            "grown": self._grown,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned."""
        self.shapes = {shape: known.copy() for shape, known in state_dict["shapes"].items()}
        self._wait, self._grown = state_dict["wait"], state_dict["grown"]
        self._batches, self._since = state_dict["age"], 0


def put_last(known: dict[str, Any], shape: str, value: Any) -> None:
    """Put what is known of a shape at the end, and let go of what was put longest ago."""
    known.pop(shape, None)
    while len(known) >= MOST_SHAPES:
        del known[next(iter(known))]
    known[shape] = value


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
