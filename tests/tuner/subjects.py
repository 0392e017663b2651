"""A model that sleeps in each step, and callbacks that shorten the sleep, some with faults."""

import time
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

DELAY = 0.06
"""Seconds, several times what a busy machine adds to a step."""


class Sleeper(LightningModule):
    """Classifies vectors with a tiny loss, and sleeps for `delay` in each step."""

    def __init__(self) -> None:
        super().__init__()
        self.delay = DELAY
        self.autocasts = False
        self.layers = nn.Sequential(
            nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 4)
        )

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        time.sleep(self.delay)
        with torch.autocast("cpu", torch.float16, enabled=self.autocasts):
            outputs = self.layers(batch[0])
            # So small that its gradients are below what float16 can hold.
            return 1e-6 * nn.functional.cross_entropy(outputs, batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=3e-3, eps=1e-20)


class SlowStart(Sleeper):
    """Takes longer to create than a search may last."""

    def __init__(self) -> None:
        super().__init__()
        time.sleep(1)


def batches() -> DataLoader[Any]:
    """Vectors whose class is a linear function of them."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(1024, 16, generator=generator)
    classes = (inputs @ torch.randn(16, 4, generator=generator)).argmax(1)
    return DataLoader(TensorDataset(inputs, classes), batch_size=32, shuffle=True)


class Faster(Callback):
    def __init__(self, share: float = 0.05) -> None:
        self.share = share

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        pl_module.delay *= self.share  # type: ignore[operator]


class Autocast(Faster):
    """Faster, with float16 autocast and without a loss scale."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        pl_module.autocasts = True


class Failing(Callback):
    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if trainer.global_step == 4:
            raise ArithmeticError("planted")


def added(name: str, **arguments: Any) -> dict[str, Any]:
    """Return Trainer arguments with one of these callbacks."""
    path = f"tests.tuner.subjects.{name}"
    return {"callbacks": [{"class_path": path, "init_args": arguments}]}
