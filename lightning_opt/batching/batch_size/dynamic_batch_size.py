"""Finds a batch size before training, and keeps the number of samples per optimizer step."""

from __future__ import annotations

import logging
import math
import traceback
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from lightning_utilities.core.rank_zero import rank_zero_warn
from torch.optim import Optimizer

from lightning_opt.batching.batch_size.search import FoundSizes
from lightning_opt.batching.batch_size.trials import Trials
from lightning_opt.batching.loader_sizes import (
    check_loader,
    check_single_loader,
    intercepted_loaders,
    set_batch_size,
)
from lightning_opt.core.arguments import check_at_least, check_between, check_one_of, check_positive
from lightning_opt.core.modules.patching import replaced
from lightning_opt.core.modules.sharding import data_ranks
from lightning_opt.core.output.loggers import log_scalars
from lightning_opt.core.output.report import Report
from lightning_opt.trainer.lightning import (
    BatchSizeFinder,
    DeepSpeedStrategy,
    GradientAccumulationScheduler,
    LearningRateFinder,
    package_of,
)
from lightning_opt.trainer.run_callback import RunCallback, has_step_hooks

if TYPE_CHECKING:
    import lightning.pytorch as pl

log = logging.getLogger(__name__)

SCALE_RULES: dict[str, Callable[[float], float]] = {"linear": float, "sqrt": math.sqrt}


class DynamicBatchSize(RunCallback):
    """Finds the loader's batch size by trials before training, and leaves some memory free.

    Like ``find_batch_size``, it runs a few steps of a copy of the model with several sizes. Then
    the whole run trains with the largest size whose memory peak stays below ``target``, or with the
    fastest size. A resumed run keeps the size of its checkpoint. It searches only if the checkpoint
    has none because the search had failed.

    Larger batches train differently, with fewer and less noisy steps. So the number of samples per
    optimizer step is kept: only sizes that divide it are used, and batches are accumulated. The
    number is ``keep_effective``, or follows from the loader and the Trainer. With ``scale_lr``, a
    step has as many samples as fit into memory, and learning rates are scaled.

    Add ``MicroBatching("auto")`` to survive batches that need more memory than those in the
    trials.

    Logged at the start of training:

    ========================== =================================================================
    ``batch_size/size``        batch size of each rank's loader
    ``batch_size/memory``      peak of this size's trial, as a share of the nearest limit, if tried
    ``batch_size/accumulate``  batches per optimizer step
    ``batch_size/lr_scale``    factor on the learning rates at each step
    ========================== =================================================================

    Args:
        target: The share of memory to use. It applies to the device's memory, or on a CPU to the
            nearest limit, and to ``budget_mb``.
        max_size: The largest size to use; None for the number of samples.
        scale_lr: How learning rates follow the ratio of the size to the loader's own size:
            ``"linear"`` or ``"sqrt"``. The samples per step are then not kept.
        keep_effective: Samples per optimizer step over all ranks; None for the loader's batch size
            times ``accumulate_grad_batches`` times the number of ranks.
        find: ``"largest"``, or ``"fastest"`` for the size with the most samples per second.
        budget_mb: An additional limit on the memory of this process on its device.

    Raises:
        ValueError: In ``__init__`` for arguments that are out of range or exclude each other. In
            ``setup`` under DeepSpeed, and on several ranks under FSDP, tensor parallelism or
            SyncBatchNorm; without ``scale_lr`` also under manual optimisation, or if another
            callback sets the accumulation. Before training for several loaders, for loaders whose
            batch size cannot be changed, or if ranks cannot share the samples of a step equally.
        MemoryError: In ``setup``, if not even one sample fits.

    Example:
        >>> import lightning as L
        >>> import lightning_opt as lo
        >>> trainer = L.Trainer(callbacks=[lo.DynamicBatchSize(keep_effective=256)], logger=False)
    """

    only_one = True
    runs_in_trials = False

    def __init__(
        self,
        target: float = 0.9,
        max_size: int | None = None,
        scale_lr: Literal["linear", "sqrt"] | None = None,
        keep_effective: int | None = None,
        find: Literal["largest", "fastest"] = "largest",
        budget_mb: float | None = None,
    ) -> None:
        check_one_of("scale_lr", scale_lr, (*SCALE_RULES, None))
        if scale_lr is not None and keep_effective is not None:
            raise ValueError(
                "keep_effective keeps the samples per step, so scale_lr has no effect. Pass only "
                "one of them."
            )
        self.target = check_between("target", target, 0.0, 1.0)
        self.max_size = None if max_size is None else check_at_least("max_size", max_size, 1)
        self.scale_lr, self.keep_effective = scale_lr, keep_effective
        if keep_effective is not None:
            check_at_least("keep_effective", keep_effective, 1)
        self.find: str = check_one_of("find", find, ("largest", "fastest"))
        self.budget_mb = None if budget_mb is None else check_positive("budget_mb", budget_mb)
        self.reset_for_model()

    def reset_for_model(self, pl_module: pl.LightningModule | None = None) -> None:
        """Discard the size found for another model."""
        self.found: FoundSizes | None = None
        self.size: int | None = None  # of each rank's loader
        self._initial = 0  # the loader's original size
        self._effective: int | None = None  # samples per step over all ranks; None with scale_lr

    def setup_fit(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Check the settings, search for a size, and intercept loaders."""
        self.release(trainer)
        self._check(trainer, pl_module)
        self._initial, self._effective = 0, None  # of this fit's loader and accumulation
        self._ranks = data_ranks(trainer)
        names = ("accumulate_grad_batches", "limit_train_batches", "val_check_interval")
        self._settings = {name: getattr(trainer, name) for name in names}
        if self.size is None and not (trainer.fit_loop.skip or _is_resuming(trainer)):
            self._search(trainer, pl_module)
        self._replace(trainer, **self._settings)
        self._patches.enter_context(intercepted_loaders(trainer, partial(self._set_size, trainer)))

    def _check(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if isinstance(trainer.strategy, DeepSpeedStrategy):
            raise ValueError(
                "DynamicBatchSize does not work with the DeepSpeed strategy, which reads the batch "
                "size once, at the start."
            )
        callbacks = trainer.callbacks  # type: ignore[attr-defined]
        sources = {c.accumulates_by for c in callbacks if isinstance(c, RunCallback)}
        if "effective_batch" in sources or ("schedule" in sources and self.scale_lr is None):
            raise ValueError(
                "Accumulation and DynamicBatchSize both set the samples per step. Remove "
                "Accumulation's schedule or effective_batch; scale_lr allows a schedule."
            )
        # scale_lr would scale a rate that was found for the new size.
        rate_finder: Any = () if self.scale_lr is None else LearningRateFinder
        finders = [c for c in callbacks if isinstance(c, (BatchSizeFinder, rate_finder))]
        if finders:
            raise ValueError(
                f"{type(finders[0]).__name__} and DynamicBatchSize both set the batch size or the "
                "learning rate. Remove one of them, or scale_lr beside LearningRateFinder."
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
                "DynamicBatchSize sets accumulate_grad_batches itself. Remove keep_effective or "
                "accumulate_grad_batches, and GradientAccumulationScheduler."
            )

    def _search(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        callbacks = trainer.callbacks  # type: ignore[attr-defined]
        trials = Trials(trainer, pl_module, callbacks, self.target, self.budget_mb)

        def round_down(size: int) -> int:
            self._initial = trials.initial
            return self._round_down(size)

        self.found = trials.find(self.find, self.max_size, round_down)
        self.size = self.found.chosen(self.find)

    def _round_down(self, limit: int) -> int:
        """Return the largest size up to ``limit`` that divides each rank's samples per step."""
        if self.scale_lr is not None:
            return limit
        ranks = self._ranks
        if self._effective is None:
            initial = self._initial * self._settings["accumulate_grad_batches"]
            self._effective = self.keep_effective or initial * ranks
        if self._effective % ranks:
            raise ValueError(
                f"DynamicBatchSize keeps {self._effective} samples per step, which is not a "
                f"multiple of the {ranks} ranks: change keep_effective."
            )
        samples = self._effective // ranks
        sizes = (size for size in range(min(samples, limit), 0, -1) if samples % size == 0)
        return next(sizes, 0)

    def _set_size(self, trainer: pl.Trainer, loader: Any) -> None:
        """Set the size of a training loader. Called each time a loader is created."""
        size = check_loader(loader)
        if self.size is None:  # before a checkpoint is loaded
            return
        self._initial = self._initial or size  # set already by a search or a checkpoint
        self.size = self._round_down(self.size)  # the checkpoint's number of ranks may differ
        set_batch_size(loader, self.size)
        if self._effective is not None:
            trainer.accumulate_grad_batches = self._effective // self._ranks // self.size
        for name in ("limit_train_batches", "val_check_interval"):
            batches = self._settings[name]
            if isinstance(batches, int):  # keep the samples; an epoch drops none
                rest = self.size - 1 if name == "limit_train_batches" else 0
                setattr(trainer, name, max(1, (batches * self._initial + rest) // self.size))

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Scale learning rates, and log the size."""
        check_single_loader(trainer)
        if self.size is None:
            rank_zero_warn(
                "DynamicBatchSize keeps the loader's batch size: the checkpoint was "
                "saved without DynamicBatchSize, and a resumed run does not search."
            )
            return
        scale = 1.0
        if self.scale_lr is not None:
            scale = SCALE_RULES[self.scale_lr](self.size / self._initial)
            _scale_rates(trainer.optimizers, scale, self._patches)
        values = {
            "batch_size/size": self.size,
            "batch_size/accumulate": trainer.accumulate_grad_batches,
            "batch_size/lr_scale": scale,
        }
        tried = self.found.trials if self.found is not None else []
        peaks = [trial.peak for trial in tried if trial.size == self.size]
        if peaks and peaks[0] is not None:
            values["batch_size/memory"] = peaks[0]
        log_scalars(trainer, values)
        log.info("Batch size %d -> %d: %s", self._initial, self.size, values)

    def report(self) -> Report:
        """Return one row per trial; none in a resumed run."""
        report = Report("", []) if self.found is None else self.found.report()
        report.title = f"DynamicBatchSize: {self.size}, the loader's own is {self._initial}"
        return report

    def state_dict(self) -> dict[str, Any]:
        """Return the size, the loader's own size and the samples per step."""
        return {"size": self.size, "initial": self._initial, "effective": self._effective}

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Search if the checkpoint was saved by a run that failed during its search."""
        trainer.fit_loop._combined_loader = None  # an existing loader may have another size
        state = checkpoint["callbacks"].get(self.state_key)
        if state is not None and state["size"] is None and not checkpoint["global_step"]:
            # Trials must not resume from the checkpoint.
            with replaced(trainer._checkpoint_connector, _loaded_checkpoint={}, _ckpt_path=None):
                self._search(trainer, pl_module)
            state.update(self.state_dict())

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the state returned by :meth:`state_dict`."""
        self.size, self._initial = state_dict["size"], state_dict["initial"]
        if self.scale_lr is None:
            self._effective = self.keep_effective or state_dict["effective"]


def _scale_rates(optimizers: Iterable[Optimizer], scale: float, stack: ExitStack) -> None:
    """Multiply learning rates while an optimizer steps, until ``stack`` closes.

    Schedulers and checkpoints see the unscaled rates.
    """
    unscaled: list[tuple[dict[str, Any], Any]] = []

    def restore(*args: Any) -> None:
        for group, rate in unscaled:
            group["lr"] = rate
        unscaled.clear()

    def multiply(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        restore()  # the post hook does not run if a step raises
        for group in optimizer.param_groups:
            unscaled.append((group, group["lr"]))
            group["lr"] = group["lr"] * scale

    stack.callback(restore)
    for optimizer in optimizers:
        if not has_step_hooks(optimizer):
            raise ValueError(
                f"DynamicBatchSize cannot scale the learning rate of {type(optimizer).__name__}, "
                "which does not call Optimizer.__init__. Call it, or give no scale_lr."
            )
        stack.callback(optimizer.register_step_pre_hook(multiply).remove)
        stack.callback(optimizer.register_step_post_hook(restore).remove)


def _is_resuming(trainer: pl.Trainer) -> bool:
    """Return whether ``fit`` got a checkpoint. Lightning stores its path only after ``setup``."""
    run = package_of(trainer).Trainer._run.__code__
    calls = [frame.f_locals for frame, _ in traceback.walk_stack(None) if frame.f_code is run]
    return any(call["self"] is trainer and call["ckpt_path"] is not None for call in calls)
