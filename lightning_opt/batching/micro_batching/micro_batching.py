"""Trains a batch in parts that fit into memory, with the gradient of the whole batch."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Literal
from weakref import ref

import torch
import torch.distributed as dist
from lightning.pytorch import Callback
from lightning.pytorch.strategies import (
    DDPStrategy,
    DeepSpeedStrategy,
    ModelParallelStrategy,
    ParallelStrategy,
)
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel
from torch.optim import LBFGS, Optimizer
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler

from lightning_opt.batching.micro_batching.agreement import MID_BATCH, Alone, Replicas, Sharded
from lightning_opt.batching.micro_batching.closure import (
    MicroBatchClosure,
    Split,
    Weigh,
    Workshop,
    split_with,
)
from lightning_opt.batching.micro_batching.forecast import Forecast, Planner
from lightning_opt.batching.micro_batching.retry_policy import Learner
from lightning_opt.batching.micro_batching.split_check import is_too_far, split_error
from lightning_opt.core.arguments import at_least, fraction, positive
from lightning_opt.core.exhaustion import CAUGHT, is_out_of_memory
from lightning_opt.core.importing import function_named
from lightning_opt.core.loggers import log_scalars
from lightning_opt.core.preserve import replaced
from lightning_opt.core.report import Report

if TYPE_CHECKING:
    import lightning.pytorch as pl


class MicroBatching(Callback):
    """Runs each training batch as micro-batches, with the loss and the gradient of the whole batch.

    Only the size of what is in memory at a time changes. The optimised batch, the learning rate,
    ``global_step``, logged values, ``accumulate_grad_batches`` and hooks of callbacks are as
    without it.

    With ``size="auto"`` nothing is split as long as everything fits. A batch that runs out of
    memory in its forward or backward pass is taken back: random numbers, gradients, buffers,
    metrics, counters and logged values are as before it. Then it is run again in halves, quarters
    and so on. What was learnt holds for batches whose samples have the same shape or more elements,
    and is kept in checkpoints. After ``regrow_every`` batches the size doubles again if what one
    sample was measured to take says that it fits; where that proves wrong, the next attempt comes
    twice as late.

    Exact for losses that are means over samples, or over what ``loss_weight`` counts. Not for
    losses that compare samples with each other (contrastive ones), nor for BatchNorm, which sees
    one micro-batch at a time: before the first split there is a trial, and a warning.

    Under DDP the ranks agree, and take a batch back together if one of them runs out of memory.
    Under FSDP2 a batch cannot be taken back, so sizes are planned: a shape begins with ``min_size``
    and grows as measured peaks say that it fits. If memory runs out nevertheless, the run ends on
    all ranks. On a CPU, where the kernel kills what passes the limit of a control group or of the
    machine, batches are split before they do, as far as earlier ones say what they take.

    Logged when a size changes:

    ========================== =================================================================
    ``micro_batching/size``    samples of a micro-batch from now on, for shapes like this batch's
    ``micro_batching/retries`` attempts so far that ran out of memory and were taken back
    ========================== =================================================================

    Args:
        size: Samples that a micro-batch may have, or ``"auto"``.
        min_size: Samples below which ``"auto"`` does not go.
        safety: Share of each memory limit to be left free when ``"auto"`` grows.
        regrow_every: Batches from one size to the attempt at its double, at least 1.
        split: For batches that are not made of tensors with one row a sample: a function
            ``split(batch, parts)``, or its import path, that returns a list of ``parts`` pairs
            ``(part, samples)``.
        budget_mb: With ``"auto"``, a limit of one's own, which planned sizes keep: memory of this
            process on its device. The first batch shows what batches take, so it may pass it.
        loss_weight: What a micro-batch's loss is a mean over: ``"samples"``, or a function of the
            micro-batch, or its import path, that counts it, such as its tokens.

    Raises:
        ValueError: In ``__init__`` for arguments out of range; in ``setup`` under manual
            optimisation, DeepSpeed, with ``dataloader_iter``, or for ``"auto"`` under a strategy of
            several processes other than DDP and FSDP2; in ``on_fit_start`` for LBFGS.
        UnsplittableBatchError: While training, for a batch that needs ``split``.
        MemoryError: While training with ``"auto"``, if ``min_size`` samples do not fit, or if
            memory runs out in the optimizer's update or under FSDP2, which cannot be taken back.

    Example:
        >>> import lightning as L
        >>> import lightning_opt as lo
        >>> trainer = L.Trainer(callbacks=[lo.MicroBatching("auto")], logger=False)
    """

    def __init__(
        self,
        size: int | Literal["auto"] = "auto",
        min_size: int = 1,
        safety: float = 0.05,
        regrow_every: int = 200,
        split: Callable[[Any, int], Any] | str | None = None,
        loss_weight: Callable[[Any], Any] | str = "samples",
        budget_mb: float | None = None,
    ) -> None:
        self.size = size if size == "auto" else at_least("size", size, 1)
        self.min_size = at_least("min_size", min_size, 1)
        self.safety = fraction("safety", safety)
        self.regrow_every = at_least("regrow_every", regrow_every, 1)
        self.budget_mb = None if budget_mb is None else positive("budget_mb", budget_mb)
        if self.budget_mb is not None and self.size != "auto":
            raise ValueError(f"budget_mb is for size='auto', and size is {self.size}.")
        self.split: Split | None = function_named("split", split)
        self.loss_weight: Weigh | None = (
            None if loss_weight == "samples" else function_named("loss_weight", loss_weight)
        )
        self._module: ref[nn.Module] | None = None
        self._stack: ExitStack | None = None
        self._whole: Any = None
        self._update: Any = None
        self._shop: Workshop | None = None
        self._sharded: Sharded | None = None
        self._warned = False
        self._reset()

    def _reset(self) -> None:
        self._sizes: dict[str, int] = {}
        self._learner = Learner(self.min_size, self.safety, self.regrow_every, self._before_split)

    @property
    def events(self) -> list[dict[str, Any]]:
        """Changes of size, the newest last: ``step``, ``kind``, ``samples`` and ``size``."""
        return self._learner.events

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Refuse what cannot be right."""
        if stage != "fit":
            return
        callbacks = trainer.callbacks  # type: ignore[attr-defined]
        if sum(isinstance(callback, MicroBatching) for callback in callbacks) > 1:
            raise ValueError("There is more than one MicroBatching in Trainer(callbacks=[...]).")
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
        if self._module is None or self._module() is not pl_module:
            if self._module is not None:
                self._reset()  # another model: what the last one needed says nothing about it
            self._module = ref(pl_module)

    @staticmethod
    def _refuse_for_auto(strategy: ParallelStrategy) -> None:
        name = type(strategy).__name__
        if isinstance(strategy, ModelParallelStrategy):
            if strategy.device_mesh["tensor_parallel"].size() > 1:
                raise ValueError(
                    "MicroBatching(size='auto') does not work with tensor parallelism. Give a "
                    "number, such as MicroBatching(size=8)."
                )
            return
        if not isinstance(strategy, DDPStrategy):
            raise ValueError(
                f"MicroBatching(size='auto') does not work under {name}, where a rank that runs "
                "out of memory alone would leave the others waiting. Give a number, such as "
                "MicroBatching(size=8), which all ranks follow."
            )
        if strategy._ddp_kwargs.get("static_graph"):
            raise ValueError(
                "MicroBatching(size='auto') does not work with DDP's static_graph=True, which "
                "expects the same backward passes at every step. Leave it out, or give a number."
            )

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Refuse optimizers that evaluate the loss more than once a step."""
        if any(isinstance(optimizer, LBFGS) for optimizer in trainer.optimizers):
            raise ValueError(
                "MicroBatching does not work with torch.optim.LBFGS, which evaluates the loss "
                "several times within one step. Use a first-order optimizer such as AdamW or SGD."
            )

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Take the place of Lightning's closures."""
        self._release()
        auto, stack = self.size == "auto", ExitStack()
        ranks: Alone | None = None
        self._sharded = None
        if auto and isinstance(trainer.strategy, DDPStrategy):
            model = trainer.strategy.model
            assert isinstance(model, DistributedDataParallel)
            ranks = Replicas(model, trainer.strategy._timeout)
            stack.callback(ranks.close)
        elif auto and isinstance(trainer.strategy, ModelParallelStrategy):
            self._sharded = ranks = Sharded(trainer.strategy._timeout)
            stack.callback(ranks.close)
        taken_back = auto and self._sharded is None
        shop = Workshop(trainer, pl_module, self.split, self.loss_weight, taken_back, ranks)
        optimization = shop.optimization
        self._shop, self._stack = shop, stack
        self._whole, self._update = optimization._make_closure, optimization._optimizer_step
        self._agreed = trainer.world_size == 1 or _same_on_all_ranks(trainer.train_dataloader)
        make = self._make_fixed
        if auto:
            make = self._start_auto(shop)
        self._stack.enter_context(
            replaced(optimization, _make_closure=make, _optimizer_step=self._step)
        )

    def _start_auto(self, shop: Workshop) -> Any:
        """Return what makes closures whose size is found here."""
        planned = self._sharded is not None
        forecast = None
        if planned or shop.device.type == "cpu" or self.budget_mb is not None:
            forecast = Forecast(shop.device, self.safety, self.budget_mb)
        self._learner.start(shop, None if planned else forecast)
        if self._sharded is None:
            return self._learner.make_closure
        assert forecast is not None
        planner = Planner(
            shop,
            self._sharded,
            forecast,
            self.min_size,
            self.regrow_every,
            self._sizes,
            self._learner.note,
            self._before_split,
        )
        return planner.make_closure

    # --- a fixed size ---------------------------------------------------------------------------

    def _make_fixed(
        self, kwargs: OrderedDict[str, Any], optimizer: Optimizer, batch_idx: int
    ) -> Any:
        shop = self._at_work()
        [(_, samples)] = split_with(self.split, kwargs["batch"], 1)
        assert self.size != "auto"
        parts = -(-samples // self.size)
        if not self._agreed:
            parts = _agree(parts, samples, shop.device)
        if parts <= 1:
            return self._whole(kwargs, optimizer, batch_idx)
        self._before_split(kwargs["batch"], parts)
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
        learner = self._learner
        if learner.changed is not None:
            size, learner.changed = learner.changed, None
            scalars = {"micro_batching/size": size, "micro_batching/retries": learner.retries}
            log_scalars(trainer, scalars)

    # --- around both ----------------------------------------------------------------------------

    def _step(self, batch_idx: int, closure: Any) -> None:
        problem = ""
        try:
            self._update(batch_idx, closure)
        except CAUGHT as error:
            if self._sharded is not None and not getattr(closure, "finished", False):
                if not (words := self._sharded.explain(error)):
                    raise
                raise MemoryError(MID_BATCH + words) from error
            if not (getattr(closure, "finished", False) and is_out_of_memory(error)):
                raise
            problem = f"{type(error).__name__}: {error}"
        if problem:
            raise MemoryError(
                "Out of memory after the backward pass, in the optimizer's update or a callback "
                "before it. Part of the weights may have been updated, so the step is not tried "
                "again: resume from the last checkpoint, with an optimizer of smaller state, or "
                f"a smaller model. The allocator said: {problem}"
            )

    def _before_split(self, batch: Any, parts: int) -> None:
        """Warn, once, of what is not as with the whole batch."""
        if self._warned:
            return
        self._warned = True
        module = self._at_work().module
        if any(isinstance(layer, _BatchNorm) and layer.training for layer in module.modules()):
            rank_zero_warn(
                "MicroBatching splits a batch of a model with BatchNorm, whose statistics are now "
                "those of micro-batches: gradients and running statistics differ from those of "
                "whole batches. GroupNorm and LayerNorm do not have this problem."
            )
        else:
            self._check_split(batch, parts)

    def _check_split(self, batch: Any, parts: int) -> None:
        shop = self._at_work()
        pieces = split_with(self.split, batch, parts)
        if pieces[0][1] == 1 and parts > 1:
            pieces = split_with(self.split, batch, parts // 2)  # a pair of samples may fit as well
        error = split_error(shop, pieces, lambda piece: split_with(self.split, piece, 2))
        if error is not None and is_too_far(error, shop.trainer.precision):
            rank_zero_warn(
                f"MicroBatching changes the gradient of this model: that of {pieces[0][1]} samples "
                f"in two parts is off by {error:.1%}. So the loss is not a mean over samples. Is "
                "it a mean over tokens? Give MicroBatching(loss_weight=...), a function of the "
                "batch that counts them. A loss that compares samples with each other, such as a "
                "contrastive one, cannot be split without changing it."
            )

    def _at_work(self) -> Workshop:
        assert self._shop is not None
        return self._shop

    def report(self) -> Report:
        """Return the newest changes of size, one a row."""
        learner = self._learner
        known = len(learner.sizes.shapes)
        notes = [f"{learner.retries} attempts taken back; sizes learnt for {known} shapes."]
        return Report(f"MicroBatching(size={self.size!r})", self.events, notes)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Give Lightning's closures back."""
        self._release()

    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        """Undo everything; Lightning calls no ``teardown`` after an exception."""
        self._release()

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Undo everything."""
        self._release()

    def _release(self) -> None:
        if self._stack is not None:
            self._stack.close()
        self._stack = self._shop = self._sharded = self._whole = self._update = None
        self._learner.stop()

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the model, so that the callback can be sent to another process."""
        return {**self.__dict__, "_module": None}

    def state_dict(self) -> dict[str, Any]:
        """Return what was learnt, as plain types."""
        return {**self._learner.state_dict(), "planned": dict(self._sizes)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned."""
        self._learner.load_state_dict(state_dict)
        self._sizes = dict(state_dict.get("planned", {}))


def _same_on_all_ranks(loader: Any) -> bool:
    """Return whether the loader gives every rank batches of equal sizes by construction."""
    return (
        isinstance(loader, DataLoader)
        and isinstance(loader.sampler, DistributedSampler)
        and type(loader.batch_sampler) is BatchSampler
    )


def _agree(parts: int, samples: int, device: torch.device) -> int:
    """Return the largest number of parts of any rank, but no more than the fewest samples."""
    most = torch.tensor([parts, -samples], device=device)
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    parts, fewest = map(int, most.tolist())
    return min(parts, -fewest)
