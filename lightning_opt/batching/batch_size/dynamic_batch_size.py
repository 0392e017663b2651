"""A batch size that follows the memory that there is, from epoch to epoch."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Literal

import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.strategies import DeepSpeedStrategy

from lightning_opt.batching.batch_size.learning_rates import Pace, ScaledRates
from lightning_opt.batching.batch_size.memory_fit import ABOVE, MemoryFit, next_size
from lightning_opt.batching.batch_size.probe import largest_of_ranks
from lightning_opt.batching.batch_size.search import FoundSizes
from lightning_opt.batching.batch_size.trials import Trials
from lightning_opt.batching.loader_sizes import (
    LoaderSizes,
    check_loader,
    data_ranks,
    samples_of,
    set_batch_size,
)
from lightning_opt.batching.peaks import LimitMeter
from lightning_opt.core.arguments import at_least, between, positive
from lightning_opt.core.modules.patching import replaced
from lightning_opt.core.output.loggers import log_scalars
from lightning_opt.core.output.report import Report
from lightning_opt.trainer.run_callback import RunCallback

if TYPE_CHECKING:
    import lightning.pytorch as pl

log = logging.getLogger(__name__)

SCALES: dict[str, Callable[[float], float]] = {"linear": float, "sqrt": math.sqrt}
FINDS = ("largest", "fastest")


class DynamicBatchSize(RunCallback):
    """Adapts the training loader's batch size to the memory that the last epoch took.

    At the end of each epoch, the memory peak is compared with every limit: the device's, and on a
    CPU the machine's, those of control groups, ``RLIMIT_AS`` and ``budget_mb``. More than 0.1 below
    ``target``, the batch size grows by ``grow``, but no further than where a line through the
    measurements predicts ``target``; more than 0.05 above, it shrinks by 0.8. All ranks change
    together, by the one nearest to its limit, and only between epochs, so each sample is seen once.

    Larger batches train differently, with fewer and less noisy steps. So an optimizer step keeps
    its number of samples, ``keep_effective``: batches are accumulated to that number, and sizes
    divide it. With ``scale_lr``, steps have as many samples as fit, and learning rates follow.
    Schedules by step still end with the training, however many steps an epoch has.

    Logged when the size changes:

    ========================== =================================================================
    ``batch_size/size``        batch size of a rank's loader from the next epoch on
    ``batch_size/memory``      peak of the epoch that has ended, as a share of the nearest limit
    ``batch_size/accumulate``  batches of an optimizer step
    ``batch_size/lr_scale``    what learning rates are multiplied with at each step
    ========================== =================================================================

    Args:
        target: Share of memory that is aimed at.
        grow: What the size is multiplied with at most, above 1.
        max_size: The largest size; None for as many samples as there are.
        scale_lr: How learning rates follow the size over that of the start: ``"linear"`` or
            ``"sqrt"``. Then the samples of a step are not kept.
        keep_effective: Samples of an optimizer step over all ranks; None for those that it has at
            the start, by the loader's batch size, ``accumulate_grad_batches`` and ranks.
        find: Whether to start with a size found by trials before training: ``True`` or
            ``"largest"`` for the largest that fits ``target``, ``"fastest"`` for the one with most
            samples a second. Not when resuming.
        budget_mb: A further limit: memory of this process on its device.

    Raises:
        ValueError: In ``__init__`` for arguments out of range or that exclude each other; in
            ``setup`` under DeepSpeed, and without ``scale_lr`` if something else sets the
            accumulation or under manual optimisation; before training for loaders whose batch size
            cannot be changed.

    Example:
        >>> import lightning as L
        >>> import lightning_opt as lo
        >>> trainer = L.Trainer(callbacks=[lo.DynamicBatchSize(keep_effective=256)], logger=False)
    """

    process_only = ("_trainer", "_stack", "_meter", "_rates")

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
        self.target = between("target", target, 0.0, 1.0)
        if positive("grow", grow) <= 1:
            raise ValueError(f"grow must be above 1, got {grow}.")
        if scale_lr is not None and scale_lr not in SCALES:
            raise ValueError(f"scale_lr must be one of {tuple(SCALES)} or None, got {scale_lr!r}.")
        if scale_lr is not None and keep_effective is not None:
            raise ValueError(
                "keep_effective keeps the samples of a step, so there is nothing for scale_lr to "
                "follow. Give one of them."
            )
        if not isinstance(find, bool) and find not in FINDS:
            raise ValueError(f"find must be a bool or one of {FINDS}, got {find!r}.")
        self.grow, self.scale_lr = grow, scale_lr
        self.max_size = None if max_size is None else at_least("max_size", max_size, 1)
        self.keep_effective = (
            None if keep_effective is None else at_least("keep_effective", keep_effective, 1)
        )
        self.find: str | None = ("largest" if find else None) if isinstance(find, bool) else find
        self.budget_mb = None if budget_mb is None else positive("budget_mb", budget_mb)
        self.found: FoundSizes | None = None
        self._trainer: pl.Trainer | None = None
        self._stack: ExitStack | None = None
        self._meter: LimitMeter | None = None
        self._rates: ScaledRates | None = None
        self._most = 0
        self._forget()

    def _forget(self) -> None:
        self._size: int | None = None
        self._initial: int | None = None
        self._kept: int | None = None  # samples of this rank in an optimizer step
        self._ceiling: int | None = None  # a size that has proved too large
        self._fit = MemoryFit()
        self._pace = Pace()
        self._peak = 0.0
        self.events: list[dict[str, Any]] = []

    @property
    def size(self) -> int | None:
        """The batch size of a rank's loader; None before the first run."""
        return self._size

    # --- before training ------------------------------------------------------------------------

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Refuse what cannot be right, find a size if asked to, and watch loaders being loaded."""
        super().setup(trainer, pl_module, stage)
        if stage != "fit":
            return
        self.release(trainer)
        self._check(trainer, pl_module)
        self._trainer = trainer
        if self.find is not None and self._size is None and trainer.ckpt_path is None:
            trials = Trials(trainer, pl_module, self.target, self.budget_mb, leave_out=self)
            self.found = trials.find(self.find, self.max_size)
            self._size = self.found.chosen(self.find)
            self._initial = self.found.initial
        self._stack = ExitStack()  # restores what changes from epoch to epoch
        self._reload: int = trainer.reload_dataloaders_every_n_epochs  # type: ignore[attr-defined]
        kept = {"reload_dataloaders_every_n_epochs": self._reload}
        self._accumulated = int(trainer.accumulate_grad_batches)
        if self.scale_lr is None:
            kept["accumulate_grad_batches"] = self._accumulated
        self._stack.enter_context(replaced(trainer, **kept))
        self._stack.callback(LoaderSizes(trainer, self._resize).close)

    def reset_for_model(self, pl_module: pl.LightningModule) -> None:
        """Forget another model, which takes other memory."""
        self._forget()

    def _check(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if isinstance(trainer.strategy, DeepSpeedStrategy):
            raise ValueError(
                "DynamicBatchSize does not work with the DeepSpeed strategy, which takes the batch "
                "size into its configuration once, at the start."
            )
        callbacks = trainer.callbacks  # type: ignore[attr-defined]
        windows = {c.accumulates_by for c in callbacks if isinstance(c, RunCallback)}
        if "effective_batch" in windows or ("schedule" in windows and self.scale_lr is None):
            raise ValueError(
                "Accumulation and DynamicBatchSize both say how many samples a step has. Leave "
                "its schedule or effective_batch out; beside scale_lr a schedule may stay."
            )
        if self.scale_lr is not None:
            return
        if not pl_module.automatic_optimization:
            raise ValueError(
                "DynamicBatchSize cannot keep the samples of a step under manual optimisation, "
                "where training_step itself accumulates. Say how learning rates follow the batch "
                "size: scale_lr='linear' or 'sqrt'."
            )
        given = self.keep_effective is not None and trainer.accumulate_grad_batches != 1
        if given or any(isinstance(c, GradientAccumulationScheduler) for c in callbacks):
            raise ValueError(
                "DynamicBatchSize sets accumulate_grad_batches itself. Leave keep_effective or "
                "accumulate_grad_batches out, and GradientAccumulationScheduler too."
            )
        ranks = data_ranks(trainer)
        if self.keep_effective is not None and self.keep_effective % ranks:
            raise ValueError(
                f"keep_effective={self.keep_effective} cannot be shared by {ranks} ranks: it must "
                "be a multiple of their number."
            )

    def _resize(self, loader: Any) -> None:
        """Give the training loader its size, each time that one is loaded."""
        trainer = self._trainer
        assert trainer is not None
        size = check_loader(loader)
        if self._initial is None:
            self._initial = size
        if self._size is None:
            self._size = self._initial
        samples = samples_of(loader)
        self._most = self.max_size or samples or 10**9
        if samples is not None:
            self._most = max(1, min(self._most, samples))
            every = trainer.val_check_interval
            if isinstance(every, int) and trainer.check_val_every_n_epoch is not None:
                self._most = max(1, min(self._most, samples // every))  # it is within an epoch
        self._size = min(self._size, self._most) if self._size != self._initial else self._size
        if self.scale_lr is None:
            if self._kept is None and self.keep_effective is not None:
                self._kept = self.keep_effective // data_ranks(trainer)
            elif self._kept is None:
                self._kept = self._size * self._accumulated
            allowed = self._allowed()
            self._size = max(s for s in allowed if s <= max(self._size, allowed[0]))
            trainer.accumulate_grad_batches = self._accumulation()
        if self._size != size:
            set_batch_size(loader, self._size)

    def _allowed(self) -> list[int]:
        """Return the sizes that go into the effective batch, in ascending order; none for all."""
        kept = self._kept or 0
        return [size for size in range(1, kept + 1) if kept % size == 0]

    def _accumulation(self) -> int:
        return self._accumulated if self._kept is None else self._kept // (self._size or 1)

    # --- training -------------------------------------------------------------------------------

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Begin to scale learning rates and to keep schedules in pace."""
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
        self._rates.scale = self._scale()
        if trainer.lr_scheduler_configs:
            self._stack.enter_context(
                replaced(pl_module, lr_scheduler_step=self._pace.around(trainer, pl_module))
            )
        self._pace.follow(trainer)

    def _scale(self) -> float:
        if self.scale_lr is None or self._size is None or self._initial is None:
            return 1.0
        return SCALES[self.scale_lr](self._size / self._initial)

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Begin to measure the epoch."""
        trainer.reload_dataloaders_every_n_epochs = self._reload  # type: ignore[attr-defined]
        self._peak = 0.0
        self._pace.calls = {}
        self._pace.follow(trainer)
        assert self._meter is not None
        self._meter.start()

    def on_before_backward(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, loss: torch.Tensor
    ) -> None:
        """Look at memory, where the system does not keep its peak."""
        if self._meter is not None and self._meter.samples:
            self._meter.sample()

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Leave validation out of the measurement."""
        if self._meter is not None and not trainer.sanity_checking:
            self._peak = max(self._peak, self._meter.read().share)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Go on measuring."""
        if self._meter is not None and not trainer.sanity_checking:
            self._meter.start()

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Decide on the size for the next epoch."""
        assert self._meter is not None
        assert self._size is not None
        now = self._meter.read()
        values = [max(self._peak, now.share), now.rest, float(self._size), -float(self._most)]
        if trainer.world_size > 1:
            values = largest_of_ranks(values, trainer.strategy.root_device)
        peak, rest, most = values[0], values[1], -int(values[3])
        if peak >= self.target / 2:  # what is far from the limit tells little about it
            self._fit.add(self._size, peak, rest)
        if self._ceiling is not None:
            most = min(most, self._ceiling - 1)
        size = next_size(
            self._size,
            peak,
            self._fit,
            target=self.target,
            grow=self.grow,
            most=most,
            allowed=self._allowed(),
        )
        if peak > self.target + ABOVE:
            self._ceiling = min(self._ceiling or self._size, self._size)
        if size != self._size:
            self._change(trainer, size, peak)

    def _change(self, trainer: pl.Trainer, size: int, peak: float) -> None:
        self.events.append({"epoch": trainer.current_epoch, "from": self._size, "to": size})
        del self.events[:-1000]
        log.info("Batch size %d -> %d: memory at %.3f of its limit.", self._size, size, peak)
        self._size = size
        trainer.reload_dataloaders_every_n_epochs = 1  # type: ignore[attr-defined]
        assert self._rates is not None
        self._rates.scale = self._scale()
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
        """Return the newest changes of size, one a row."""
        title = f"DynamicBatchSize: {self._initial} at the start, now {self._size}"
        return Report(title, self.events)

    # --- after training -------------------------------------------------------------------------

    def release(self, trainer: pl.Trainer) -> None:
        """Give loaders, learning rates and the Trainer back as they were."""
        if self._stack is not None:
            self._stack.close()
        self._stack = self._meter = self._rates = self._trainer = None

    def state_dict(self) -> dict[str, Any]:
        """Return sizes, what was measured near the limit, and where schedules are."""
        return {
            "size": self._size,
            "initial": self._initial,
            "ceiling": self._ceiling,
            "kept": self._kept,
            "planned": self._pace.planned,
            "points": dict(self._fit.points),
            "rest": self._fit.rest,
            "calls": dict(self._pace.calls),
            "events": [dict(event) for event in self.events],
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned."""
        self._size, self._initial = state_dict["size"], state_dict["initial"]
        self._ceiling, self._kept = state_dict["ceiling"], state_dict["kept"]
        self._fit = MemoryFit(dict(state_dict["points"]), state_dict["rest"])
        self._pace.planned, self._pace.calls = state_dict["planned"], dict(state_dict["calls"])
        self.events = [dict(event) for event in state_dict["events"]]
        if self._trainer is not None:
            self._trainer.fit_loop._combined_loader = None  # was it loaded with another size?
