"""The settings of a DataLoader, changed in place, and the cases in which they cannot be."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from lightning_opt.core.modules.patching import do_nothing
from lightning_opt.core.modules.preserve import GENERATORS, isolated_random
from lightning_opt.data.randomness import random_states

LOOK = 4
"""Batches of indices that are drawn to see when a sampler draws random numbers."""

PLAIN = (bool, int, float, str, type(None))
"""What a sampler may count in."""


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
    sampler, generator, collate function and subclass stay what they are. torch's advice to take no
    more workers than there are CPUs is not given: this number was measured.
    """
    after = {
        "num_workers": settings.workers,
        "prefetch_factor": settings.prefetch if settings.workers else None,
        "pin_memory": settings.pin,
        "persistent_workers": settings.persistent and settings.workers > 0,
        "timeout": loader.timeout if settings.workers else 0,  # waiting for workers only
        "check_worker_number_rationality": do_nothing,
    }
    own = vars(loader)
    before = {name: own[name] for name in after if name in own}
    own.update(after)
    return before


def put_back(loader: DataLoader[Any], before: dict[str, Any]) -> None:
    """Undo :func:`apply`, and let workers go that were kept for the next epoch."""
    changed = any(vars(loader)[name] != value for name, value in before.items())
    vars(loader).pop("check_worker_number_rationality", None)
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
        before = random_states(), _attributes(twin, PLAIN)
        iterator = iter(twin)
        if (random_states(), _attributes(twin, PLAIN)) != before:
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
    if not loader.num_workers and any(_attributes(sampler, GENERATORS)):
        return (
            "its sampler draws from a generator of its own, and workers run it to its end, where "
            "it draws once more (torch's RandomSampler does): later epochs would have another "
            "order. Set num_workers=1 to have the others tuned, or seed globally instead"
        )
    return None


def _attributes(sampler: Any, kinds: tuple[type, ...]) -> list[dict[str, Any]]:
    """Return the attributes of these kinds of a sampler and of the one within it."""
    return [
        {name: value for name, value in vars(part).items() if isinstance(value, kinds)}
        for part in (sampler, getattr(sampler, "sampler", None))
        if hasattr(part, "__dict__")
    ]


def copied_sampler(loader: DataLoader[Any]) -> Any:
    """Return a copy of what yields the indices, which refers to the same dataset."""
    parts = (loader.sampler, loader.batch_sampler)
    kept = [loader.dataset, *(getattr(part, "data_source", None) for part in parts)]
    return copy.deepcopy(loader._index_sampler, {id(source): source for source in kept})


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


def measuring_copy(
    loader: DataLoader[Any], settings: LoaderSettings, indices: Iterator[Any]
) -> DataLoader[Any]:
    """Return a loader like ``loader`` with ``settings``, which takes what ``indices`` yields."""
    twin = copy.copy(loader)
    kind = "batch_sampler" if loader._auto_collation else "sampler"
    generator = torch.Generator().manual_seed(0)
    vars(twin).update({kind: indices, "_iterator": None, "generator": generator})
    apply(twin, replace(settings, persistent=False))
    return twin
