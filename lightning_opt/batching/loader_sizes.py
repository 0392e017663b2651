"""The batch size of DataLoaders: reading, changing and restoring it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from torch.utils.data import BatchSampler, DataLoader

from lightning_opt.core.modules.patching import replaced

if TYPE_CHECKING:
    import lightning.pytorch as pl

ADVICE = (
    "Give a torch DataLoader with batch_size=..., or a batch sampler that reads its attribute "
    "batch_size in each iteration."
)


def batch_size_of(loader: Any) -> int | None:
    """Return the batch size of a DataLoader; None without one and for other iterables."""
    if not isinstance(loader, DataLoader) or loader.batch_sampler is None:
        return None
    size = getattr(loader.batch_sampler, "batch_size", None)
    return size if isinstance(size, int) else None


def samples_of(loader: DataLoader[Any]) -> int | None:
    """Return the number of samples of a loader on this rank; None if it is unknown."""
    sampler: Any = getattr(loader.batch_sampler, "sampler", loader.sampler)
    try:
        return len(sampler)
    except TypeError:
        return None


def check_loader(loader: Any) -> int:
    """Return the batch size.

    Raises:
        ValueError: If the batch size of the loader cannot be changed.
    """
    size = batch_size_of(loader)
    if size is not None:
        return size
    kind = type(loader).__qualname__
    if not isinstance(loader, DataLoader):
        reason = f"{kind} is not a torch DataLoader"
    elif loader.batch_sampler is None:
        reason = f"{kind} has batch_size=None, so its dataset makes the batches"
    else:
        reason = f"its batch sampler {type(loader.batch_sampler).__qualname__} has no batch_size"
    raise ValueError(f"The batch size of the loader cannot be changed: {reason}. {ADVICE}")


def set_batch_size(loader: DataLoader[Any], size: int) -> None:
    """Set the batch size from the next iteration on.

    Raises:
        ValueError: If the batch sampler ignores it.
    """
    sampler: Any = loader.batch_sampler
    before, batches = sampler.batch_size, _length(sampler)
    sampler.batch_size = size
    if loader.batch_size is not None:
        object.__setattr__(loader, "batch_size", size)  # DataLoader forbids to set it
    if type(sampler) is not BatchSampler and batches is not None and size != before:
        after = _length(sampler)
        if after == batches and max(size, before) > 1 and _differs(batches, before, size):
            sampler.batch_size = before
            raise ValueError(
                f"The batch sampler {type(sampler).__qualname__} has as many batches with "
                f"batch_size={size} as with {before}, so it ignores it. {ADVICE}"
            )


def _differs(batches: int, before: int, size: int) -> bool:
    """Return whether batches of ``size`` must differ in number, for the same samples."""
    fewest, most = (batches - 1) * before + 1, batches * before
    return not -(-fewest // size) <= batches <= -(-most // size)


def _length(sampler: Any) -> int | None:
    try:
        return len(sampler)
    except (TypeError, NotImplementedError):
        return None


def data_ranks(trainer: pl.Trainer) -> int:
    """Return the number of ranks with their own data."""
    kwargs = trainer.distributed_sampler_kwargs
    return int(kwargs["num_replicas"]) if kwargs else 1


def has_several_loaders(trainer: pl.Trainer) -> bool:
    """Return whether a batch has one entry per loader, each with its own samples."""
    return isinstance(trainer.train_dataloader, (list, tuple, Mapping))


class LoaderSizes:
    """Intercepts each training loader after Lightning has added its sampler.

    Lightning makes a new loader with a DistributedSampler if needed. The strategy's
    ``process_dataloader`` is the only hook after that.
    """

    def __init__(self, trainer: pl.Trainer, training: Callable[[Any], None]) -> None:
        strategy = trainer.strategy
        process = strategy.process_dataloader
        self._changed: list[tuple[DataLoader[Any], int, Any]] = []
        self._stack = ExitStack()

        def process_dataloader(dataloader: Any) -> Any:
            loader = process(dataloader)
            if trainer.training:
                self._save(loader)
                training(loader)
            return loader

        self._stack.enter_context(replaced(strategy, process_dataloader=process_dataloader))

    def _save(self, loader: Any) -> None:
        size = batch_size_of(loader)
        if size is not None and all(loader is not known for known, _, _ in self._changed):
            # A loader of the user's, or one made by the Trainer: restoring that is harmless.
            self._changed = [(loader, size, loader.batch_size), *self._changed][:8]

    def close(self) -> None:
        self._stack.close()
        for loader, size, shown in self._changed:
            loader.batch_sampler.batch_size = size  # type: ignore[union-attr]
            object.__setattr__(loader, "batch_size", shown)
        self._changed = []
