"""Items of a dataset that are computed once and kept within a bound."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from torch.utils.data import Dataset, IterableDataset

from lightning_opt.data.cache.caching import Caching, Storage
from lightning_opt.data.cache.fingerprint import fingerprint
from lightning_opt.data.cache.store import Policy
from lightning_opt.data.encoding import decode, digest, encode
from lightning_opt.data.randomness import attributes_put_back, find_randomness


class CachedDataset(Caching, Dataset[Any]):
    """Wraps a map-style dataset, and computes each item once, within a limited cache.

    Items are kept as bytes, and each fetch makes a new object from them. Changing an item therefore
    does not change the cache, and ``max_bytes`` counts exactly what is stored. Tensors come back
    contiguous; everything else comes back as pickle restores it.

    Args:
        dataset: Has ``__getitem__``, and ``__len__`` if the sampler needs it. An item is a function
            of its index: put random augmentation behind the cache, not before it.
        max_bytes: The bound on everything that is cached, at least 1.
        policy: ``"lru"`` gives up the item that was used least recently. ``"keep"`` gives nothing
            up: once it is full it stays as it is, which is better for whole epochs that do not fit.
        storage: ``"memory"``: in memory that all workers of its loaders share (``/dev/shm``), and
            all ranks of a run on this machine whose datasets have the same class, attributes and
            first, middle and last item; until the last of them is gone. Random items are not
            shared, nor are those of datasets that cannot be pickled.
            ``"disk"``: in a file, for later runs too.
        key: A name of the dataset's version that takes the place of its computed fingerprint.
            Cached items of another version are never served.
        folder: Where the file is, for ``"disk"``; default is ``lightning_opt`` in the user's
            cache folder. Datasets may share a folder, and then its bound.
        allow_random: Do not look whether items are random; the first draw is then kept.

    Raises:
        TypeError: For an iterable dataset; while fetching, for items that cannot be pickled.
        ValueError: For arguments out of range, for random items, and where no fingerprint can be
            had.

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
        that never gives up an item (``"keep"``) suits epochs.
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
        if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__"):
            raise TypeError(
                "CachedDataset takes a map-style dataset, whose items have an index, got "
                f"{type(dataset).__qualname__}."
            )
        self.dataset = dataset
        probes = _probes(dataset)

        if not allow_random and (sign := find_randomness(dataset, probes)) is not None:
            raise ValueError(
                f"This {type(dataset).__qualname__} is random: {sign}. A cache would repeat the "
                "first draw for ever. Cache what comes before the augmentation and augment "
                "afterwards, or say allow_random=True."
            )

        def looks() -> list[bytes]:
            with attributes_put_back(dataset):
                return [] if allow_random else [digest(dataset[index]) for index in probes]

        def version() -> str:
            return fingerprint(dataset, looks()) if key is None else key

        def shared() -> object:
            # Ranks may have parts of their own: some attribute or item tells them apart.
            if not allow_random:
                with suppress(ValueError):
                    return fingerprint(dataset, (looks(), key), files=False)
            return None

        self._open(max_bytes, policy, storage, folder, version, shared)

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: Any) -> Any:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[Any]) -> list[Any]:
        """Return the items of a batch, the missing ones fetched at once if the dataset can."""
        keys = [_key(index) for index in indices]
        found = [self._look_up(key) for key in keys]
        missing = [place for place, data in enumerate(found) if data is None]
        fetch = getattr(self.dataset, "__getitems__", None)
        if len(missing) > 1 and callable(fetch):
            fetched = fetch([indices[place] for place in missing])
        else:
            fetched = [self.dataset[indices[place]] for place in missing]
        for place, item in zip(missing, fetched, strict=True):
            data = found[place] = encode(item)
            self._keep(keys[place], data)
        # Made anew also the first time: contiguous, and shared with nobody.
        return [decode(data) for data in found if data is not None]

    def __repr__(self) -> str:
        return f"CachedDataset({type(self.dataset).__qualname__}, storage={self._storage!r})"


def _probes(dataset: Any) -> list[int]:
    try:
        length = len(dataset)
    except TypeError:
        return [0]
    return sorted({0, length // 2, length - 1}) if length else []


def _key(index: Any) -> str:
    try:
        return str(operator.index(index))  # one key for 3, np.int64(3) and torch.tensor(3)
    except TypeError:
        return digest(index).hex()
