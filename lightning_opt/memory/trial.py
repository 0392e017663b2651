"""One training step of the user's model on the user's batch, which leaves no trace."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy
from lightning.pytorch.utilities.seed import isolate_rng
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor

from lightning_opt.core.preserve import do_nothing, preserved, replaced
from lightning_opt.core.sharding import is_dtensor
from lightning_opt.memory.meters import wait_for

if TYPE_CHECKING:
    import lightning.pytorch as pl


class TrialStep:
    """Forward and backward pass of a training step, as often as wanted, without consequences.

    Random numbers, gradients, buffers, metrics, counters and collected outputs are afterwards as
    before. Nothing is logged, optimizers and schedulers do not step, no callback is told, and DDP
    does not reduce. What ``training_step`` does to the world outside (a file, an environment) it
    does.

    Args:
        trainer: The Trainer, within ``on_train_batch_start``.
        pl_module: Its module.
        batch: The batch; the step gets a copy.
        batch_idx: Its index.
    """

    def __init__(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self._trainer, self._module = trainer, pl_module
        self._batch, self._batch_idx = batch, batch_idx

    def run(self, inside: Callable[[ExitStack], Any] | None = None) -> float:
        """Run it once.

        Args:
            inside: Called with a stack right before the forward pass, to enter contexts that last
                until the end of the backward pass.

        Returns:
            Seconds from the start of the forward to the end of the backward pass.
        """
        trainer, module = self._trainer, self._module
        with ExitStack() as stack:
            stack.enter_context(isolate_rng(include_cuda=module.device.type == "cuda"))
            stack.enter_context(preserved(module))
            stack.enter_context(
                replaced(
                    module,
                    log=_ignore,
                    log_dict=_ignore,
                    manual_backward=lambda loss, *args, **kwargs: loss.backward(*args, **kwargs),
                )
            )
            for optimizer in trainer.strategy._lightning_optimizers:
                stack.enter_context(replaced(optimizer, step=do_nothing))
            for config in trainer.lr_scheduler_configs:
                stack.enter_context(replaced(config.scheduler, step=do_nothing))
            batch = apply_to_collection(self._batch, Tensor, _copied)
            self._make_gradients()
            step = self._training_step()
            wait_for(module.device)
            with ExitStack() as measured:
                if inside is not None:
                    inside(measured)
                start = time.perf_counter()
                with torch.enable_grad():
                    loss = step(batch)
                    if isinstance(loss, dict):
                        loss = loss.get("loss")
                    if module.automatic_optimization and loss is not None:
                        module.backward(loss)
                del loss
                wait_for(module.device)
                return time.perf_counter() - start

    def _training_step(self) -> Callable[[Any], Any]:
        trainer, module = self._trainer, self._module
        # Past DDP's own forward: its reducer then expects no gradients and stays out of it.
        past_ddp = isinstance(trainer.strategy, DDPStrategy)
        target = module.training_step if past_ddp else trainer.strategy.training_step
        takes_index = is_param_in_hook_signature(module.training_step, "batch_idx", min_args=2)

        def step(batch: Any) -> Any:
            args = (batch, self._batch_idx) if takes_index else (batch,)
            with trainer.precision_plugin.train_step_context():
                return target(*args)

        return step

    def _make_gradients(self) -> None:
        """Have the gradients there before the measurement, which is of activations."""
        parameters = list(self._module.parameters())
        if isinstance(self._trainer.strategy, FSDPStrategy) or any(map(is_dtensor, parameters)):
            return  # sharded gradients are made by the strategy
        for parameter in parameters:
            if parameter.requires_grad:
                parameter.grad = torch.zeros_like(parameter)


def _copied(tensor: Tensor) -> Tensor:
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def _ignore(*args: Any, **kwargs: Any) -> None:
    pass
