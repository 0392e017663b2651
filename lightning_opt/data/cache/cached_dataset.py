"""A dataset whose items are computed once and cached within a byte limit."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

from torch.utils.data import Dataset, IterableDataset

from lightning_opt.data.cache.caching import Caching, Storage
from lightning_opt.data.encoding import MISSING, Policy, decode, digest, encode
from lightning_opt.data.randomness import attributes_restored, find_randomness, same


class CachedDataset(Caching, Dataset[Any]):
    """Wraps a map-style dataset, and computes each item once, within a limited cache.

    Items are kept as bytes, and each fetch makes a new object from them. Changing an item therefore
    does not change the cache, and ``max_bytes`` counts exactly the stored bytes. Tensors are
    returned contiguous; everything else is returned as pickle restores it.

    Args:
        dataset: A dataset with ``__getitem__``, and with ``__len__`` if the sampler needs it. An
            item must depend only on its index: apply random augmentation after the cache, not
            before it.
        max_bytes: The limit on all cached items, at least 1.
        policy: ``"lru"`` evicts the least recently used item. ``"keep"`` evicts nothing: a full
            cache stays as it is, which is better if an epoch does not fit.
        storage: ``"memory"``: in memory (``/dev/shm``), shared by all workers of this object's
            loaders and freed together with the object. Each rank has its own cache. ``"disk"``: in
            a file, for later runs and for all ranks on a machine.
        key: A name for the version of the items, required on disk. Later runs find items by it and
            by the name of the dataset's class, so change it whenever the items change.
        folder: The folder of the file, for ``"disk"``; default is ``lightning_opt`` in the user's
            cache folder. Each key has a limit of its own.
        allow_random: Skip the check for random items; the first draw is then cached.

    Raises:
        TypeError: For an iterable dataset; while fetching, for items that cannot be pickled.
        ValueError: For arguments out of range, random items, ``"disk"`` without a key, a folder to
            which other users can write, and a key under which other items are stored (three of the
            items are compared).

    Example:
        >>> import torch
        >>> import lightning_opt as lo
        >>> squares = lo.CachedDataset([torch.tensor(i * i) for i in range(4)], max_bytes=2**20)
        >>> [squares[i].item() for i in (1, 2, 1)]
        [1, 4, 1]
        >>> squares.statistics()["hits"], squares.statistics()["misses"]
        (1, 2)

    References:
        J. Mohan et al. (2021), *Analyzing and Mitigating Data Stalls in DNN Training*: why a cache
        that evicts nothing (``"keep"``) suits epochs.
    """

    def __init__(
        self,
        dataset: Any,
        max_bytes: int,
        policy: Policy = "lru",
        storage: Storage = "memory",
        key: str | None = None,
        folder: str | None = None,
        allow_random: bool = False,
    ) -> None:
        kind = type(dataset).__qualname__
        if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__"):
            raise TypeError(
                f"CachedDataset takes a map-style dataset, whose items have an index, got {kind}."
            )
        self.dataset = dataset
        if not allow_random and (evidence := find_randomness(dataset, _probes(dataset))):
            raise ValueError(
                f"This {kind} is random: {evidence}. A cache would repeat the first draw for ever. "
                "Cache the items before the augmentation and augment afterwards, or pass "
                "allow_random=True."
            )
        self._open(max_bytes, policy, storage, key, folder, kind)
        if storage == "disk" and not allow_random:
            self._raise_if_items_differ()

    def _raise_if_items_differ(self) -> None:
        """Compare some items with the stored ones; store the items that are not stored yet."""
        with attributes_restored(self.dataset):
            for index in _probes(self.dataset):
                encoded = encode(self.dataset[index])
                stored = self._store.get(_name(index), decode)
                if stored is MISSING:
                    self._store.put({_name(index): encoded})
                elif not same(stored, decode(encoded)):
                    raise ValueError(
                        f"Item {index!r} differs from the one stored under this key in "
                        f"{self._store.folder}. Give each dataset, such as training and validation "
                        "data, its own key=, and change it whenever the items change."
                    )

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: Any) -> Any:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[Any]) -> list[Any]:
        """Return the items of a batch. Missing items are fetched in one call if the dataset can."""
        names = [_name(index) for index in indices]
        items = [self._look_up(name) for name in names]
        missing = [position for position, item in enumerate(items) if item is MISSING]
        if not missing:
            return items
        fetch = getattr(self.dataset, "__getitems__", None)
        if len(missing) > 1 and callable(fetch):
            fetched = fetch([indices[position] for position in missing])
        else:
            fetched = [self.dataset[indices[position]] for position in missing]
        encoded = [encode(item) for item in fetched]
        self._put({names[position]: data for position, data in zip(missing, encoded, strict=True)})
        # Decode new items too, so that items are always contiguous and never shared.
        for position, data in zip(missing, encoded, strict=True):
            items[position] = decode(data)
        return items

    def __repr__(self) -> str:
        return f"CachedDataset({type(self.dataset).__qualname__}, storage={self._storage!r})"


def _probes(dataset: Any) -> list[int]:
    try:
        length = len(dataset)
    except TypeError:
        return [0]
    return sorted({0, length // 2, length - 1}) if length else []


def _name(index: Any) -> str:
    try:
        return str(operator.index(index))  # one name for 3, np.int64(3) and torch.tensor(3)
    except TypeError:
        return digest(index).hex()
