"""Trains a batch in parts that fit into memory, with the gradient of the whole batch."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from lightning.pytorch.strategies import (
    DDPStrategy,
    DeepSpeedStrategy,
    ModelParallelStrategy,
    ParallelStrategy,
)
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch.nn import SyncBatchNorm
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler

from lightning_opt.batching.micro_batching.agreement import (
    Alone,
    NoHostNetworkError,
    Replicas,
    Sharded,
)
from lightning_opt.batching.micro_batching.closure import (
    LOSSES,
    MicroBatchClosure,
    Split,
    Weigh,
    Workshop,
)
from lightning_opt.batching.micro_batching.hooks import HookGuard
from lightning_opt.batching.micro_batching.planning import Planning
from lightning_opt.batching.micro_batching.retrying import Retrying
from lightning_opt.batching.micro_batching.sizes import LearnedSizes
from lightning_opt.batching.micro_batching.split_check import SplitCheck
from lightning_opt.core.arguments import at_least, function_named
from lightning_opt.core.measure.exhaustion import CAUGHT, is_out_of_memory
from lightning_opt.core.modules.patching import replaced
from lightning_opt.core.modules.sharding import COMPLETE, Groups, ranks_of_a_step, sum_over
from lightning_opt.core.output.loggers import log_scalars
from lightning_opt.core.output.report import Report
from lightning_opt.trainer.run_callback import RunCallback, raise_if_lbfgs

if TYPE_CHECKING:
    import lightning.pytorch as pl

MID_BATCH = (
    "Out of memory on a rank in the middle of a batch. With sharded parameters the other ranks are "
    "in a collective with it, so the batch cannot be retried and the run ends on all ranks: "
    "resume from the last checkpoint, with MicroBatching(size=...) or a smaller batch. The "
    "allocator said: "
)


class MicroBatching(RunCallback):
    """Runs each batch in parts that fit, with the loss and the gradient of the whole batch.

    Only the amount in memory at a time changes. The batch per step, the learning rate,
    ``global_step``, logged values, ``accumulate_grad_batches`` and callback hooks stay the same.

    With ``size="auto"`` it splits nothing while everything fits. If a batch runs out of memory in
    its forward or backward pass, it is rolled back: random state, gradients, buffers, metrics,
    counters and logged values are restored. Then it runs again in halves, quarters and so on.
    The size found applies to samples of the same shape and larger ones, and checkpoints keep it.
    After ``regrow_every`` batches the size doubles; if that fails, the next attempt waits twice
    as long.

    It is exact for losses that are means over samples, means over tokens counted by ``count``, or
    sums. It is not for losses that compare samples with each other (contrastive ones), nor for
    BatchNorm, which sees one micro-batch at a time: it checks some splits, and warns.

    Under DDP, all ranks roll a batch back together if one of them runs out of memory. Under FSDP2
    a batch cannot be rolled back, so sizes are planned: a shape begins with one sample and grows
    as far as measured peaks allow. If memory runs out anyway, the run ends on all ranks.

    Logged when a size changes:

    ========================== =================================================================
    ``micro_batching/size``    samples per micro-batch from now on, for shapes like this batch's
    ``micro_batching/retries`` attempts so far that ran out of memory and were rolled back
    ========================== =================================================================

    Args:
        size: Maximum samples per micro-batch, or ``"auto"``.
        regrow_every: Batches before the next attempt at twice the size, at least 1.
        split: For batches that are not made of tensors with one row per sample: a function
            ``split(batch, parts)``, or its import path, that returns a list of ``parts`` pairs
            ``(part, samples)``.
        loss: What ``training_step`` returns: ``"mean_over_samples"``, ``"mean_over_tokens"``, which
            needs ``count``, or ``"sum"``.
        count: A function of a micro-batch, or its import path, that counts the tokens that its loss
            is a mean over. Returns a number or a 0-dimensional tensor.

    Raises:
        ValueError: In ``__init__`` for arguments out of range; in ``setup`` under manual
            optimisation, DeepSpeed, with ``dataloader_iter``, or for ``"auto"`` under a strategy of
            several processes other than DDP and FSDP2; in ``on_fit_start`` for LBFGS.
        UnsplittableBatchError: During training, for a batch that needs ``split``.
        MemoryError: During training with ``"auto"``, if one sample does not fit, or if memory runs
            out in the optimizer's update or under FSDP2, which cannot be rolled back.

    Example:
        >>> import lightning as L
        >>> import lightning_opt as lo
        >>> trainer = L.Trainer(callbacks=[lo.MicroBatching("auto")], logger=False)
    """

    only_one = True
    process_only = ("_stack", "_whole", "_update")

    def __init__(
        self,
        size: int | Literal["auto"] = "auto",
        regrow_every: int = 200,
        split: Callable[[Any, int], Any] | str | None = None,
        loss: Literal["mean_over_samples", "mean_over_tokens", "sum"] = "mean_over_samples",
        count: Callable[[Any], Any] | str | None = None,
    ) -> None:
        self.size = size if size == "auto" else at_least("size", size, 1)
        self.regrow_every = at_least("regrow_every", regrow_every, 1)
        self.split: Split | None = function_named("split", split)
        if loss not in LOSSES:
            raise ValueError(f"loss must be one of {LOSSES}, got {loss!r}.")
        if (loss == "mean_over_tokens") != (count is not None):
            raise ValueError(
                f"loss='mean_over_tokens' needs count=..., a function of the batch such as "
                f"`lambda batch: (batch['labels'] != -100).sum()`, and no other loss takes one; "
                f"got loss={loss!r} and count={count!r}."
            )
        self.loss: str = loss
        self.count: Weigh | None = function_named("count", count)
        self._stack: ExitStack | None = None
        self._whole: Any = None
        self._update: Any = None
        self._changed: int | None = None
        self._forget()

    def _forget(self) -> None:
        self._sizes = LearnedSizes(self.regrow_every)
        self._planned: dict[str, int] = {}
        self._retries = 0
        self._check = SplitCheck()
        self.events: list[dict[str, Any]] = []

    def reset_for_model(self, pl_module: pl.LightningModule) -> None:
        """Forget what another model needed, which says nothing about this one."""
        self._forget()

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Refuse what cannot be right."""
        super().setup(trainer, pl_module, stage)
        if stage != "fit":
            return
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
        if is_param_in_hook_signature(pl_module.training_step, "dataloader_iter", explicit=True):
            raise ValueError(
                "MicroBatching needs training_step(self, batch, ...): with dataloader_iter there "
                "is no batch to split."
            )
        if self.size == "auto" and isinstance(trainer.strategy, ParallelStrategy):
            self._refuse_for_auto(trainer.strategy)

    @staticmethod
    def _refuse_for_auto(strategy: ParallelStrategy) -> None:
        reason = ""
        if isinstance(strategy, ModelParallelStrategy):
            if strategy.device_mesh["tensor_parallel"].size() > 1:
                reason = "tensor parallelism"
        elif not isinstance(strategy, DDPStrategy):
            reason = f"{type(strategy).__name__}, where a rank may not run out of memory alone"
        elif strategy._ddp_kwargs.get("static_graph"):
            reason = "DDP's static_graph=True, which expects the same passes at every step"
        if reason:
            raise ValueError(
                f"MicroBatching(size='auto') does not work with {reason}. Give a number, such as "
                "MicroBatching(size=8), which all ranks follow."
            )

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Refuse optimizers that evaluate the loss more than once a step."""
        raise_if_lbfgs("MicroBatching", trainer.optimizers)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Take the place of Lightning's closures."""
        self.release(trainer)
        auto = self.size == "auto"
        ranks = Alone()
        if auto and trainer.world_size > 1:
            try:
                ranks = _ranks_of(trainer)
            except NoHostNetworkError as error:
                rank_zero_warn(
                    "MicroBatching('auto') is off in this run, since ranks cannot agree: no "
                    f"process group of the hosts could be made. ({error})"
                )
                return
        stack = ExitStack()
        hooks = HookGuard(trainer, pl_module, stack)
        stack.callback(ranks.close)
        retrying = auto and not isinstance(ranks, Sharded)
        loss = (self.split, self.loss, self.count)
        shop = Workshop(trainer, pl_module, *loss, retrying, ranks, hooks, self._check.sums)
        self._stack, optimization = stack, shop.optimization
        self._whole, self._update = optimization._make_closure, optimization._optimizer_step
        alike = _same_on_all_ranks(trainer.train_dataloader)
        self._ranks = COMPLETE if alike else ranks_of_a_step(trainer)
        note, look = partial(self._note, shop), partial(self._check.look, shop)
        make: Any = partial(self._make_fixed, shop)
        if isinstance(ranks, Sharded):
            make = Planning(shop, ranks, self.regrow_every, self._planned, note, look).make_closure
        elif auto:
            make = Retrying(shop, self._sizes, note, look).make_closure
        step = partial(self._step, shop)
        stack.enter_context(replaced(optimization, _make_closure=make, _optimizer_step=step))

    def _note(self, shop: Workshop, kind: str, samples: int, size: int) -> None:
        """Note that micro-batches of batches of so many samples have another size from now on."""
        self._changed = size
        self._retries += kind == "split"
        step = shop.trainer.global_step
        self.events.append({"step": step, "kind": kind, "samples": samples, "size": size})
        del self.events[:-1000]

    # --- a fixed size ---------------------------------------------------------------------------

    def _make_fixed(
        self, shop: Workshop, kwargs: OrderedDict[str, Any], optimizer: Optimizer, batch_idx: int
    ) -> Any:
        samples = shop.samples(kwargs["batch"])
        assert self.size != "auto"
        parts = -(-samples // self.size)
        if self._ranks:
            parts = _agree(parts, samples, shop.device, self._ranks)
        if parts <= 1:
            shop.hooks.begin()
            return self._whole(kwargs, optimizer, batch_idx)
        self._check.look(shop, kwargs["batch"], parts)
        return MicroBatchClosure(shop, kwargs, optimizer, batch_idx, parts)

    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Log a size that has changed."""
        if self._changed is not None:
            size, self._changed = self._changed, None
            scalars = {"micro_batching/size": size, "micro_batching/retries": self._retries}
            log_scalars(trainer, scalars)

    # --- around both ----------------------------------------------------------------------------

    def _step(self, shop: Workshop, batch_idx: int, closure: Any) -> None:
        problem = ""
        try:
            self._update(batch_idx, closure)
        except CAUGHT as error:
            if not is_out_of_memory(error):
                raise
            finished = getattr(closure, "finished", False)
            if not finished and isinstance(shop.ranks, Sharded):
                raise MemoryError(MID_BATCH + str(error)) from error
            if not finished:
                raise
            problem = f"{type(error).__name__}: {error}"
        if problem:
            raise MemoryError(
                "Out of memory after the backward pass, in the optimizer's update or a callback "
                "before it. Part of the weights may have been updated, so the step is not tried "
                "again: resume from the last checkpoint, with an optimizer of smaller state, or "
                f"a smaller model. The allocator said: {problem}"
            )

    def report(self) -> Report:
        """Return the newest changes of size, one a row."""
        notes = [
            f"{self._retries} attempts taken back; sizes learned for {len(self._sizes.shapes)} "
            "shapes."
        ]
        return Report(f"MicroBatching(size={self.size!r})", self.events, notes)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Give Lightning's closures back."""
        self.release(trainer)

    def release(self, trainer: pl.Trainer) -> None:
        """Give Lightning's closures back, and let go of the run."""
        if self._stack is not None:
            self._stack.close()
        self._stack = self._whole = self._update = self._changed = None

    def state_dict(self) -> dict[str, Any]:
        """Return what was learned, as plain types."""
        return {
            "sizes": self._sizes.state_dict(),
            "planned": dict(self._planned),
            "retries": self._retries,
            "events": [dict(event) for event in self.events],
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned."""
        self._sizes.load_state_dict(state_dict["sizes"])
        self._planned = dict(state_dict["planned"])
        self._retries = state_dict["retries"]
        self.events = [dict(event) for event in state_dict["events"]]


def _ranks_of(trainer: pl.Trainer) -> Alone:
    """Return who has to agree where out-of-memory is survived."""
    strategy, model = trainer.strategy, trainer.strategy.model
    assert isinstance(strategy, (DDPStrategy, ModelParallelStrategy))
    if isinstance(strategy, ModelParallelStrategy):
        return Sharded(strategy._timeout)
    if not isinstance(model, DistributedDataParallel):
        return Alone()  # under DiLoCo, where a rank reduces its gradients with nobody
    if any(isinstance(m, SyncBatchNorm) and m.training for m in model.modules()):
        raise ValueError(
            "MicroBatching(size='auto') does not work with SyncBatchNorm, in which a rank may not "
            "run out of memory alone. Give a number, such as MicroBatching(size=8)."
        )
    return Replicas(model, strategy._timeout)


def _same_on_all_ranks(loader: Any) -> bool:
    """Return whether the loader gives every rank batches of equal sizes by construction."""
    return (
        isinstance(loader, DataLoader)
        and isinstance(loader.sampler, DistributedSampler)
        and type(loader.batch_sampler) is BatchSampler
    )


def _agree(parts: int, samples: int, device: torch.device, ranks: Groups) -> int:
    """Return the largest number of parts of any rank, but no more than the fewest samples."""
    most = sum_over(torch.tensor([parts, -samples], device=device), ranks, dist.ReduceOp.MAX)
    parts, fewest = map(int, most.tolist())
    return min(parts, -fewest)
