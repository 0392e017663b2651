"""Changes DataLoader settings in place, and checks whether they may be changed."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from lightning_opt.core.modules.patching import do_nothing
from lightning_opt.core.modules.preserve import isolated_random
from lightning_opt.core.modules.state_kinds import GENERATORS
from lightning_opt.data.randomness import random_states

SAMPLER_BATCHES = 4
"""Batches of indices that are drawn to detect a sampler's random draws."""

COUNTER_TYPES = (bool, int, float, str, type(None))
"""Types of attributes in which a sampler may count its epochs."""


@dataclass(frozen=True)
class LoaderSettings:
    """The settings that are tuned.

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


def settings_of(loader: DataLoader[Any]) -> LoaderSettings:
    return LoaderSettings(
        loader.num_workers, loader.prefetch_factor, loader.pin_memory, loader.persistent_workers
    )


def attributes_for(loader: DataLoader[Any], settings: LoaderSettings) -> dict[str, Any]:
    """Return the values of the loader's attributes under ``settings``.

    A loader reads these attributes when it is iterated, so it need not be built again: dataset,
    sampler, generator, collate function and subclass stay the same.
    """
    return {
        "num_workers": settings.workers,
        "prefetch_factor": settings.prefetch if settings.workers else None,
        "pin_memory": settings.pin,
        "persistent_workers": settings.persistent and settings.workers > 0,
        "timeout": loader.timeout if settings.workers else 0,  # torch allows it with workers only
        # Silences torch's warning about more workers than CPUs: this number was measured.
        "check_worker_number_rationality": do_nothing,
    }


def reason_to_skip(loader: Any) -> str | None:
    """Return the reason why the settings of ``loader`` must not be changed, or None."""
    if not isinstance(loader, DataLoader):
        return f"{type(loader).__qualname__} is not a torch DataLoader"
    if isinstance(loader.dataset, IterableDataset):
        return (
            "its dataset is iterable: the samples of each worker and their order depend on the "
            "number of workers, and without sharding each worker reads everything"
        )
    if loader._iterator is not None:
        return "its workers are already running"
    return _reason_to_skip_sampler(loader)


def _reason_to_skip_sampler(loader: DataLoader[Any]) -> str | None:
    """Return the reason why workers could change the order of a sampler, or None.

    A loader with workers starts its sampler twice and runs it ahead.
    """
    sampler = loader._index_sampler
    twin = copied_sampler(loader)
    with isolated_random(torch.device("cpu")):
        before = random_states(), _attributes(twin, COUNTER_TYPES)
        iterator = iter(twin)
        if (random_states(), _attributes(twin, COUNTER_TYPES)) != before:
            return (
                f"{type(sampler).__qualname__}.__iter__ draws or counts when it is called, and a "
                "loader with workers calls it twice at the start; make it a generator (`yield`)"
            )
        states = [random_states() for _ in zip(range(SAMPLER_BATCHES), iterator, strict=False)]
    if any(state != states[0] for state in states):
        return (
            f"{type(sampler).__qualname__} draws random numbers batch by batch from the global "
            "generators, and workers make it run ahead of the model's own draws; draw all of them "
            "at the start"
        )
    if not loader.num_workers and any(_attributes(sampler, GENERATORS)):
        return (
            "its sampler has its own generator. Workers run it to its end, where torch's "
            "RandomSampler draws once more, so later epochs would have another order. Set "
            "num_workers=1 to have the other settings tuned, or seed globally instead"
        )
    return None


def _attributes(sampler: Any, types: tuple[type, ...]) -> list[dict[str, Any]]:
    """Return the attributes of these types, of a sampler and of the sampler inside it."""
    return [
        {name: value for name, value in vars(part).items() if isinstance(value, types)}
        for part in (sampler, getattr(sampler, "sampler", None))
        if hasattr(part, "__dict__")
    ]


def copied_sampler(loader: DataLoader[Any]) -> Any:
    parts = (loader.sampler, loader.batch_sampler)
    kept = [loader.dataset, *(getattr(part, "data_source", None) for part in parts)]
    return copy.deepcopy(loader._index_sampler, {id(source): source for source in kept})


def endless_indices(loader: DataLoader[Any]) -> Iterator[Any]:
    """Yield indices from a copy of the loader's sampler, epoch after epoch.

    Raises:
        ValueError: If the sampler yields nothing.
    """
    twin = copied_sampler(loader)
    while True:
        index = None
        for index in twin:
            yield index
        if index is None:
            raise ValueError("its sampler yields nothing")


def measuring_copy(
    loader: DataLoader[Any], settings: LoaderSettings, indices: Iterator[Any]
) -> DataLoader[Any]:
    """Return a copy of ``loader`` with ``settings`` that fetches the batches of ``indices``."""
    twin = copy.copy(loader)
    kind = "batch_sampler" if loader._auto_collation else "sampler"
    generator = torch.Generator().manual_seed(0)
    attributes = attributes_for(loader, replace(settings, persistent=False))
    vars(twin).update({kind: indices, "_iterator": None, "generator": generator, **attributes})
    return twin
