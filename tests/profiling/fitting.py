"""Models, data and faults for trainings in their own processes."""

import ctypes
import os
import time
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

CPU = {"accelerator": "cpu", "devices": 1}
FEATURES = 8


class Rows(Dataset[Tensor]):
    """A different row for each index."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Tensor:
        return torch.randn(FEATURES, generator=torch.Generator().manual_seed(index))


class Net(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(FEATURES, 16), nn.Tanh(), nn.Linear(16, 1))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return (self.layers(batch) - batch.sum(1, keepdim=True)).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05)


def rows(count: int = 40, batch_size: int = 4, **settings: Any) -> DataLoader[Tensor]:
    return DataLoader(Rows(count), batch_size=batch_size, shuffle=True, **settings)


def rows_with_workers() -> DataLoader[Tensor]:
    return rows(400, num_workers=1)


class Waits(Callback):
    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def on_train_batch_end(self, *args: Any) -> None:
        time.sleep(self.seconds)


class Mishap(Callback):
    """Fails at the third step.

    Args:
        kind: The name of the method that fails.
    """

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == 2:
            getattr(self, self.kind)()

    def raises(self) -> None:
        raise ArithmeticError("planted")

    def segfaults(self) -> None:
        ctypes.string_at(0)

    def hangs(self) -> None:
        time.sleep(600)

    def leaves(self) -> None:
        os._exit(7)

    def is_killed(self) -> None:
        os.kill(os.getpid(), 9)

    def takes_memory(self) -> None:
        torch.ones(1 << 50)


def mishap(kind: str) -> dict[str, Any]:
    return {**CPU, "callbacks": [Mishap(kind)]}
