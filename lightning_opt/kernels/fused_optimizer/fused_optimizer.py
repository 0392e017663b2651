"""Optimizers on the fastest implementation that torch has for them."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from lightning.pytorch import Callback
from lightning.pytorch.strategies import DeepSpeedStrategy
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_opt.core.report import Report
from lightning_opt.core.verdicts import Verdict
from lightning_opt.kernels.fused_optimizer.fusing import Switch, choose_implementation

if TYPE_CHECKING:
    import lightning.pytorch as pl

log = logging.getLogger(__name__)


class FusedOptimizer(Callback):
    """Switches optimizers to torch's fused implementation for the time of the run.

    A fused update is one pass over parameter, gradient and state; the default makes one pass for
    each operation. Adam, AdamW, SGD and Adagrad have one, and so have classes derived from them
    that leave ``step`` alone. Whether it runs for the parameters' device and dtype is tried out. On
    an accelerator, others are set to ``foreach=True`` where they have that. Those that cannot be
    switched are left alone, and :meth:`report` says why.

    The result is the same up to rounding: the fused kernel rounds in another order.

    Checkpoints hold the flags that the user has set, and load without this callback; what is loaded
    is switched again. When training ends or fails, the optimizer is as it was found.

    With a loss scaler (fp16) a fused optimizer can divide by the scale within its kernel and leave
    a step out by itself, so that the host need not wait. Gradients are then still scaled in
    ``on_before_optimizer_step``, which the callbacks of this package know. If anyone else can see
    gradients there (a hook of the module, another package's callback, ``gradient_clip_val``, manual
    optimisation), the scaler unscales them before, as it does for optimizers that are not fused.

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

    def __init__(self) -> None:
        self._switches: dict[int, Switch] = {}
        self._rows: list[dict[str, Any]] = []

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Refuse a second one: each would put back what the other has changed."""
        callbacks = trainer.callbacks  # type: ignore[attr-defined]
        if sum(isinstance(callback, FusedOptimizer) for callback in callbacks) > 1:
            raise ValueError("Two FusedOptimizer callbacks do nothing that one does not; keep one.")

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Switch every optimizer that can be, before its state is loaded."""
        self._undo()
        self._rows = []
        sparse = _sparse_parameters(pl_module)
        takes_scaled = _takes_scaled(trainer, pl_module)
        for index, optimizer in enumerate(trainer.optimizers):
            if isinstance(trainer.strategy, DeepSpeedStrategy):
                implementation, reason = None, "DeepSpeed has an optimizer of its own"
            else:
                implementation, reason = choose_implementation(optimizer, sparse)
            if implementation is not None:
                self._switches[index] = Switch(optimizer, implementation, takes_scaled=takes_scaled)
            row = {
                "optimizer": index,
                "class": type(optimizer).__name__,
                "implementation": implementation or _present_implementation(optimizer),
                "switched": implementation is not None,
                "reason": reason,
            }
            self._rows.append(row)
            if trainer.is_global_zero and reason not in ("", "already fused"):
                log.info("FusedOptimizer: %(class)s stays %(implementation)s: %(reason)s.", row)

    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Optimizer
    ) -> None:
        """Lay out the gradients as the kernel needs them, or go back where it cannot take them."""
        for index, switch in self._switches.items():
            if switch.optimizer is optimizer:
                obstacle = switch.prepare_update()
                if obstacle is not None:
                    self._switches.pop(index).undo()
                    row = self._rows[index]
                    row.update(
                        implementation=_present_implementation(optimizer),
                        switched=False,
                        reason=obstacle,
                    )
                    rank_zero_warn(
                        f"FusedOptimizer has put {row['class']} back: fused kernels do not take "
                        f"{obstacle}. Training goes on as without it."
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

    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        """Put everything back; Lightning calls no ``teardown`` after an exception."""
        self._undo()

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Put everything back."""
        self._undo()

    def _undo(self) -> None:
        for switch in self._switches.values():
            switch.undo()
        self._switches = {}


def _sparse_parameters(module: nn.Module) -> set[Tensor]:
    """Return the weights of embeddings that make sparse gradients."""
    return {
        inner.weight
        for inner in module.modules()
        if isinstance(inner, (nn.Embedding, nn.EmbeddingBag)) and inner.sparse
    }


def _takes_scaled(trainer: pl.Trainer, module: pl.LightningModule) -> bool:
    """Return whether gradients that are not unscaled are seen by nobody who takes them for true."""
    scaler = getattr(trainer.precision_plugin, "scaler", None)
    if scaler is None or not scaler.is_enabled():
        return False
    hooks = ("on_before_optimizer_step", "configure_gradient_clipping")
    strangers = [
        callback
        for callback in trainer.callbacks  # type: ignore[attr-defined]
        if is_overridden("on_before_optimizer_step", callback)
        and not type(callback).__module__.startswith("lightning_opt.")
    ]
    return (
        module.automatic_optimization
        and not trainer.gradient_clip_val
        and not any(is_overridden(hook, module) for hook in hooks)
        and not strangers
    )


def _present_implementation(optimizer: Optimizer) -> str:
    groups = optimizer.param_groups
    for name in ("fused", "foreach"):
        if all(group.get(name) for group in groups):
            return name
    return "default"
