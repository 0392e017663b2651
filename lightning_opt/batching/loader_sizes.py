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

MAX_SAVED_LOADERS = 8


def batch_size_of(loader: Any) -> int | None:
    """Return the batch size of a DataLoader; None if it has none or is another iterable."""
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
    name = type(loader).__qualname__
    if not isinstance(loader, DataLoader):
        reason = f"{name} is not a torch DataLoader"
    elif loader.batch_sampler is None:
        reason = f"{name} has batch_size=None, so its dataset makes the batches"
    else:
        reason = f"its batch sampler {type(loader.batch_sampler).__qualname__} has no batch_size"
    raise ValueError(f"The batch size of the loader cannot be changed: {reason}. {ADVICE}")


def set_batch_size(loader: DataLoader[Any], size: int) -> None:
    """Set the batch size from the next iteration on.

    Raises:
        ValueError: If the batch sampler ignores the new size.
    """
    sampler: Any = loader.batch_sampler
    old_size, batches = sampler.batch_size, _length(sampler)
    sampler.batch_size = size
    if loader.batch_size is not None:
        object.__setattr__(loader, "batch_size", size)  # DataLoader itself forbids setting it
    if type(sampler) is BatchSampler or batches is None or size == old_size:
        return
    if _length(sampler) == batches and _must_change(batches, old_size, size):
        sampler.batch_size = old_size
        raise ValueError(
            f"The batch sampler {type(sampler).__qualname__} has as many batches with "
            f"batch_size={size} as with {old_size}, so it ignores it. {ADVICE}"
        )


def _must_change(batches: int, old_size: int, size: int) -> bool:
    """Return whether the number of batches must differ between the two sizes."""
    min_samples, max_samples = (batches - 1) * old_size + 1, batches * old_size
    return not -(-min_samples // size) <= batches <= -(-max_samples // size)


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
    """Return whether there are several training loaders; a batch then has one entry for each."""
    return isinstance(trainer.train_dataloader, (list, tuple, Mapping))


def check_single_loader(trainer: pl.Trainer) -> None:
    """Raise ValueError if there are several training loaders."""
    loader = trainer.fit_loop._combined_loader
    if loader is not None and len(loader.flattened) > 1:
        raise ValueError(
            f"A batch size is found for one training loader, got {len(loader.flattened)}. "
            "Put their datasets into one (torch.utils.data.StackDataset, ConcatDataset)."
        )


class LoaderSizes:
    """Intercepts each training loader after Lightning has added its sampler.

    Lightning makes a new loader with a DistributedSampler if needed. The strategy's
    ``process_dataloader`` is the only hook after that.
    """

    def __init__(self, trainer: pl.Trainer, on_training_loader: Callable[[Any], None]) -> None:
        strategy = trainer.strategy
        original = strategy.process_dataloader
        self._saved: list[tuple[DataLoader[Any], int, Any]] = []
        self._stack = ExitStack()

        def process_dataloader(dataloader: Any) -> Any:
            loader = original(dataloader)
            if trainer.training:
                self._save(loader)
                on_training_loader(loader)
            return loader

        self._stack.enter_context(replaced(strategy, process_dataloader=process_dataloader))

    def _save(self, loader: Any) -> None:
        size = batch_size_of(loader)
        if size is not None and all(loader is not saved for saved, _, _ in self._saved):
            # Loaders made by the Trainer are restored too, which is harmless.
            self._saved = [(loader, size, loader.batch_size), *self._saved][:MAX_SAVED_LOADERS]

    def close(self) -> None:
        self._stack.close()
        for loader, sampler_size, loader_size in self._saved:
            loader.batch_sampler.batch_size = sampler_size  # type: ignore[union-attr]
            object.__setattr__(loader, "batch_size", loader_size)
        self._saved = []
