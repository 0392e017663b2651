"""Convolutional models with the channels last in memory, where that pays."""

from __future__ import annotations

import logging
import statistics
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy, ModelParallelStrategy
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch.utils.hooks import RemovableHandle

from lightning_opt.core.arguments import one_of
from lightning_opt.core.measure.exhaustion import CAUGHT, is_out_of_memory, recover_memory
from lightning_opt.core.modules.compiling import has_compiled_parts
from lightning_opt.core.modules.trial import TrialStep
from lightning_opt.core.output.report import Report
from lightning_opt.kernels.channels_last.convolutions import Convolutions
from lightning_opt.trainer.run_callback import RunCallback

if TYPE_CHECKING:
    import lightning.pytorch as pl

log = logging.getLogger(__name__)

Policy = Literal["auto", "layers", "always"]

ROUNDS = 3
"""Steps that are timed in each format, after one that is not."""

GAIN = 0.97
"""Of the time that the step takes otherwise: what differs less is noise."""


class ChannelsLast(RunCallback):
    """Switches convolutions to channels_last, if that is faster.

    Weights of ``Conv2d``, ``Conv3d`` and their transposes, with their gradients and optimizer
    state, are converted to ``torch.channels_last`` or ``channels_last_3d`` while a stage runs.
    Outputs follow the weights, regardless of the layout of the input. Results are the same up to
    rounding, since a different kernel sums in a different order.

    With ``"auto"`` on a single process, the first training batch is run forward and backward four
    times in each format before it is trained on, and leaves no trace; channels_last is kept if it
    saves 3% of the time. If nothing can be measured, the layers decide: outside of training, with
    several processes (DDP needs the final layout of the weights before there is a batch), with
    ``CompileModel`` (the compiler would be timed), and with deterministic algorithms, because a
    measurement is not repeatable.

    Everything is restored when the run ends or fails. Checkpoints hold the optimizer state in its
    original layout.

    Nothing is logged; :meth:`report` tells what was decided and why.

    Args:
        policy: ``"auto"`` measures; ``"layers"`` takes channels_last if at least half of the layers
            that multiply are convolutions over two or three dimensions; ``"always"`` takes it.

    Raises:
        ValueError: In ``__init__`` for another policy; in ``setup`` for ``"always"`` under FSDP,
            ``ModelParallelStrategy`` and DeepSpeed, whose shards have an order of their own. The
            other policies leave such models alone.

    Example:
        >>> import lightning as L
        >>> import lightning_opt as lo
        >>> trainer = L.Trainer(callbacks=[lo.ChannelsLast()], logger=False)
    """

    def __init__(self, policy: Policy = "auto") -> None:
        self.policy = one_of("policy", policy, get_args(Policy))
        self._layout: Convolutions | None = None
        self._hooks: list[RemovableHandle] = []
        self._pending = False
        self._decision: dict[str, Any] = {}

    only_one = True
    process_only = ("_layout",)

    # --- deciding ---------------------------------------------------------------------------------

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Decide, or see to it that it is decided, before the strategy wraps the model."""
        sharded = isinstance(
            trainer.strategy, (FSDPStrategy, ModelParallelStrategy, DeepSpeedStrategy)
        )
        if sharded and self.policy == "always":
            raise ValueError(
                f"ChannelsLast('always') does not work with {type(trainer.strategy).__name__}: its "
                "shards have their own memory order. Use DDP, or leave the callback out."
            )
        super().setup(trainer, pl_module, stage)
        self.release(trainer)
        self._decision = {}
        if sharded:
            self._decide(False, f"{type(trainer.strategy).__name__} lays out the weights itself")
        elif not is_overridden("configure_model", pl_module):
            self._look_at(trainer, pl_module)
        elif trainer.world_size > 1:
            self._decide(False, "configure_model makes the layers, and then they are wrapped")

    def _look_at(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Decide by the layers, or leave it to a measurement."""
        self._layout = layout = Convolutions(pl_module)
        if layout.count == 0:
            self._decide(False, "no convolutions over two or three dimensions")
            return
        if self.policy == "always":
            self._decide(True, "policy 'always'")
            return
        obstacle = None if self.policy == "layers" else _obstacle_to_measuring(trainer)
        if self.policy == "layers" or obstacle is not None:
            reason = f"{layout.count} convolutions, {layout.others} other layers that multiply"
            self._decide(layout.dominate, f"{reason} ({obstacle})" if obstacle else reason)
            return
        self._pending = True

    def _decide(self, channels_last: bool, reason: str, **figures: float) -> None:
        self._pending = False
        name = "channels_last" if channels_last else "contiguous"
        self._decision = {"memory format": name, "because": reason, **figures}
        log.info("ChannelsLast: %s, because of %s.", name, reason)
        if channels_last and self._layout is not None:
            self._layout.convert()

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Look at a model that is complete only now, and at what optimizers save and load."""
        if not self._decision and not self._pending:
            self._look_at(trainer, pl_module)
        layout = self._layout
        if layout is None or not (layout.converted or self._pending):
            return
        for optimizer in trainer.optimizers:
            self._hooks += [
                optimizer.register_state_dict_post_hook(layout.disguise),
                optimizer.register_load_state_dict_post_hook(layout.align_state),
            ]

    on_validation_start = on_test_start = on_predict_start = on_fit_start

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Measure on the first batch, if that was left open."""
        if not self._pending or self._layout is None:
            return
        self._measure(trainer, pl_module, batch, batch_idx)
        if self._layout.converted:  # after optimizers had loaded their state, which has to follow
            for optimizer in trainer.optimizers:
                self._layout.align_state(optimizer)

    def _measure(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        layout = self._layout
        assert layout is not None
        seconds: dict[bool, list[float]] = {False: [], True: []}
        try:
            for number in range(ROUNDS + 1):
                for channels_last, times in seconds.items():
                    if channels_last:
                        layout.convert()
                    try:
                        time = TrialStep(trainer, pl_module, batch, batch_idx).run()
                    finally:
                        layout.restore()
                    if number:  # the first one prepares kernels
                        times.append(time)
        except CAUGHT as error:
            if not is_out_of_memory(error):
                raise
        else:
            contiguous, last = (statistics.median(times) for times in seconds.values())
            self._decide(
                last < GAIN * contiguous,
                "a measurement on the first batch",
                **{"ms contiguous": 1e3 * contiguous, "ms channels_last": 1e3 * last},
            )
            return
        recover_memory(pl_module.device)
        self._decide(layout.dominate, "the layers, since memory ran out while measuring")

    # --- saving, reporting, undoing ---------------------------------------------------------------

    def report(self) -> Report:
        """Return what was decided, and why; milliseconds are of forward and backward pass."""
        return Report("ChannelsLast", [self._decision] if self._decision else [])

    def release(self, trainer: pl.Trainer) -> None:
        """Put everything back."""
        for hook in self._hooks:
            hook.remove()
        if self._layout is not None:
            self._layout.restore(trainer.optimizers)
        self._layout, self._hooks, self._pending = None, [], False


def _obstacle_to_measuring(trainer: pl.Trainer) -> str | None:
    """Return why a measurement is not possible, or would not say what matters."""
    if trainer.state.fn != "fit":
        return "no training to measure"
    if trainer.world_size > 1:
        return "several processes"
    if torch.are_deterministic_algorithms_enabled():
        return "deterministic algorithms, and a measurement is not"
    names = [type(callback).__name__ for callback in trainer.callbacks]  # type: ignore[attr-defined]
    compiled = has_compiled_parts(trainer.lightning_module)
    return "a model that is compiled" if compiled or "CompileModel" in names else None
