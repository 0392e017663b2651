"""Detects datasets whose items are random."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten

from lightning_opt.core.modules.preserve import isolated_random
from lightning_opt.data.encoding import encode, raw

DRAWS = 3
"""Number of times that each item is fetched."""


def find_randomness(dataset: Any, indices: Sequence[Any]) -> str | None:
    """Return the evidence that the items of ``dataset`` are random, or None.

    Each item is fetched a few times from different states of the global generators. Evidence is a
    draw from one of these generators, even if the item stays the same, or an item that differs
    between fetches. Rare draws from the dataset's own generator can be missed.

    The global generators are restored, and the attributes of ``dataset`` and of the datasets inside
    it.

    Args:
        dataset: A map-style dataset.
        indices: The items to fetch.
    """
    with isolated_random(torch.device("cpu")), attributes_restored(dataset):
        for index in indices:
            first = None
            for draw in range(DRAWS):
                random.seed(draw)
                torch.default_generator.manual_seed(draw)  # `torch.manual_seed` seeds GPUs too
                np.random.seed(draw)  # noqa: NPY002 - the generator that datasets draw from
                before = random_states()
                item = dataset[index]
                for name, state in random_states().items():
                    if state != before[name]:
                        return f"fetching item {index!r} draws random numbers from {name}"
                if draw == 0:
                    first = item
                elif not same(first, item):
                    return f"item {index!r} differs from one fetch to the next"
    return None


def same(a: Any, b: Any) -> bool:
    """Return whether two items are equal in types and values. NaN equals NaN."""
    (ours, shape), (theirs, other) = tree_flatten(a), tree_flatten(b)
    return shape == other and all(map(_same_leaf, ours, theirs))


def _same_leaf(a: Any, b: Any) -> bool:
    if type(a) is not type(b):
        return False
    if isinstance(a, Tensor) and a.is_nested:
        return same(a.unbind(), b.unbind())
    if isinstance(a, Tensor) and a.layout is torch.strided:
        a, b = a.cpu(), b.cpu()
        return a.shape == b.shape and a.dtype == b.dtype and bytes(raw(a)) == bytes(raw(b))
    if encode(a) == encode(b):
        return True
    try:
        equal = a == b
        return bool(equal.all() if hasattr(equal, "all") else equal)
    except (TypeError, ValueError, RuntimeError):  # sparse tensors and tables cannot be compared
        return False


@contextmanager
def attributes_restored(dataset: Any) -> Iterator[None]:
    """Restore the attributes of a dataset and of the datasets inside it.

    A file that is opened at the first fetch must not be open when workers are forked: they would
    share its position.
    """
    before = [(vars(part), dict(vars(part))) for part in wrapped(dataset)]
    try:
        yield
    finally:
        for attributes, saved in before:
            attributes.clear()
            attributes.update(saved)


def wrapped(dataset: Any) -> list[Any]:
    """Return a dataset and the datasets inside it."""
    found: list[Any] = []
    queue = [dataset]
    while queue:
        part = queue.pop()
        if any(part is other for other in found) or not hasattr(part, "__dict__"):
            continue
        found.append(part)
        for name, value in vars(part).items():
            inside = value if isinstance(value, (list, tuple)) and len(value) < 100 else [value]
            queue += [
                inner
                for inner in inside
                if isinstance(inner, torch.utils.data.Dataset)
                or (name == "dataset" and hasattr(inner, "__getitem__"))
            ]
    return found


def random_states() -> dict[str, Any]:
    """Return comparable states of the global generators, by name."""
    kind, keys, *rest = np.random.get_state()  # noqa: NPY002
    return {
        "`random`": random.getstate(),
        "`torch`": torch.get_rng_state().numpy().tobytes(),
        "`numpy.random`": (kind, bytes(keys), *rest),  # type: ignore[arg-type]
    }
