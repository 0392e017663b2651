"""The batch size of DataLoaders: reading, changing and restoring it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from torch.utils.data import BatchSampler, DataLoader

from lightning_opt.core.modules.patching import replaced

if TYPE_CHECKING:
    import lightning.pytorch as pl

ADVICE = (
    "Give a torch DataLoader with batch_size=..., or a batch sampler that reads its attribute "
    "batch_size in each iteration."
)


def batch_size_of(loader: Any) -> int | None:
    """Return the batch size of a DataLoader; None if it has none or is another iterable."""
    if not isinstance(loader, DataLoader) or loader.batch_sampler is None:
        return None
    size = getattr(loader.batch_sampler, "batch_size", None)
    return size if isinstance(size, int) else None


def samples_of(loader: DataLoader[Any]) -> int:
    """Return the number of samples of a loader on this rank; a billion if it is unknown."""
    sampler: Any = getattr(loader.batch_sampler, "sampler", loader.sampler)
    try:
        return len(sampler)
    except TypeError:
        return 10**9


def check_loader(loader: Any) -> int:
    """Return the batch size.

    Raises:
        ValueError: If the batch size of the loader cannot be changed.
    """
    size, name = batch_size_of(loader), type(loader).__qualname__
    if not isinstance(loader, DataLoader):
        reason = f"{name} is not a torch DataLoader"
    elif loader.batch_sampler is None:
        reason = f"{name} has batch_size=None, so its dataset makes the batches"
    elif size is None:
        reason = f"its batch sampler {type(loader.batch_sampler).__qualname__} has no batch_size"
    elif _ignores_its_batch_size(loader.batch_sampler, size):
        reason = f"its batch sampler {type(loader.batch_sampler).__qualname__} ignores batch_size"
    else:
        return size
    raise ValueError(f"The batch size of the loader cannot be changed: {reason}. {ADVICE}")


def _ignores_its_batch_size(sampler: Any, size: int) -> bool:
    """Return whether twice the batch size gives as many batches."""
    if type(sampler) is BatchSampler:
        return False
    try:
        batches = len(sampler)
        sampler.batch_size = 2 * size
        return batches == len(sampler) > 1
    except AttributeError:  # it is a property without a setter
        return True
    except (TypeError, NotImplementedError):  # it has no length
        return False
    finally:
        with suppress(AttributeError):
            sampler.batch_size = size


def set_batch_size(loader: DataLoader[Any], size: int) -> None:
    """Set the batch size from the next iteration on."""
    loader.batch_sampler.batch_size = size  # type: ignore[union-attr]
    if loader.batch_size is not None:
        object.__setattr__(loader, "batch_size", size)  # DataLoader's own `__setattr__` raises


def has_several_loaders(trainer: pl.Trainer) -> bool:
    """Return whether there are several training loaders; a batch then has one entry for each."""
    return isinstance(trainer.train_dataloader, (list, tuple, Mapping))


def check_single_loader(trainer: pl.Trainer) -> None:
    """Raise ValueError if there are several training loaders."""
    if has_several_loaders(trainer):
        raise ValueError(
            "A batch size is found for one training loader, and there are several. Put their "
            "datasets into one (torch.utils.data.StackDataset, ConcatDataset)."
        )


@contextmanager
def intercepted_loaders(
    trainer: pl.Trainer, on_training_loader: Callable[[Any], None]
) -> Iterator[None]:
    """Call a function with each training loader after Lightning has added its sampler.

    Lightning makes a new loader with a DistributedSampler if needed. The strategy's
    ``process_dataloader`` is the only hook after that. At the end, the batch sizes of the loaders
    are restored.
    """
    original = trainer.strategy.process_dataloader
    sizes: WeakKeyDictionary[DataLoader[Any], int] = WeakKeyDictionary()

    def process_dataloader(dataloader: Any) -> Any:
        loader: Any = original(dataloader)
        if trainer.training:
            size = batch_size_of(loader)
            if size is not None:
                sizes.setdefault(loader, size)
            on_training_loader(loader)
        return loader

    try:
        with replaced(trainer.strategy, process_dataloader=process_dataloader):
            yield
    finally:
        for loader, size in sizes.items():
            if batch_size_of(loader) != size:
                set_batch_size(loader, size)
