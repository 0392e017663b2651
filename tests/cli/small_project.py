"""A user's project: a model with arguments, data, and a callback."""

from dataclasses import dataclass

import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def rows(number: int = 64) -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(number, 6, generator=generator)
    return TensorDataset(inputs, inputs.sum(1, keepdim=True))


class Small(L.LightningModule):
    """A small regression.

    Args:
        width: Units of the hidden layer.
        lr: Learning rate.
    """

    def __init__(self, width: int = 8, lr: float = 0.01) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Linear(6, width), nn.Tanh(), nn.Linear(width, 1))

    def training_step(self, batch, batch_idx):
        inputs, targets = batch
        return nn.functional.mse_loss(self.net(inputs), targets)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)


class SmallData(L.LightningDataModule):
    """Rows in batches.

    Args:
        batch_size: Rows per batch.
    """

    def __init__(self, batch_size: int = 8) -> None:
        super().__init__()
        self.batch_size = batch_size

    def train_dataloader(self):
        return DataLoader(rows(), batch_size=self.batch_size)


@dataclass
class Config:
    width: int = 8


class Configured(Small):
    def __init__(self, config: Config, **others) -> None:
        super().__init__(config.width, **others)


class Watching(L.Callback):
    def __init__(self, config: Config) -> None:
        self.width = config.width


class Interrupt(L.Callback):
    """Raises KeyboardInterrupt in the third step, as Ctrl-C does."""

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if trainer.global_step == 2:
            raise KeyboardInterrupt
