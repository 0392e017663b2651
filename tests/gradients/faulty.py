"""Models and data with planted faults of real causes."""

import copy
from collections.abc import Mapping
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset

from tests.helpers.trainers import quiet_trainer

FEATURES = 6


def fit(model: Any, *callbacks: Callback, **settings: Any) -> Any:
    quiet_trainer(callbacks=list(callbacks), **settings).fit(model)
    return model


class NumberedBatches(Dataset[Any]):
    """Batches ``(number, inputs, targets)``, without those in ``leave_out``."""

    def __init__(self, count: int, leave_out: Any = (), seed: int = 0, rows: int = 8) -> None:
        generator = torch.Generator().manual_seed(seed)
        inputs = torch.randn(count, rows, FEATURES, generator=generator)
        truth = torch.randn(FEATURES, 1, generator=generator)
        targets = inputs @ truth + 0.1 * torch.randn(count, rows, 1, generator=generator)
        self.batches = [
            (number, inputs[number], targets[number])
            for number in range(count)
            if number not in set(leave_out)
        ]

    def __len__(self) -> int:
        return len(self.batches)

    def __getitem__(self, index: int) -> Any:
        return self.batches[index]


class FaultyNet(LightningModule):
    """Linear, BatchNorm, linear, with planted faults.

    Args:
        faults: The fault of each batch number: ``"nan"`` (a corrupt batch),
            ``"log"`` (the logarithm of a negative number in a layer), ``"inf"`` (an overflowing
            exponential), ``"constant"`` (an infinite loss with a finite gradient), ``"root"`` (a
            finite loss whose gradient is NaN), ``"spike"`` (targets a thousand times too large),
            ``"weight"`` (a weight is NaN from then on).
        optimizer: Class of the optimizer.
        settings: Its arguments.
        rank: The only rank on which faults happen; None for all.
        batches: Number of batches, including those in ``leave_out``.
    """

    def __init__(
        self,
        faults: Mapping[int, str] | None = None,
        optimizer: type[Optimizer] = torch.optim.SGD,
        settings: Mapping[str, Any] | None = None,
        *,
        rank: int | None = None,
        batches: int = 12,
        leave_out: Any = (),
    ) -> None:
        super().__init__()
        self.faults, self.rank = dict(faults or {}), rank
        self.optimizer, self.settings = optimizer, dict(settings or {"lr": 0.02})
        self.data = NumberedBatches(batches, leave_out)
        generator_state = torch.get_rng_state()
        torch.manual_seed(1)
        self.encoder = nn.Linear(FEATURES, 5)
        self.norm = nn.BatchNorm1d(5)
        self.head = nn.Linear(5, 1)
        torch.set_rng_state(generator_state)

    def fault_of(self, number: int) -> str | None:
        mine = self.rank is None or self.rank == self.global_rank
        return self.faults.get(number) if mine else None

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        number, inputs, targets = batch
        fault = self.fault_of(int(number))
        if fault == "nan":
            inputs = inputs.index_fill(0, torch.tensor([1]), float("nan"))
        if fault == "spike":
            targets = 1000 * targets
        if fault == "weight":
            with torch.no_grad():
                self.head.weight.view(-1)[2] = float("nan")
        hidden = torch.relu(self.norm(self.encoder(inputs)))
        if fault == "log":
            hidden = hidden + (-1 - hidden).log()
        if fault == "inf":
            hidden = hidden + (1e4 * (1 + hidden)).exp()
        loss = nn.functional.mse_loss(self.head(hidden), targets)
        if fault == "constant":
            loss = loss + float("inf")
        if fault == "root":
            loss = loss + (0 * self.head.bias).sqrt().sum()
        return loss

    def configure_optimizers(self) -> Any:
        return self.optimizer(self.parameters(), **self.settings)

    def train_dataloader(self) -> Any:
        return DataLoader(self.data, batch_size=None)


def optimizer_state(module: LightningModule) -> list[Any]:
    return [copy.deepcopy(optimizer.state_dict()) for optimizer in module.trainer.optimizers]


def all_finite(module: nn.Module) -> bool:
    return all(bool(torch.isfinite(value).all()) for value in module.state_dict().values())
