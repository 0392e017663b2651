"""Trains on batches in parts that fit into memory, with the gradient of the whole batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

import torch.distributed as dist
from torch.nn import SyncBatchNorm
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, default_collate

from lightning_opt.batching.loader_sizes import has_several_loaders
from lightning_opt.batching.micro_batching.batch_runner import BatchRunner
from lightning_opt.batching.micro_batching.ranks import DDPRanks, Ranks, gloo_group
from lightning_opt.batching.micro_batching.sizes import LearnedSizes, PlannedSizes
from lightning_opt.batching.splitting import Splitter
from lightning_opt.core.arguments import check_at_least, check_one_of
from lightning_opt.core.modules.sharding import step_groups
from lightning_opt.core.output.loggers import log_scalars
from lightning_opt.core.output.report import Report
from lightning_opt.trainer.lightning import (
    DDPStrategy,
    DeepSpeedStrategy,
    ModelParallelStrategy,
    ParallelStrategy,
)
from lightning_opt.trainer.run_callback import RunCallback, raise_if_dataloader_iter, raise_if_lbfgs

if TYPE_CHECKING:
    import lightning.pytorch as pl


class MicroBatching(RunCallback):
    """Runs each batch in parts that fit, with the loss and the gradient of the whole batch.

    The samples per step, the learning rate, ``global_step``, logged values,
    ``accumulate_grad_batches`` and callback hooks stay the same.

    With ``size="auto"``, batches that fit are not split. If a batch runs out of memory in its
    forward or backward pass, it is rolled back: random state, gradients, buffers, metrics,
    counters and logged values are restored. Then it runs again in halves, quarters and so on.
    The resulting size also applies to samples of the same shape and of larger shapes. Checkpoints
    keep it. After ``regrow_every`` batches the size doubles; if memory runs out again, the next
    doubling waits twice as long.

    It is exact for losses that are means over samples, means over tokens counted by ``count``, or
    sums. It is not exact for contrastive losses, which compare samples with each other, nor for
    BatchNorm, which sees one micro-batch at a time. It checks some splits, and warns if they change
    the gradient.

    Under DDP, all ranks roll a batch back together if one of them runs out of memory. Under FSDP2,
    a batch cannot be rolled back, so sizes are planned: the size of a shape begins with one sample
    and grows within the limit that measured peaks allow. If memory runs out anyway, the run ends on
    all ranks.

    Logged when a size changes:

    ========================== =================================================================
    ``micro_batching/size``    samples per micro-batch from now on, for shapes like this batch's
    ``micro_batching/retries`` attempts so far that ran out of memory and were rolled back
    ========================== =================================================================

    Args:
        size: Maximum samples per micro-batch, or ``"auto"``.
        regrow_every: Batches before the next attempt at twice the size, at least 1.
        split: For batches that are not made of tensors with one row per sample: a function
            ``split(batch, parts)`` that returns ``parts`` pairs ``(part, samples)``.
        loss: The kind of loss: ``"mean_over_samples"``, ``"mean_over_tokens"``, which needs
            ``count``, or ``"sum"``.
        count: A function that returns the number of tokens that a micro-batch's loss averages: a
            number or a 0-dimensional tensor.

    Raises:
        ValueError: In ``__init__`` for arguments out of range. In ``setup`` under manual
            optimisation, under DeepSpeed, with ``dataloader_iter``, and for ``"auto"`` under a
            strategy of several processes other than DDP and FSDP2. In ``on_fit_start`` for LBFGS.
        UnsplittableBatchError: During training, for a batch that needs ``split``.
        MemoryError: During training with ``"auto"``, if one sample does not fit, or if memory runs
            out under FSDP2, where a batch cannot be rolled back.

    Example:
        >>> import lightning as L
        >>> import lightning_opt as lo
        >>> trainer = L.Trainer(callbacks=[lo.MicroBatching("auto")], logger=False)
    """

    only_one = True

    def __init__(
        self,
        size: int | Literal["auto"] = "auto",
        regrow_every: int = 200,
        split: Callable[[Any, int], Any] | None = None,
        loss: Literal["mean_over_samples", "mean_over_tokens", "sum"] = "mean_over_samples",
        count: Callable[[Any], Any] | None = None,
    ) -> None:
        self.size = size if size == "auto" else check_at_least("size", size, 1)
        self.runs_in_trials = size != "auto"  # a trial must receive out-of-memory errors
        self.regrow_every = check_at_least("regrow_every", regrow_every, 1)
        check_one_of("loss", loss, ("mean_over_samples", "mean_over_tokens", "sum"))
        if (loss == "mean_over_tokens") != (count is not None):
            raise ValueError(
                f"loss='mean_over_tokens' needs count=..., a function of the batch such as "
                f"`lambda batch: (batch['labels'] != -100).sum()`, and other losses accept none; "
                f"got loss={loss!r} and count={count!r}."
            )
        self._splitter = Splitter(split, count, is_sum=loss == "sum")
        self._sizes = LearnedSizes(self.regrow_every)

    @property
    def events(self) -> list[dict[str, Any]]:
        """The newest changes of size, each with ``step``, ``kind``, ``samples`` and ``size``."""
        return self._sizes.events

    def reset_for_model(self, pl_module: pl.LightningModule) -> None:
        """Discard the sizes learned from another model."""
        self._sizes = LearnedSizes(self.regrow_every)

    def setup_fit(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Raise for settings under which batches cannot be split or retried."""
        if not pl_module.automatic_optimization:
            raise ValueError(
                "MicroBatching does not work under manual optimisation, where training_step itself "
                "steps the optimizers. Split the batch within training_step: "
                "lightning_opt.micro_batches(batch, size) returns its parts and their shares, and "
                "manual_backward(loss * share) adds up the gradient."
            )
        if isinstance(trainer.strategy, DeepSpeedStrategy):
            raise ValueError(
                "MicroBatching does not work with the DeepSpeed strategy, which accumulates "
                "gradients itself: set train_micro_batch_size_per_gpu in its config."
            )
        raise_if_dataloader_iter("MicroBatching", pl_module, "to split.")
        strategy = trainer.strategy
        if isinstance(strategy, DDPStrategy) and strategy._ddp_kwargs.get("static_graph"):
            raise ValueError(
                "MicroBatching does not work with DDP's static_graph=True, which expects one pass "
                "per step. Remove static_graph=True."
            )
        if self.size == "auto" and isinstance(strategy, ParallelStrategy):
            _check_strategy(strategy)

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Raise for LBFGS."""
        raise_if_lbfgs("MicroBatching", trainer.optimizers)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Replace Lightning's closure."""
        self.release(trainer)
        ranks = self._make_ranks(trainer)
        sizes: int | LearnedSizes | PlannedSizes = self._sizes if self.size == "auto" else self.size
        if self.size == "auto" and isinstance(trainer.strategy, ModelParallelStrategy):
            device = trainer.strategy.root_device
            sizes = PlannedSizes(self._sizes, device, self.regrow_every, trainer.global_step)
        self._splitter.several_loaders = has_several_loaders(trainer)
        runner = BatchRunner(trainer, pl_module, self._splitter, sizes, ranks)
        optimization = trainer.fit_loop.epoch_loop.automatic_optimization
        self._replace(optimization, _make_closure=runner.prepare)

    def _make_ranks(self, trainer: pl.Trainer) -> Ranks:
        """Return the ranks that must use the same number of micro-batches."""
        strategy, model = trainer.strategy, trainer.strategy.model
        if self.size != "auto":
            groups = () if _has_equal_batches(trainer) else step_groups(trainer)
            return Ranks(groups[0], strategy.root_device) if groups else Ranks()
        if trainer.world_size == 1:
            return Ranks()
        if isinstance(strategy, ModelParallelStrategy):
            world = dist.get_world_size()
            return Ranks(self._patches.enter_context(gloo_group(world, strategy._timeout)))
        assert isinstance(strategy, DDPStrategy)
        if not isinstance(model, DistributedDataParallel):
            return Ranks()  # under DiLoCo, which does not reduce gradients
        if any(isinstance(m, SyncBatchNorm) and m.training for m in model.modules()):
            raise ValueError(
                "MicroBatching(size='auto') does not work with SyncBatchNorm: a rank that runs out "
                "of memory leaves the others waiting. Give a number, such as MicroBatching(size=8)."
            )
        size = dist.get_world_size(model.process_group)
        return DDPRanks(model, self._patches.enter_context(gloo_group(size, strategy._timeout)))

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any, **kwargs: Any
    ) -> None:
        """Log the size if it has changed."""
        size, self._sizes.unlogged = self._sizes.unlogged, None
        if size is not None:
            retries = self._sizes.retries
            log_scalars(trainer, {"micro_batching/size": size, "micro_batching/retries": retries})

    def report(self) -> Report:
        """Return the newest changes of size, one per row."""
        notes = [
            f"{self._sizes.retries} attempts rolled back; sizes learned for "
            f"{len(self._sizes.shapes)} shapes."
        ]
        return Report(f"MicroBatching(size={self.size!r})", self.events, notes)

    def release(self, trainer: pl.Trainer) -> None:
        """Restore Lightning's closure and drop the references to the run."""
        super().release(trainer)
        self._sizes.unlogged = None

    def state_dict(self) -> dict[str, Any]:
        """Return the learned sizes and the events as plain types."""
        return self._sizes.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the state returned by :meth:`state_dict`."""
        self._sizes.load_state_dict(state_dict)


def _check_strategy(strategy: pl.strategies.ParallelStrategy) -> None:
    reason = ""
    if isinstance(strategy, ModelParallelStrategy):
        if strategy.device_mesh["tensor_parallel"].size() > 1:
            reason = "tensor parallelism"
    elif not isinstance(strategy, DDPStrategy):
        name = type(strategy).__name__
        reason = f"{name}, where a rank that runs out of memory leaves the others waiting"
    if reason:
        raise ValueError(
            f"MicroBatching(size='auto') does not work with {reason}. Give a number, such as "
            "MicroBatching(size=8), equal on all ranks."
        )


def _has_equal_batches(trainer: pl.Trainer) -> bool:
    """Return whether the loader is known to give all ranks batches of equal sizes."""
    loader = trainer.train_dataloader
    return (
        isinstance(loader, DataLoader)
        and isinstance(loader.sampler, DistributedSampler)
        and type(loader.batch_sampler) is BatchSampler
        and loader.collate_fn is default_collate  # others may drop samples
    )
