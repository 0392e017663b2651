"""Optimizers on the fastest implementation that torch has for them."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from lightning.pytorch.utilities import rank_zero_warn
from torch.optim import Optimizer

from lightning_opt.core.output.report import Report
from lightning_opt.core.output.verdicts import Verdict
from lightning_opt.kernels.fused_optimizer.fusing import Fused, obstacle_to_fused
from lightning_opt.trainer.run_callback import RunCallback

if TYPE_CHECKING:
    import lightning.pytorch as pl

log = logging.getLogger(__name__)


class FusedOptimizer(RunCallback):
    """Switches optimizers to torch's fused implementation during the run.

    A fused update makes one pass over parameter, gradient and state; the default makes one pass for
    each operation. Adam, AdamW, SGD and Adagrad have one, and so do subclasses that do not override
    ``step``. Whether it runs for the parameters' device and dtype is tried out. Optimizers that
    cannot be switched are left alone, and :meth:`report` says why.

    The result is the same up to rounding, because the fused kernel rounds in a different order.

    Checkpoints hold the flags that the user set, and load without this callback; a loaded optimizer
    is switched again. When training ends or fails, the optimizer is restored.

    With a loss scaler (fp16) gradients are unscaled before the update, as they are for optimizers
    that are not fused.

    Fused kernels need gradients and state in the memory order of their parameter, which on a CPU
    they do not check themselves (torch 2.13). It is checked here before each update.

    Raises:
        ValueError: In ``setup`` if there are two.

    Example:
        >>> import lightning as L
        >>> import lightning_opt as lo
        >>> trainer = L.Trainer(callbacks=[lo.FusedOptimizer()], logger=False)

    Args:
        None.
    """

    only_one = True
    process_only = ("_fused",)

    def __init__(self) -> None:
        self._fused: dict[int, Fused] | None = None
        self._rows: list[dict[str, Any]] = []

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Switch every optimizer that can be, before its state is loaded."""
        self.release(trainer)
        self._fused, self._rows = {}, []
        for index, optimizer in enumerate(trainer.optimizers):
            obstacle = obstacle_to_fused(optimizer)
            if obstacle is None:
                self._fused[index] = Fused(optimizer)
            row = {
                "optimizer": index,
                "class": type(optimizer).__name__,
                "implementation": _implementation(optimizer),
                "switched": obstacle is None,
                "reason": obstacle or "",
            }
            self._rows.append(row)
            if trainer.is_global_zero and obstacle not in (None, "already fused"):
                log.info("FusedOptimizer: %(class)s stays %(implementation)s: %(reason)s.", row)

    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Optimizer
    ) -> None:
        """Lay out the gradients as the kernel needs them, or go back where it cannot take them."""
        for index, fused in (self._fused or {}).items():
            if fused.optimizer is not optimizer:
                continue
            obstacle = fused.prepare_update()
            if obstacle is not None:
                assert self._fused is not None
                self._fused.pop(index).undo()
                row = self._rows[index]
                row.update(
                    implementation=_implementation(optimizer), switched=False, reason=obstacle
                )
                rank_zero_warn(
                    f"FusedOptimizer has put {row['class']} back: fused kernels do not take "
                    f"{obstacle}. Training continues without it."
                )
            return

    def diagnose(self) -> list[Verdict]:
        """Return what the optimizers ran on, which the Trainer's no longer show after ``fit``."""
        if not self._rows:
            return []
        finding = "; ".join(
            f"{row['class']} ran {row['implementation']}"
            + (f" ({row['reason']})" if row["reason"] else "")
            for row in self._rows
        )
        return [Verdict("optimizer", "ok", f"{finding}.")]

    def report(self) -> Report:
        """Return what each optimizer runs on, and why nothing faster."""
        return Report("FusedOptimizer", self._rows)

    def release(self, trainer: pl.Trainer) -> None:
        """Put everything back."""
        for fused in (self._fused or {}).values():
            fused.undo()
        self._fused = None


def _implementation(optimizer: Optimizer) -> str:
    groups = optimizer.param_groups
    for name in ("fused", "foreach"):
        if all(group.get(name) for group in groups):
            return name
    return "default"
