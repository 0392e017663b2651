"""Learning rates while the number of samples of a step and of steps of an epoch change."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.optim import Optimizer

if TYPE_CHECKING:
    import lightning.pytorch as pl


class Pace:
    """Steps schedulers so that an epoch takes them as far as was planned when they were made.

    A scheduler made for ``trainer.estimated_stepping_batches`` would end too early, and some raise
    then, if epochs have more steps than planned; and never end if they have fewer. So of each
    epoch's ``actual`` calls as many are let through, some of them twice, as were ``planned``.

    Attributes:
        planned: Optimizer steps of an epoch when schedulers were made; None before that is known.
        calls: Of each scheduler in this epoch.
    """

    def __init__(self) -> None:
        self.planned: int | None = None
        self._actual = 1
        self.calls: dict[int, int] = {}

    def follow(self, trainer: pl.Trainer) -> None:
        """Take note of how many steps this epoch has."""
        if math.isfinite(trainer.num_training_batches):
            batches, window = trainer.num_training_batches, trainer.accumulate_grad_batches
            self._actual = math.ceil(batches / window)
            if self.planned is None:
                self.planned = self._actual

    def around(self, trainer: pl.Trainer, module: pl.LightningModule) -> Callable[..., None]:
        """Return what takes the place of the module's ``lr_scheduler_step``."""
        step = module.lr_scheduler_step

        def lr_scheduler_step(scheduler: Any, metric: Any) -> None:
            configs = trainer.lr_scheduler_configs
            index = next((i for i, c in enumerate(configs) if c.scheduler is scheduler), None)
            times = 1
            if index is not None and configs[index].interval == "step":
                done = self.calls[index] = self.calls.get(index, 0) + 1
                if self.planned is not None:
                    times = done * self.planned // self._actual
                    times -= (done - 1) * self.planned // self._actual
            for _ in range(times):
                step(scheduler, metric)

        return lr_scheduler_step


class ScaledRates:
    """Multiplies learning rates while an optimizer steps, and at no other time.

    Schedulers compute the next rate from the present one or from one that they hold; so they are
    left alone with the rates that they know.

    Args:
        optimizers: Of the Trainer.
    """

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self.scale = 1.0
        self._held: list[tuple[dict[str, Any], Any]] = []
        self._handles = [
            handle
            for optimizer in optimizers
            for handle in (
                optimizer.register_step_pre_hook(self._before),
                optimizer.register_step_post_hook(self._put_back),
            )
        ]

    def _before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self.scale == 1.0:
            return
        for group in optimizer.param_groups:
            rate = group["lr"]
            self._held.append((group, rate.clone() if isinstance(rate, Tensor) else rate))
            if isinstance(rate, Tensor):
                rate.mul_(self.scale)  # the same tensor: a captured graph reads it
            else:
                group["lr"] = rate * self.scale

    def _put_back(self, *args: Any) -> None:
        for group, rate in self._held:
            if isinstance(rate, Tensor):
                group["lr"].copy_(rate)
            else:
                group["lr"] = rate
        self._held = []

    def close(self) -> None:
        """Take the hooks off, and put rates back if a step has failed."""
        self._put_back()
        for handle in self._handles:
            handle.remove()
