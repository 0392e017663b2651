"""A batch size that follows the available memory from epoch to epoch."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Literal

import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.strategies import DeepSpeedStrategy

from lightning_opt.batching.batch_size.learning_rates import ScaledRates, SchedulerPace
from lightning_opt.batching.batch_size.search import MAX_ABOVE, FoundSizes, MemoryFit, next_size
from lightning_opt.batching.batch_size.trials import Trials
from lightning_opt.batching.loader_sizes import (
    LoaderSizes,
    check_loader,
    data_ranks,
    samples_of,
    set_batch_size,
)
from lightning_opt.batching.peaks import LimitMeter
from lightning_opt.core.arguments import check_at_least, check_between, check_one_of, check_positive
from lightning_opt.core.modules.patching import replaced
from lightning_opt.core.modules.sharding import largest_over_ranks
from lightning_opt.core.output.loggers import log_scalars
from lightning_opt.core.output.report import Report
from lightning_opt.trainer.run_callback import RunCallback

if TYPE_CHECKING:
    import lightning.pytorch as pl

log = logging.getLogger(__name__)

SCALE_RULES: dict[str, Callable[[float], float]] = {"linear": float, "sqrt": math.sqrt}
FIND_MODES = (False, True, "largest", "fastest")
UNLIMITED = 10**9


class DynamicBatchSize(RunCallback):
    """Adapts the training loader's batch size to the memory peak of the last epoch.

    At the end of each epoch, it compares the memory peak with every limit: the device's memory and
    ``budget_mb``; on a CPU, the memory of the machine and of control groups, ``RLIMIT_AS`` and
    ``budget_mb``. If the peak is more than 0.1 below ``target``, the batch size grows by ``grow``,
    but not above the size for which a line through the measurements predicts ``target``. If the
    peak is more than 0.05 above ``target``, the size shrinks to 0.8 of itself. The rank nearest to
    its limit decides for all ranks. The size changes only between epochs, so each sample is seen
    once per epoch.

    Larger batches train differently, with fewer and less noisy steps. So an optimizer step keeps
    its number of samples, ``keep_effective``: batches are accumulated to that number, and only
    sizes that divide it are used. With ``scale_lr``, a step has as many samples as fit into memory,
    and learning rates are scaled. Schedules by step still end with training, however many steps an
    epoch has.

    Logged when the size changes:

    ========================== =================================================================
    ``batch_size/size``        batch size of each rank's loader from the next epoch on
    ``batch_size/memory``      peak of the last epoch, as a share of the nearest limit
    ``batch_size/accumulate``  batches per optimizer step
    ``batch_size/lr_scale``    factor on the learning rates at each step
    ========================== =================================================================

    Args:
        target: The share of memory to use.
        grow: The largest growth factor, above 1.
        max_size: The largest size to use; None for the number of samples.
        scale_lr: How learning rates follow the ratio of the size to the initial size: ``"linear"``
            or ``"sqrt"``. The samples per step are then not kept.
        keep_effective: Samples per optimizer step over all ranks; None for the initial number: the
            loader's batch size times ``accumulate_grad_batches`` times the number of ranks.
        find: Whether to search for the initial size by trials before training: ``True`` or
            ``"largest"`` for the largest size that fits ``target``, ``"fastest"`` for the size with
            the most samples per second. A resumed run does not search.
        budget_mb: An additional limit on the memory of this process on its device.

    Raises:
        ValueError: In ``__init__`` for arguments that are out of range or exclude each other. In
            ``setup`` under DeepSpeed; without ``scale_lr`` also under manual optimisation, or if
            another callback sets the accumulation. Before training for loaders whose batch size
            cannot be changed, or if the samples of a step cannot be divided by the number of ranks.

    Example:
        >>> import lightning as L
        >>> import lightning_opt as lo
        >>> trainer = L.Trainer(callbacks=[lo.DynamicBatchSize(keep_effective=256)], logger=False)
    """

    not_pickled = ("_trainer", "_stack", "_meter", "_rates")

    def __init__(
        self,
        target: float = 0.9,
        grow: float = 1.2,
        max_size: int | None = None,
        scale_lr: Literal["linear", "sqrt"] | None = None,
        keep_effective: int | None = None,
        find: bool | Literal["largest", "fastest"] = False,
        budget_mb: float | None = None,
    ) -> None:
        self.target = check_between("target", target, 0.0, 1.0)
        if check_positive("grow", grow) <= 1:
            raise ValueError(f"grow must be above 1, got {grow}.")
        if scale_lr is not None:
            check_one_of("scale_lr", scale_lr, tuple(SCALE_RULES))
        if scale_lr is not None and keep_effective is not None:
            raise ValueError(
                "keep_effective keeps the samples per step, so there is nothing for scale_lr to "
                "follow. Give one of them."
            )
        check_one_of("find", find, FIND_MODES)
        self.grow, self.scale_lr = grow, scale_lr
        self.max_size = None if max_size is None else check_at_least("max_size", max_size, 1)
        self.keep_effective = keep_effective
        if keep_effective is not None:
            check_at_least("keep_effective", keep_effective, 1)
        self.find: str | None = "largest" if find is True else find or None
        self.budget_mb = None if budget_mb is None else check_positive("budget_mb", budget_mb)
        self.found: FoundSizes | None = None
        self._trainer: pl.Trainer | None = None
        self._stack: ExitStack | None = None
        self._meter: LimitMeter | None = None
        self._rates: ScaledRates | None = None
        self._reset()

    def _reset(self) -> None:
        self._size: int | None = None
        self._initial: int | None = None
        self._effective: int | None = None  # samples per step over all ranks; None with scale_lr
        self._ceiling = UNLIMITED  # the smallest size that was too large
        self._size_limit = UNLIMITED
        self._fit = MemoryFit()
        self._scheduler_pace = SchedulerPace()
        self._epoch_peak = 0.0
        self.events: list[dict[str, Any]] = []

    @property
    def size(self) -> int | None:
        """The batch size of each rank's loader; None before the first run."""
        return self._size

    # --- before training ------------------------------------------------------------------------

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Check the settings, search for a size if requested, and intercept loaders."""
        super().setup(trainer, pl_module, stage)
        if stage != "fit":
            return
        self.release(trainer)
        self._check(trainer, pl_module)
        self._trainer = trainer
        if self.find is not None and self._size is None and trainer.ckpt_path is None:
            trials = Trials(trainer, pl_module, self.target, self.budget_mb, excluded=self)
            self.found = trials.find(self.find, self.max_size)
            self._size = self.found.chosen(self.find)
            self._initial = self.found.initial
        self._stack = ExitStack()
        self._reload_every: int = trainer.reload_dataloaders_every_n_epochs  # type: ignore[attr-defined]
        settings = {"reload_dataloaders_every_n_epochs": self._reload_every}
        self._initial_accumulation = int(trainer.accumulate_grad_batches)
        if self.scale_lr is None:
            settings["accumulate_grad_batches"] = self._initial_accumulation
        self._stack.enter_context(replaced(trainer, **settings))
        self._stack.callback(LoaderSizes(trainer, self._set_size).close)

    def reset_for_model(self, pl_module: pl.LightningModule) -> None:
        """Discard the measurements of another model."""
        self._reset()

    def _check(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if isinstance(trainer.strategy, DeepSpeedStrategy):
            raise ValueError(
                "DynamicBatchSize does not work with the DeepSpeed strategy, which reads the batch "
                "size once, at the start."
            )
        callbacks = trainer.callbacks  # type: ignore[attr-defined]
        windows = {c.accumulates_by for c in callbacks if isinstance(c, RunCallback)}
        if "effective_batch" in windows or ("schedule" in windows and self.scale_lr is None):
            raise ValueError(
                "Accumulation and DynamicBatchSize both set the samples per step. Leave out "
                "Accumulation's schedule or effective_batch; with scale_lr a schedule may stay."
            )
        if self.scale_lr is not None:
            return
        if not pl_module.automatic_optimization:
            raise ValueError(
                "DynamicBatchSize cannot keep the samples per step under manual optimisation, "
                "where training_step itself accumulates. Choose how learning rates follow the "
                "batch size: scale_lr='linear' or 'sqrt'."
            )
        sets_both = self.keep_effective is not None and trainer.accumulate_grad_batches != 1
        if sets_both or any(isinstance(c, GradientAccumulationScheduler) for c in callbacks):
            raise ValueError(
                "DynamicBatchSize sets accumulate_grad_batches itself. Leave keep_effective or "
                "accumulate_grad_batches out, and GradientAccumulationScheduler too."
            )
        if self.keep_effective is not None:
            _check_ranks_divide(self.keep_effective, data_ranks(trainer))

    def _set_size(self, loader: Any) -> None:
        """Set the size of a training loader. Called each time a loader is created."""
        trainer = self._trainer
        assert trainer is not None
        size = check_loader(loader)
        if self._initial is None:
            self._initial = size
        if self._size is None:
            self._size = self._initial
        samples = samples_of(loader)
        self._size_limit = self.max_size or samples or UNLIMITED
        if samples is not None:
            batches = 1
            if trainer.check_val_every_n_epoch is not None:
                interval = trainer.val_check_interval  # as a number of batches, at most an epoch
                batches = interval if isinstance(interval, int) else 1
            self._size_limit = max(1, min(self._size_limit, samples // batches))
        if self._size != self._initial:
            self._size = min(self._size, self._size_limit)
        if self.scale_lr is None:
            ranks = data_ranks(trainer)
            if self._effective is None:
                initial = self._size * self._initial_accumulation * ranks
                self._effective = self.keep_effective or initial
            _check_ranks_divide(self._effective, ranks)
            self._size = self._allowed(self._size)[-1]
            trainer.accumulate_grad_batches = self._accumulation()
        if self._size != size:
            set_batch_size(loader, self._size)

    def _allowed(self, most: int) -> Sequence[int]:
        """Return the possible sizes up to ``most``, ascending: all divide the samples per step."""
        if self._effective is None:
            return range(1, most + 1)
        assert self._trainer is not None
        per_rank = self._effective // data_ranks(self._trainer)
        return [size for size in range(1, min(per_rank, most) + 1) if per_rank % size == 0]

    def _accumulation(self) -> int:
        if self._effective is None:
            return self._initial_accumulation
        assert self._trainer is not None
        return self._effective // (data_ranks(self._trainer) * (self._size or 1))

    # --- training -------------------------------------------------------------------------------

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Start to scale learning rates and to keep schedules in step with epochs."""
        assert self._stack is not None
        loader = trainer.fit_loop._combined_loader
        if loader is not None and len(loader.flattened) > 1:
            raise ValueError(
                f"DynamicBatchSize works with one training loader, got {len(loader.flattened)}. "
                "Put their datasets into one (torch.utils.data.StackDataset, ConcatDataset)."
            )
        self._meter = LimitMeter(trainer.strategy.root_device, self.budget_mb)
        self._meter.start()
        self._rates = ScaledRates(trainer.optimizers)
        self._stack.callback(self._rates.close)
        self._rates.scale = self._lr_scale()
        if trainer.lr_scheduler_configs:
            paced = self._scheduler_pace.lr_scheduler_step(trainer, pl_module)
            self._stack.enter_context(replaced(pl_module, lr_scheduler_step=paced))
        self._scheduler_pace.count_steps(trainer)

    def _lr_scale(self) -> float:
        if self.scale_lr is None or self._size is None or self._initial is None:
            return 1.0
        return SCALE_RULES[self.scale_lr](self._size / self._initial)

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Start to measure the epoch."""
        trainer.reload_dataloaders_every_n_epochs = self._reload_every  # type: ignore[attr-defined]
        self._epoch_peak = 0.0
        self._scheduler_pace.calls = {}
        self._scheduler_pace.count_steps(trainer)
        assert self._meter is not None
        self._meter.start()

    def on_before_backward(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, loss: torch.Tensor
    ) -> None:
        """Sample memory on systems that do not record the peak."""
        if self._meter is not None and self._meter.samples:
            self._meter.sample()

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Exclude validation from the measurement."""
        if self._meter is not None and not trainer.sanity_checking:
            self._epoch_peak = max(self._epoch_peak, self._meter.read().share)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Continue the measurement."""
        if self._meter is not None and not trainer.sanity_checking:
            self._meter.start()

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Choose the size for the next epoch, the same on all ranks."""
        assert self._meter is not None
        assert self._rates is not None
        assert self._size is not None
        memory = self._meter.read()
        peak = max(self._epoch_peak, memory.share)
        values: Sequence[float] = (peak, memory.current, -self._size_limit)
        if trainer.world_size > 1:
            values = largest_over_ranks(values, trainer.strategy.root_device)
        peak, baseline, negative_limit = values
        most = min(-int(negative_limit), self._ceiling - 1)
        if peak >= self.target / 2:  # at lower peaks, noise exceeds the slope
            self._fit.add(self._size, peak, baseline)
        allowed = self._allowed(max(1, most))
        size = next_size(self._size, peak, self._fit, allowed, target=self.target, grow=self.grow)
        if peak > self.target + MAX_ABOVE:
            self._ceiling = min(self._ceiling, self._size)
        if size == self._size:
            return
        self.events.append({"epoch": trainer.current_epoch, "from": self._size, "to": size})
        del self.events[:-1000]
        log.info("Batch size %d -> %d: memory at %.3f of its limit.", self._size, size, peak)
        self._size = size
        trainer.reload_dataloaders_every_n_epochs = 1  # type: ignore[attr-defined]
        self._rates.scale = self._lr_scale()
        log_scalars(
            trainer,
            {
                "batch_size/size": size,
                "batch_size/memory": peak,
                "batch_size/accumulate": self._accumulation(),
                "batch_size/lr_scale": self._rates.scale,
            },
        )

    def report(self) -> Report:
        """Return the newest changes of size, one per row."""
        title = f"DynamicBatchSize: {self._initial} at the start, now {self._size}"
        return Report(title, self.events)

    # --- after training -------------------------------------------------------------------------

    def release(self, trainer: pl.Trainer) -> None:
        """Restore loaders, learning rates and the Trainer."""
        if self._stack is not None:
            self._stack.close()
        self._stack = self._meter = self._rates = self._trainer = None

    def state_dict(self) -> dict[str, Any]:
        """Return the sizes, the measurements near the limit, the schedules' position and events."""
        return {
            "size": self._size,
            "initial": self._initial,
            "ceiling": self._ceiling,
            "effective": self._effective,
            "planned": self._scheduler_pace.planned,
            "points": dict(self._fit.points),
            "rest": self._fit.baseline,
            "calls": dict(self._scheduler_pace.calls),
            "events": [dict(event) for event in self.events],
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the state returned by :meth:`state_dict`."""
        self._size, self._initial = state_dict["size"], state_dict["initial"]
        self._ceiling = state_dict["ceiling"]
        if self.scale_lr is None:
            self._effective = self.keep_effective or state_dict["effective"]
        self._fit = MemoryFit(dict(state_dict["points"]), state_dict["rest"])
        self._scheduler_pace.planned = state_dict["planned"]
        self._scheduler_pace.calls = dict(state_dict["calls"])
        self.events = [dict(event) for event in state_dict["events"]]
        if self._trainer is not None:
            # An existing loader may have another size.
            self._trainer.fit_loop._combined_loader = None


def _check_ranks_divide(effective: int, ranks: int) -> None:
    if effective % ranks:
        raise ValueError(
            f"DynamicBatchSize keeps {effective} samples per step, which {ranks} ranks cannot "
            "share: keep_effective must be a multiple of the number of ranks."
        )
