"""Finds a batch size before training, without side effects."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from lightning_opt.batching.batch_size.search import FoundSizes
from lightning_opt.batching.batch_size.trials import Trials
from lightning_opt.core.arguments import check_one_of
from lightning_opt.core.modules.patching import do_nothing, replaced
from lightning_opt.trainer.lightning import MultiProcessingLauncher, package_of

if TYPE_CHECKING:
    import lightning.pytorch as pl


def find_batch_size(
    trainer: pl.Trainer,
    model: pl.LightningModule,
    train_dataloaders: Any = None,
    datamodule: pl.LightningDataModule | None = None,
    mode: str = "largest",
    target: float = 0.9,
    max_size: int | None = None,
    budget_mb: float | None = None,
    worst_batch: Callable[[int], Any] | None = None,
) -> FoundSizes:
    """Find the largest batch size that fits into memory, or the fastest size.

    Each trial runs a few steps of a copy of the model, with the Trainer's strategy and precision
    and copies of this library's callbacks, so that their memory counts. Model, optimizers, random
    state, loaders, loggers and checkpoints stay unchanged. Under DDP all ranks find the same size.

    Args:
        trainer: The Trainer, before its ``fit``.
        model: As for ``fit``.
        train_dataloaders: As for ``fit``.
        datamodule: As for ``fit``.
        mode: ``"largest"``, or ``"fastest"`` for the size with the most samples per second, which
            is often smaller. It times the largest size, its half, its quarter and so on, then the
            neighbours of the best size. Times include loading and copying of batches.
        target: Share of the nearest memory limit that a size may take; 1 for all of it.
        max_size: The largest size to try; None for the number of samples.
        budget_mb: An additional limit on the memory of this process on its device.
        worst_batch: A function that takes a number of samples and returns a batch of that size, in
            the form in which the loader returns batches. The batch should be the one that needs the
            most memory, such as the longest sequences. It is used to measure memory, not time. None
            uses the loader's batches.

    Returns:
        The largest and the fastest size, and all trials; ``report()`` returns a table of them.

    Raises:
        ValueError: On several ranks, under strategies with collectives in forward or backward
            passes (FSDP, tensor parallelism); for several training loaders, and for loaders whose
            batch size cannot be changed; for strategies that start processes with spawn or fork;
            for an unknown ``mode``.

    Example:
        >>> import lightning as L
        >>> import lightning_opt as lo
        >>> from lightning.pytorch.demos.boring_classes import BoringModel
        >>> quiet = {"enable_progress_bar": False, "enable_model_summary": False}
        >>> trainer = L.Trainer(
        ...     accelerator="cpu", max_epochs=1, logger=False, enable_checkpointing=False, **quiet
        ... )
        >>> found = lo.find_batch_size(trainer, BoringModel())
        >>> found.largest  # all samples
        64
    """
    check_one_of("mode", mode, ("largest", "fastest"))
    if isinstance(trainer.strategy.launcher, MultiProcessingLauncher):
        raise ValueError(
            f"find_batch_size would search in processes that {type(trainer.strategy).__name__} "
            "starts and ends. Use a strategy that does not start them with spawn or fork, or "
            "DynamicBatchSize, which searches where it trains."
        )
    package, found = package_of(trainer), list[FoundSizes]()

    def search(trainer: Any, module: pl.LightningModule, stage: str) -> None:
        callbacks = [other for other in trainer.callbacks if other is not first]
        trainer.callbacks = []  # no hook of theirs runs
        trials = Trials(trainer, module, callbacks, target, budget_mb, worst_batch)
        found.append(trials.find(mode, max_size))
        # Lightning calls teardown at the end, but the module's setup has not run.
        stack.enter_context(replaced(module, teardown=do_nothing))
        raise package.utilities.exceptions._TunerExitException

    first = package.callbacks.LambdaCallback(setup=search)
    with ExitStack() as stack:
        stack.enter_context(replaced(trainer, callbacks=[first, *trainer.callbacks]))  # type: ignore[attr-defined]
        trainer.fit(model, train_dataloaders, datamodule=datamodule)
    return found[0]
