"""The settings of a DataLoader, changed in place, and the cases in which they cannot be."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from lightning_opt.core.preserve import isolated_random
from lightning_opt.data.randomness import random_states

LOOK = 4
"""Batches of indices that are drawn to see when a sampler draws random numbers."""


@dataclass(frozen=True)
class LoaderSettings:
    """What is tuned.

    Attributes:
        workers: ``num_workers``.
        prefetch: ``prefetch_factor``, or None without workers.
        pin: ``pin_memory``.
        persistent: ``persistent_workers``.
    """

    workers: int = 0
    prefetch: int | None = None
    pin: bool = False
    persistent: bool = False

    def to_dict(self) -> dict[str, Any]:
        """Return plain types."""
        return asdict(self)


def settings_of(loader: DataLoader[Any]) -> LoaderSettings:
    """Return the present settings."""
    return LoaderSettings(
        loader.num_workers, loader.prefetch_factor, loader.pin_memory, loader.persistent_workers
    )


def apply(loader: DataLoader[Any], settings: LoaderSettings) -> dict[str, Any]:
    """Change ``loader`` itself, and return what :func:`put_back` needs.

    A loader reads these attributes when it is iterated. Nothing is built anew, so dataset,
    sampler, generator, collate function and subclass stay what they are.
    """
    attributes = vars(loader)
    before = {name: attributes[name] for name in _NAMES}
    attributes.update(
        num_workers=settings.workers,
        prefetch_factor=settings.prefetch if settings.workers else None,
        pin_memory=settings.pin,
        persistent_workers=settings.persistent and settings.workers > 0,
        timeout=loader.timeout if settings.workers else 0,  # waiting for workers only
    )
    return before


_NAMES = ("num_workers", "prefetch_factor", "pin_memory", "persistent_workers", "timeout")


def put_back(loader: DataLoader[Any], before: dict[str, Any]) -> None:
    """Undo :func:`apply`, and let workers go that were kept for the next epoch."""
    changed = any(vars(loader)[name] != value for name, value in before.items())
    vars(loader).update(before)
    if changed:
        vars(loader)["_iterator"] = None


def refusal(loader: Any) -> str | None:
    """Return why ``loader`` must stay as it is, or None."""
    if not isinstance(loader, DataLoader):
        return f"{type(loader).__qualname__} is no torch DataLoader"
    if isinstance(loader.dataset, IterableDataset):
        return (
            "its dataset is iterable: what each worker reads, and in which order, changes with "
            "their number, and without sharding each worker reads everything"
        )
    if loader._iterator is not None:
        return "its workers are running already"
    return _refused_sampler(loader)


def _refused_sampler(loader: DataLoader[Any]) -> str | None:
    """Return why the order could change: workers make a sampler run ahead, and start it twice."""
    sampler = loader._index_sampler
    try:
        twin = copied_sampler(loader)
    except (TypeError, AttributeError, RuntimeError, NotImplementedError) as error:
        return f"its sampler, {type(sampler).__qualname__}, cannot be copied to be tried: {error}"
    with isolated_random(torch.device("cpu")):
        before = random_states(), _plain(twin)
        iterator = iter(twin)
        if (random_states(), _plain(twin)) != before:
            return (
                f"{type(sampler).__qualname__}.__iter__ draws or counts when it is called, and a "
                "loader with workers calls it twice at the start; make it a generator (`yield`)"
            )
        states = [random_states() for _ in zip(range(LOOK), iterator, strict=False)]
    if any(state != states[0] for state in states):
        return (
            f"{type(sampler).__qualname__} draws random numbers batch by batch from the global "
            "generators, and workers make it run ahead of the model's own draws; draw all of them "
            "at the start"
        )
    if not loader.num_workers and _has_generator(loader):
        return (
            "its sampler draws from a generator of its own, and workers run it to its end, where "
            "it draws once more (torch's RandomSampler does): later epochs would have another "
            "order. Set num_workers=1 to have the others tuned, or seed globally instead"
        )
    return None


def _has_generator(loader: DataLoader[Any]) -> bool:
    """Return whether a sampler keeps a generator from one epoch to the next."""
    index_sampler = loader._index_sampler
    parts = [index_sampler, getattr(index_sampler, "sampler", None)]
    names = ("Generator", "Random", "RandomState")
    return any(
        type(value).__name__ in names
        for part in parts
        if hasattr(part, "__dict__")
        for value in vars(part).values()
    )


def copied_sampler(loader: DataLoader[Any]) -> Any:
    """Return a copy of what yields the indices, which refers to the same dataset."""
    memo = {id(loader.dataset): loader.dataset}
    for part in (loader.sampler, loader.batch_sampler):
        source = getattr(part, "data_source", None)
        if source is not None:
            memo[id(source)] = source
    return copy.deepcopy(loader._index_sampler, memo)


def endless_indices(loader: DataLoader[Any]) -> Iterator[Any]:
    """Yield what the sampler of ``loader`` would, epoch after epoch, without touching it.

    Raises:
        ValueError: If it yields nothing.
    """
    twin = copied_sampler(loader)
    while True:
        index = None
        for index in twin:
            yield index
        if index is None:
            raise ValueError("its sampler yields nothing")


def measuring_copy(loader: DataLoader[Any], indices: Iterator[Any]) -> DataLoader[Any]:
    """Return a loader like ``loader`` that takes its indices from ``indices`` for ever."""
    twin = copy.copy(loader)
    kind = "batch_sampler" if loader._auto_collation else "sampler"
    generator = torch.Generator().manual_seed(0)
    vars(twin).update({kind: _Feed(indices), "_iterator": None, "generator": generator})
    vars(twin)["persistent_workers"] = False
    return twin


class _Feed:
    def __init__(self, indices: Iterator[Any]) -> None:
        self._indices = indices

    def __iter__(self) -> Iterator[Any]:
        return self._indices


def _plain(sampler: Any) -> list[dict[str, Any]]:
    """Return the counters of a sampler and of the one within it."""
    parts = [sampler, getattr(sampler, "sampler", None)]
    plain = (bool, int, float, str, type(None))
    return [
        {name: value for name, value in vars(part).items() if isinstance(value, plain)}
        for part in parts
        if hasattr(part, "__dict__")
    ]
