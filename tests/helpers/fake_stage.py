"""A Trainer's part in an optimizer step on fake CUDA: it calls the hooks, and answers questions."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_opt import NonFiniteGuard
from tests.helpers.fake_cuda import Launches, Transformer, fake_gradients, on_fake_cuda


class Model(L.LightningModule):
    """A LightningModule around any module."""

    def __init__(self, net: nn.Module | None = None) -> None:
        super().__init__()
        self.net = Transformer() if net is None else net


class Stage:
    """Calls the hooks of callbacks as the Trainer does, within ``fake_cuda``.

    Args:
        callbacks: In their order.
        net: What is trained.
        scaler: A loss scaler, as a precision plugin has it.
        optimizer: The class of the optimizer, and its settings.
    """

    def __init__(
        self,
        callbacks: Sequence[Any],
        net: nn.Module | None = None,
        scaler: Any = None,
        optimizer: type[Optimizer] = torch.optim.AdamW,
        **settings: Any,
    ) -> None:
        self.module = on_fake_cuda(Model(net))
        self.optimizer = optimizer(self.module.parameters(), **settings)
        self.callbacks = list(callbacks)
        self.trainer: Any = SimpleNamespace(
            optimizers=[self.optimizer],
            callbacks=self.callbacks,
            model=self.module,
            strategy=SimpleNamespace(root_device=torch.device("cuda")),
            precision_plugin=SimpleNamespace(scaler=scaler),
            world_size=1,
            accumulate_grad_batches=1,
            global_step=0,
            current_epoch=0,
            loggers=[],
            is_global_zero=True,
        )
        for callback in self.callbacks:
            callback.on_fit_start(self.trainer, self.module)
        for callback in self.callbacks:
            if isinstance(callback, NonFiniteGuard):
                # As `on_train_start`, but that looks at the weights, which is a read.
                from lightning_opt.gradients.guard.buffers import BufferKeeper

                callback._start_run(BufferKeeper(self.module), self.trainer.optimizers)
            else:
                callback.on_train_start(self.trainer, self.module)

    def call(self, hook: str, *arguments: Any) -> None:
        """Call a hook of every callback."""
        for callback in self.callbacks:
            getattr(callback, hook)(self.trainer, self.module, *arguments)

    def step(self, losses: Sequence[Tensor] | None = None, update: bool = True) -> Launches:
        """Make one step, and return what the callbacks launched up to the update."""
        if losses is None:
            losses = [torch.empty((), device="cuda")]
        fake_gradients(self.module)
        step = self.trainer.global_step
        with Launches() as launches:
            self.call("on_train_batch_start", None, step)
            for loss in losses:
                self.call("on_before_backward", loss)
                self.call("on_after_backward")
            self.call("on_before_optimizer_step", self.optimizer)
        if update:
            self.optimizer.step()
        for callback in self.callbacks:
            if isinstance(callback, NonFiniteGuard):
                callback._delayed.clear()  # in two steps the host will look, at a copy of its own
        self.call("on_train_batch_end", None, None, step)
        self.trainer.global_step += 1
        return launches
