"""Adapts schedules and learning rates to changes of the batch size and of the steps per epoch."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.optim import Optimizer

if TYPE_CHECKING:
    import lightning.pytorch as pl


class SchedulerPace:
    """Calls schedulers as often per epoch as planned, however many steps the epoch has.

    Take a scheduler over ``trainer.estimated_stepping_batches``. If epochs have more steps than
    planned, it ends too early, and some schedulers then raise an error. If they have fewer steps,
    it never ends. So some calls are dropped or repeated.

    Attributes:
        planned: Optimizer steps per epoch at the start of training; None before that.
        calls: Lightning's calls of each scheduler in this epoch, by the scheduler's index.
    """

    def __init__(self) -> None:
        self.planned: int | None = None
        self._actual = 1
        self.calls: dict[int, int] = {}

    def count_steps(self, trainer: pl.Trainer) -> None:
        if math.isfinite(trainer.num_training_batches):
            batches, window = trainer.num_training_batches, trainer.accumulate_grad_batches
            self._actual = math.ceil(batches / window)
            if self.planned is None:
                self.planned = self._actual

    def lr_scheduler_step(
        self, trainer: pl.Trainer, module: pl.LightningModule
    ) -> Callable[..., None]:
        step = module.lr_scheduler_step

        def lr_scheduler_step(scheduler: Any, metric: Any) -> None:
            configs = trainer.lr_scheduler_configs
            index = next((i for i, c in enumerate(configs) if c.scheduler is scheduler), None)
            times = 1
            if index is not None and configs[index].interval == "step":
                calls = self.calls[index] = self.calls.get(index, 0) + 1
                if self.planned is not None:
                    times = calls * self.planned // self._actual
                    times -= (calls - 1) * self.planned // self._actual
            for _ in range(times):
                step(scheduler, metric)

        return lr_scheduler_step


class ScaledRates:
    """Multiplies learning rates, but only while an optimizer steps.

    Schedulers and checkpoints see the unscaled rates.
    """

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self.scale = 1.0
        self._unscaled: list[tuple[dict[str, Any], Any]] = []
        self._handles = [
            handle
            for optimizer in optimizers
            for handle in (
                optimizer.register_step_pre_hook(self._multiply),
                optimizer.register_step_post_hook(self._restore),
            )
        ]

    def _multiply(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self.scale == 1.0:
            return
        for group in optimizer.param_groups:
            rate = group["lr"]
            self._unscaled.append((group, rate.clone() if isinstance(rate, Tensor) else rate))
            if isinstance(rate, Tensor):
                rate.mul_(self.scale)  # in place, because a captured CUDA graph reads this tensor
            else:
                group["lr"] = rate * self.scale

    def _restore(self, *args: Any) -> None:
        for group, rate in self._unscaled:
            if isinstance(rate, Tensor):
                group["lr"].copy_(rate)
            else:
                group["lr"] = rate
        self._unscaled = []

    def close(self) -> None:
        self._restore()
        for handle in self._handles:
            handle.remove()
