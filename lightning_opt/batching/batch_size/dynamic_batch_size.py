"""A batch size that follows the memory that there is, from epoch to epoch."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Literal
from weakref import ref

import torch
import torch.distributed as dist
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.strategies import DeepSpeedStrategy
from torch import nn

from lightning_opt.batching.batch_size.learning_rates import Pace, ScaledRates
from lightning_opt.batching.batch_size.memory_fit import MemoryFit, next_size
from lightning_opt.batching.batch_size.search import FoundSizes
from lightning_opt.batching.batch_size.trials import find_within
from lightning_opt.batching.loader_sizes import (
    LoaderSizes,
    batch_size_of,
    check_loader,
    samples_of,
    set_batch_size,
)
from lightning_opt.batching.peaks import LimitMeter
from lightning_opt.core.arguments import at_least, between, positive
from lightning_opt.core.loggers import log_scalars
from lightning_opt.core.preserve import replaced
from lightning_opt.core.report import Report

if TYPE_CHECKING:
    import lightning.pytorch as pl

log = logging.getLogger(__name__)

SCALES: dict[str, Callable[[float], float]] = {"linear": float, "sqrt": math.sqrt}
FINDS = ("largest", "fastest")


class DynamicBatchSize(Callback):
    """Gives the training DataLoader larger or smaller batches, by the memory that an epoch took.

    At the end of each epoch the peak of memory is compared with every limit: the device's, and on a
    CPU the machine's, those of control groups, ``RLIMIT_AS`` and ``budget_mb``. Below ``low`` of
    it the batch size grows by ``grow``, but only to where ``target`` is foretold by a line through
    what was measured; above ``high`` it shrinks by ``shrink``. All ranks change together, by the
    one that is nearest to its limit. Within an epoch nothing changes, so each sample is seen once.

    Larger batches are another training: fewer and less noisy steps. ``keep_effective`` accumulates
    so that a step has always as many samples; otherwise ``scale_lr`` may follow the size. Learning
    rates that follow a schedule by steps reach the end of it at the end of training, also if epochs
    have more or fewer steps than when it was made.

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
        shrink: What it is multiplied with, below 1.
        low: Share of memory below which it grows.
        high: Share of memory above which it shrinks.
        max_size: The largest size; None for as many samples as there are.
        scale_lr: ``"linear"`` or ``"sqrt"`` in the size over that of the start; None for rates that
            stay.
        keep_effective: Samples of an optimizer step over all ranks, which stay the same: sizes are
            then those that go into it.
        find: Whether to start with a size found by trials before training: ``True`` or
            ``"largest"`` for the largest that fits ``target``, ``"fastest"`` for the one with most
            samples a second. Not when resuming.
        budget_mb: A limit of one's own: memory of this process on its device.
        validation: Whether validation within ``fit`` gets the same batch size.

    Raises:
        ValueError: In ``__init__`` for arguments out of range or that exclude each other; in
            ``setup`` under DeepSpeed, and with ``keep_effective`` if something else sets the
            accumulation or under manual optimisation; before training for loaders whose batch size
            cannot be changed.

    Example:
        >>> import lightning as L
        >>> import lightning_opt as lo
        >>> trainer = L.Trainer(callbacks=[lo.DynamicBatchSize(keep_effective=256)], logger=False)
    """

    def __init__(
        self,
        target: float = 0.9,
        grow: float = 1.2,
        shrink: float = 0.8,
        low: float = 0.8,
        high: float = 0.95,
        max_size: int | None = None,
        scale_lr: Literal["linear", "sqrt"] | None = None,
        keep_effective: int | None = None,
        find: bool | Literal["largest", "fastest"] = False,
        budget_mb: float | None = None,
        validation: bool = False,
    ) -> None:
        self.target, self.low = between("target", target, 0.0, 1.0), between("low", low, 0.0, 1.0)
        self.high = between("high", high, 0.0, 1.0)
        if not low <= target <= high:
            raise ValueError(
                f"low <= target <= high is needed, got low={low}, target={target}, high={high}."
            )
        if positive("grow", grow) <= 1:
            raise ValueError(f"grow must be above 1, got {grow}.")
        if positive("shrink", shrink) >= 1:
            raise ValueError(f"shrink must be below 1, got {shrink}.")
        if scale_lr is not None and scale_lr not in SCALES:
            raise ValueError(f"scale_lr must be one of {tuple(SCALES)} or None, got {scale_lr!r}.")
        if scale_lr is not None and keep_effective is not None:
            raise ValueError(
                "keep_effective keeps the samples of a step, so there is nothing for scale_lr to "
                "follow. Give one of them."
            )
        if not isinstance(find, bool) and find not in FINDS:
            raise ValueError(f"find must be a bool or one of {FINDS}, got {find!r}.")
        self.grow, self.shrink, self.scale_lr = grow, shrink, scale_lr
        self.max_size = None if max_size is None else at_least("max_size", max_size, 1)
        self.keep_effective = (
            None if keep_effective is None else at_least("keep_effective", keep_effective, 1)
        )
        self.find: str | None = ("largest" if find else None) if isinstance(find, bool) else find
        self.budget_mb = None if budget_mb is None else positive("budget_mb", budget_mb)
        self.validation = validation
        self.found: FoundSizes | None = None
        self._module: ref[nn.Module] | None = None
        self._is_copy = False  # of a callback that has seen a model: not this one's
        self._trainer: pl.Trainer | None = None
        self._stack: ExitStack | None = None
        self._loaders: LoaderSizes | None = None
        self._meter: LimitMeter | None = None
        self._rates: ScaledRates | None = None
        self._most = 0
        self._reset()

    def _reset(self) -> None:
        self._size: int | None = None
        self._initial: int | None = None
        self._ceiling: int | None = None  # a size that has proved too large
        self._planned: int | None = None  # optimizer steps of an epoch when schedules were made
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
        if stage != "fit":
            return
        self._release()
        self._check(trainer, pl_module)
        if self._module is None or self._module() is not pl_module:
            if self._module is not None or self._is_copy:
                self._reset()  # another model takes other memory
            self._module, self._is_copy = ref(pl_module), False
        self._trainer = trainer
        if self.find is not None and self._size is None and trainer.ckpt_path is None:
            self.found = find_within(
                trainer,
                pl_module,
                mode=self.find,
                target=self.target,
                max_size=self.max_size,
                budget_mb=self.budget_mb,
                leave_out=self,
            )
            self._size = self.found.chosen(self.find)
            self._initial = self.found.initial
        self._stack = ExitStack()
        # They are restored with the stack, since both change from epoch to epoch.
        self._reload: int = trainer.reload_dataloaders_every_n_epochs  # type: ignore[attr-defined]
        kept = {"reload_dataloaders_every_n_epochs": self._reload}
        if self.keep_effective is not None:
            kept["accumulate_grad_batches"] = 1
        self._stack.enter_context(replaced(trainer, **kept))
        if self.validation:
            trainer.reload_dataloaders_every_n_epochs = 1  # type: ignore[attr-defined]
        self._loaders = LoaderSizes(
            trainer, self._resize, self._resize_validation if self.validation else None
        )

    def _check(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if isinstance(trainer.strategy, DeepSpeedStrategy):
            raise ValueError(
                "DynamicBatchSize does not work with the DeepSpeed strategy, which takes the batch "
                "size into its configuration once, at the start."
            )
        if self.keep_effective is None:
            return
        if not pl_module.automatic_optimization:
            raise ValueError(
                "DynamicBatchSize(keep_effective=...) does not work under manual optimisation, "
                "where training_step itself accumulates. Leave keep_effective out."
            )
        callbacks = trainer.callbacks  # type: ignore[attr-defined]
        if trainer.accumulate_grad_batches != 1 or any(
            isinstance(callback, GradientAccumulationScheduler) for callback in callbacks
        ):
            raise ValueError(
                "DynamicBatchSize(keep_effective=...) sets accumulate_grad_batches itself. Leave "
                "it out of the Trainer, and GradientAccumulationScheduler out of its callbacks."
            )
        ranks = _data_ranks(trainer)
        if self.keep_effective % ranks:
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
        if self.keep_effective is not None:
            allowed = self._allowed()
            self._size = max(s for s in allowed if s <= max(self._size, allowed[0]))
            trainer.accumulate_grad_batches = self._accumulation()
        if self._size != size:
            set_batch_size(loader, self._size)

    def _resize_validation(self, loader: Any) -> None:
        if self._size is not None and batch_size_of(loader) is not None:
            set_batch_size(loader, self._size)

    def _allowed(self) -> list[int]:
        """Return the sizes that go into the effective batch, in ascending order."""
        if self.keep_effective is None:
            return []
        assert self._trainer is not None
        own = self.keep_effective // _data_ranks(self._trainer)
        return [size for size in range(1, own + 1) if own % size == 0]

    def _accumulation(self) -> int:
        assert self._trainer is not None
        if self.keep_effective is None or self._size is None:
            return int(self._trainer.accumulate_grad_batches)
        return self.keep_effective // _data_ranks(self._trainer) // self._size

    # --- training -------------------------------------------------------------------------------

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Begin to scale learning rates and to keep schedules in pace."""
        assert self._stack is not None
        loader = trainer.fit_loop._combined_loader
        if loader is not None and len(loader.flattened) > 1:
            raise ValueError(
                "DynamicBatchSize works with one training loader, and there are "
                f"{len(loader.flattened)}. Put their datasets into one "
                "(torch.utils.data.StackDataset, ConcatDataset)."
            )
        self._meter = LimitMeter(trainer.strategy.root_device, self.budget_mb)
        self._meter.start()
        if self._planned is None and math.isfinite(trainer.num_training_batches):
            self._planned = self._steps(trainer)
        self._rates = ScaledRates(trainer.optimizers)
        self._rates.scale = self._scale()
        if trainer.lr_scheduler_configs:
            self._stack.enter_context(
                replaced(pl_module, lr_scheduler_step=self._pace.around(trainer, pl_module))
            )
        self._set_pace(trainer)

    @staticmethod
    def _steps(trainer: pl.Trainer) -> int:
        return math.ceil(trainer.num_training_batches / trainer.accumulate_grad_batches)

    def _set_pace(self, trainer: pl.Trainer) -> None:
        if self._planned is not None and math.isfinite(trainer.num_training_batches):
            self._pace.planned, self._pace.actual = self._planned, self._steps(trainer)

    def _scale(self) -> float:
        if self.scale_lr is None or self._size is None or self._initial is None:
            return 1.0
        return SCALES[self.scale_lr](self._size / self._initial)

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Begin to measure the epoch."""
        if not self.validation:
            trainer.reload_dataloaders_every_n_epochs = self._reload  # type: ignore[attr-defined]
        self._peak = 0.0
        self._pace.calls = {}
        self._set_pace(trainer)
        self._start()

    def _start(self) -> None:
        if self._meter is not None:
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
        """Go on measuring; validation counts where it has the same batch size."""
        if self._meter is None or trainer.sanity_checking:
            return
        if self.validation:
            self._peak = max(self._peak, self._meter.read().share)
        self._start()

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Decide on the size for the next epoch."""
        assert self._meter is not None
        assert self._size is not None
        now = self._meter.read()
        values = [max(self._peak, now.share), now.rest, float(self._size), -float(self._most)]
        if trainer.world_size > 1:
            values = _largest_of_ranks(values, trainer.strategy.root_device)
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
            shrink=self.shrink,
            low=self.low,
            high=self.high,
            most=most,
            allowed=self._allowed(),
        )
        if peak > self.high:
            self._ceiling = min(self._ceiling or self._size, self._size)
        if size != self._size:
            self._change(trainer, size, peak)

    def _change(self, trainer: pl.Trainer, size: int, peak: float) -> None:
        event = {"epoch": trainer.current_epoch, "from": self._size, "to": size, "memory": peak}
        self._size = size
        trainer.reload_dataloaders_every_n_epochs = 1  # type: ignore[attr-defined]
        assert self._rates is not None
        self._rates.scale = self._scale()
        self.events.append({key: event[key] for key in ("epoch", "from", "to")})
        del self.events[:-1000]
        log.info("Batch size %(from)s -> %(to)s: memory at %(memory).3f of its limit.", event)
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
        return Report(
            f"DynamicBatchSize: {self._initial} at the start, now {self._size}", self.events
        )

    # --- after training -------------------------------------------------------------------------

    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        """Undo everything; Lightning calls no ``teardown`` after an exception."""
        self._release()

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Undo everything."""
        self._release()

    def _release(self) -> None:
        if self._loaders is not None:
            self._loaders.close()
        if self._rates is not None:
            self._rates.close()
        if self._stack is not None:
            self._stack.close()
        self._stack = self._loaders = self._meter = self._rates = self._trainer = None

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the model, so that the callback can be sent to another process."""
        known = self._module is not None or self._is_copy
        return {**self.__dict__, "_module": None, "_is_copy": known}

    def state_dict(self) -> dict[str, Any]:
        """Return sizes, what was measured near the limit, and where schedules are."""
        return {
            "size": self._size,
            "initial": self._initial,
            "ceiling": self._ceiling,
            "planned": self._planned,
            "points": dict(self._fit.points),
            "rest": self._fit.rest,
            "calls": dict(self._pace.calls),
            "events": [dict(event) for event in self.events],
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned."""
        self._size, self._initial = state_dict["size"], state_dict["initial"]
        self._ceiling, self._planned = state_dict["ceiling"], state_dict["planned"]
        self._fit = MemoryFit(dict(state_dict["points"]), state_dict["rest"])
        self._pace.calls = dict(state_dict["calls"])
        self.events = [dict(event) for event in state_dict["events"]]
        if self._trainer is not None:
            self._trainer.fit_loop._combined_loader = None  # was it loaded with another size?


def _data_ranks(trainer: pl.Trainer) -> int:
    """Return how many ranks have data of their own."""
    kwargs = trainer.distributed_sampler_kwargs
    return int(kwargs["num_replicas"]) if kwargs else 1


def _largest_of_ranks(values: list[float], device: torch.device) -> list[float]:
    largest = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    found: list[float] = largest.tolist()  # once an epoch
    return found
