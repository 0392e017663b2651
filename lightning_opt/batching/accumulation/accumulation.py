"""Gradient accumulation that gives the average gradient of one large batch."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_opt.batching.accumulation.counting import (
    batches_for,
    count_samples,
    count_with,
    quotient,
    sum_over_ranks,
    windows_by_step,
)
from lightning_opt.batching.loader_sizes import has_several_loaders, intercepted_loaders
from lightning_opt.batching.split_check import SplitCheck
from lightning_opt.batching.splitting import Splitter
from lightning_opt.core.arguments import check_at_least, check_one_of
from lightning_opt.core.modules.patching import replaced
from lightning_opt.core.modules.sharding import data_ranks, flat_parameter_groups, step_groups
from lightning_opt.core.numerics.norms import collect_gradients, parameters_of
from lightning_opt.core.numerics.scalars import Scalar
from lightning_opt.core.output.loggers import log_scalars
from lightning_opt.trainer.lightning import DeepSpeedStrategy, GradientAccumulationScheduler
from lightning_opt.trainer.run_callback import RunCallback, raise_if_dataloader_iter, raise_if_lbfgs

if TYPE_CHECKING:
    import lightning.pytorch as pl


class Accumulation(RunCallback):
    """Accumulates the gradients of several batches into the exact gradient of one large batch.

    Lightning divides each batch's loss by ``accumulate_grad_batches``, which gives the mean of
    means: a batch of 2 samples counts as much as one of 32, a short window at the end of an epoch
    gets a smaller gradient, and a rank with few tokens counts as much as one with many. Here each
    loss is weighted by its number of samples, or by ``count``, over all batches of the window and
    over all ranks. If all batches are alike, results are bit-identical to Lightning's.

    A window is the sequence of batches of one optimizer step. Only one of
    ``Trainer(accumulate_grad_batches=...)``, ``schedule`` and ``effective_batch`` may set its
    number of batches. A window may begin and end anywhere in an epoch; the last window ends with
    the epoch.

    Logged at the start of a window whose length differs from the previous window's:

    ========================= ==================================================================
    ``accumulation/batches``  batches per window from now on
    ========================= ==================================================================

    Args:
        schedule: A number of batches, or a dict from optimizer step to number, such as
            ``{0: 1, 1000: 4}``. Before the first step in the dict, the number is 1.
        effective_batch: Samples per step over all batches and ranks, instead of ``schedule``. The
            number of batches is rounded, with a warning.
        normalize: The unit over which each loss is a mean: ``"samples"``, ``"tokens"``, which needs
            ``count``, or ``"batches"``, which weights all batches equally.
        count: A function that returns the weight of a batch, such as its number of tokens: a
            number or a 0-dimensional tensor. It may be 0.

    Raises:
        ValueError: In ``__init__`` for arguments that are out of range or exclude each other. In
            ``setup`` under manual optimisation and DeepSpeed, with ``dataloader_iter``, or if the
            Trainer or a GradientAccumulationScheduler sets the number of batches too. In
            ``on_fit_start`` for LBFGS.
        RuntimeError: While training, if the optimizer evaluates the loss several times per step
            and a window has several batches.
        UnsplittableBatchError: While training, for a batch whose samples cannot be counted.

    Example:
        >>> import lightning as L
        >>> import lightning_opt as lo
        >>> trainer = L.Trainer(callbacks=[lo.Accumulation({0: 1, 1000: 4})], logger=False)

    References:
        Lightning issue #20350.
    """

    not_pickled = ("_trainer", "_groups")

    def __init__(
        self,
        schedule: int | dict[int, int] | None = None,
        effective_batch: int | None = None,
        normalize: Literal["batches", "samples", "tokens"] = "samples",
        count: Callable[[Any], Any] | None = None,
    ) -> None:
        if schedule is not None and effective_batch is not None:
            raise ValueError(
                "Accumulation takes schedule or effective_batch, not both: got "
                f"{schedule!r} and {effective_batch!r}."
            )
        self.normalize: str = check_one_of("normalize", normalize, ("batches", "samples", "tokens"))
        if normalize == "tokens" and count is None:
            raise ValueError(
                "normalize='tokens' needs count=..., a function that returns the number of tokens "
                "that a batch's loss averages, such as "
                "`lambda batch: (batch['labels'][:, 1:] != -100).sum()`."
            )
        if normalize == "batches" and count is not None:
            raise ValueError(
                "normalize='batches' weights all batches equally, so count=... has no use. Remove "
                "one of them."
            )
        self.effective_batch = effective_batch
        self.schedule = None if schedule is None else windows_by_step(schedule)
        self.accumulates_by = "schedule" if schedule is not None else ""
        if effective_batch is not None:
            check_at_least("effective_batch", effective_batch, 1)
            self.accumulates_by = "effective_batch"
        self._count = count
        self._splitter = Splitter(None, count)
        self._trainer: pl.Trainer | None = None
        self.reset_for_model()

    def reset_for_model(self, pl_module: pl.LightningModule | None = None) -> None:
        """Reset the state that belongs to another model."""
        self._first_weight = 0.0  # mean weight over ranks of the run's first batch
        self._start, self._length, self._is_open = 0, 1, False  # the window
        self._window_weight: Scalar = 0.0  # sum over the window's batches so far
        self._batch_weight: Scalar = 1.0  # weight of the current batch
        self._unaveraged = 0  # number of batches whose gradients are not averaged yet
        self._restored_gradients: dict[str, Tensor] = {}  # from a checkpoint

    # --- before training ------------------------------------------------------------------------

    def setup_fit(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Raise for incompatible settings, and set the number of batches."""
        self.release(trainer)
        self._check(trainer, pl_module)
        self._trainer = trainer
        if not self.accumulates_by:
            return
        self._replace(trainer, accumulate_grad_batches=1)
        if self.effective_batch is None:
            # Makes `estimated_stepping_batches` correct for a fixed number of batches.
            trainer.accumulate_grad_batches = self._batches_at(0)
        else:
            samples = self.effective_batch

            def set_length(loader: Any) -> None:
                ranks = data_ranks(trainer)
                trainer.accumulate_grad_batches = batches_for(samples, loader, ranks)

            self._patches.enter_context(intercepted_loaders(trainer, set_length))

    def _check(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        callbacks = trainer.callbacks  # type: ignore[attr-defined]
        scheduled = any(isinstance(c, GradientAccumulationScheduler) for c in callbacks)
        if self.accumulates_by and (scheduled or trainer.accumulate_grad_batches != 1):
            other = f"Trainer(accumulate_grad_batches={trainer.accumulate_grad_batches})"
            if scheduled:
                other = "GradientAccumulationScheduler"
            raise ValueError(
                f"{other} and Accumulation both set the number of batches per step. Remove one: "
                "Accumulation without schedule and effective_batch uses the Trainer's."
            )
        if not pl_module.automatic_optimization:
            raise ValueError(
                "Accumulation does not work under manual optimisation, where training_step itself "
                "steps the optimizers. Use lightning_opt.GradientAccumulator there."
            )
        if isinstance(trainer.strategy, DeepSpeedStrategy):
            raise ValueError(
                "Accumulation does not work with the DeepSpeed strategy, which accumulates "
                "gradients itself: set gradient_accumulation_steps through "
                "Trainer(accumulate_grad_batches=...)."
            )
        if self.normalize != "batches":
            use = "to count. normalize='batches' works."
            raise_if_dataloader_iter("Accumulation", pl_module, use)

    def _batches_at(self, step: int) -> int:
        assert self.schedule is not None
        entries = reversed(self.schedule.items())
        return next((batches for first_step, batches in entries if first_step <= step), 1)

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Raise for LBFGS."""
        raise_if_lbfgs("Accumulation", trainer.optimizers)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Replace how Lightning ends a window, weights losses and zeroes gradients."""
        loop = trainer.fit_loop.epoch_loop
        optimization = loop.automatic_optimization
        self._device = trainer.strategy.root_device
        self._flat = flat_parameter_groups(trainer.model or pl_module)
        # With "batches", the weights of all ranks are equal.
        self._groups = () if self.normalize == "batches" else step_groups(trainer)
        if self._restored_gradients:
            named = dict(pl_module.named_parameters())
            for name, gradient in self._restored_gradients.items():
                named[name].grad = gradient.to(named[name].device)
            self._restored_gradients = {}
        elif self._is_open and not loop.restarting:
            self._is_open = False
        if self._is_open and self.schedule is not None:
            trainer.accumulate_grad_batches = self._length  # of the resumed window
        self._splitter.several_loaders = has_several_loaders(trainer)
        self._split_check = SplitCheck(self._splitter, runs_parts=False)

        def is_complete() -> bool:
            return bool(loop.batch_progress.current.ready - self._start >= self._length)

        make_step = partial(self._make_step, optimization._make_step_fn)
        make_zero_grad = partial(self._make_zero_grad, trainer, optimization._make_zero_grad_fn)
        self._replace(loop, _accumulated_batches_reached=is_complete)
        self._replace(optimization, _make_step_fn=make_step, _make_zero_grad_fn=make_zero_grad)

    # --- the window -----------------------------------------------------------------------------

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Close the previous epoch's window: Lightning steps at the end of an epoch."""
        self._is_open = False

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Begin a window if the last one has ended, and compute the batch's weight."""
        if self.normalize != "batches":
            self._split_check.check_batch(trainer, pl_module, batch, batch_idx)
        if not self._is_open or batch_idx - self._start >= self._length:
            self._begin_window(trainer, batch_idx)
        self._has_run_backward = False
        if self._count is not None:
            self._batch_weight = count_with(self._count, batch)
        elif self.normalize == "batches":
            self._batch_weight = 1.0
        else:
            self._batch_weight = count_samples(self._splitter.entries(batch))
        if self._first_weight == 0.0:  # equal on all ranks; set once per run
            total, world = sum_over_ranks(self._batch_weight, self._device, self._groups)
            self._first_weight = float(total) / world or 1.0

    def _begin_window(self, trainer: pl.Trainer, batch_idx: int) -> None:
        length = trainer.accumulate_grad_batches
        # The last epoch of StochasticWeightAveraging has no backward passes and is one window.
        if self.schedule is not None and not trainer.fit_loop._skip_backward:
            length = self._batches_at(trainer.global_step)
            trainer.accumulate_grad_batches = length
        if length != self._length and trainer.global_step > 0:
            log_scalars(trainer, {"accumulation/batches": length})
        self._start, self._length, self._is_open = batch_idx, length, True
        self._window_weight, self._unaveraged = 0.0, 0

    def _make_zero_grad(
        self, trainer: pl.Trainer, make: Any, batch_idx: int, optimizer: Optimizer
    ) -> Any:
        if batch_idx != self._start:
            return None
        with replaced(trainer, accumulate_grad_batches=1):
            return make(batch_idx, optimizer)

    def _make_step(self, make: Any, kwargs: OrderedDict[str, Any]) -> Callable[[], Any]:
        step, weight = make(kwargs), self._batch_weight / self._first_weight
        if not isinstance(weight, Tensor) and weight == 1.0:
            return step  # type: ignore[no-any-return]

        def weighted() -> Any:
            result = step()
            if result.closure_loss is None:
                return result
            scaled = type(result)(result.closure_loss * weight, extra=result.extra)
            scaled.loss = result.loss  # for callbacks
            return scaled

        return weighted

    def on_after_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Add the batch's weight. At the window's end, average the gradients."""
        is_first_batch = trainer.fit_loop.batch_idx == self._start
        if self._has_run_backward and not is_first_batch:
            raise RuntimeError(
                "The optimizer evaluates the loss several times per step, which Accumulation "
                f"supports only with one batch per step; this window has {self._length}. "
                "Remove Accumulation, or use another optimizer."
            )
        self._split_check.report()
        # If the loss is evaluated again, the weight must not be added twice.
        earlier_weight = 0.0 if is_first_batch else self._window_weight
        self._window_weight = earlier_weight + self._batch_weight
        self._unaveraged += 1
        if not trainer.fit_loop._should_accumulate():
            self._average(trainer)
        self._has_run_backward = True

    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Optimizer
    ) -> None:
        """Average the gradients now if ``training_step`` returned None for the last batch."""
        if self._unaveraged:
            self._average(trainer)

    @torch.no_grad()
    def _average(self, trainer: pl.Trainer) -> None:
        # Each gradient is now the mean over ranks of `sum(weight / first_weight * gradient)`,
        # divided by `accumulate_grad_batches`, and under float16 multiplied by the loss scale.
        expected = trainer.accumulate_grad_batches * self._first_weight
        total, world = sum_over_ranks(self._window_weight, self._device, self._groups)
        factor = quotient(world * expected, total)
        self._unaveraged = 0
        if isinstance(factor, Tensor) or factor != 1.0:
            parameters = parameters_of(trainer.optimizers[0])  # some may have been added
            collect_gradients(parameters, self._flat).scale_(factor)

    # --- after training -------------------------------------------------------------------------

    def release(self, trainer: pl.Trainer) -> None:
        """Restore Lightning's window and drop the references to the run."""
        super().release(trainer)
        self._trainer, self._flat, self._groups = None, {}, ()
        self._restored_gradients = {}

    def state_dict(self) -> dict[str, Any]:
        """Return the window's state; on a single process, include its gradients so far."""
        gradients = dict(self._restored_gradients)
        if self._unaveraged and self._trainer is not None and self._trainer.world_size == 1:
            named = self._trainer.lightning_module.named_parameters()
            gradients = {name: p.grad.detach().clone() for name, p in named if p.grad is not None}
        return {
            "unit": self._first_weight,
            "start": self._start,
            "length": self._length,
            "open": self._is_open,
            "total": float(self._window_weight) if gradients else 0.0,
            "counted": self._unaveraged if gradients else 0,
            "gradients": gradients,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the state returned by :meth:`state_dict`."""
        self._first_weight, self._window_weight = state_dict["unit"], state_dict["total"]
        self._start, self._length = state_dict["start"], state_dict["length"]
        self._is_open, self._unaveraged = state_dict["open"], state_dict["counted"]
        self._restored_gradients = dict(state_dict["gradients"])
