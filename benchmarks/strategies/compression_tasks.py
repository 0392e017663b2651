"""The tasks of compression_accuracy.py: small models with the same batches for all strategies."""

from __future__ import annotations

import sysconfig
from pathlib import Path
from typing import Any

import lightning as L
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.models import quiet_trainer

BATCH = 32
"""Samples per step of all ranks together."""


def trainer_of(world: int, strategy: Any, **settings: Any) -> L.Trainer:
    """Return a Trainer of ``world`` ranks for one epoch, without logs and checkpoints."""
    settings = {"max_epochs": 1, "use_distributed_sampler": False, **settings}
    return quiet_trainer(devices=world, strategy=strategy, **settings)


class Task(L.LightningModule):
    """A model, its batches and its score."""

    name: str
    better: float
    """1 if a higher score is better, else -1."""

    def __init__(self, optimizer: str, ranks: int, seed: int) -> None:
        super().__init__()
        self.optimizer, self.ranks, self.seed = optimizer, ranks, seed
        self.bad_batch: int | None = None  # with a loss 300 times too large on rank 1

    def batch(self, number: int, rank: int) -> tuple[Tensor, Tensor]:
        raise NotImplementedError

    def score(self) -> float:
        raise NotImplementedError

    def training_step(self, number: int, batch_idx: int) -> Tensor:
        inputs, targets = self.batch(int(number), self.global_rank)
        loss = F.cross_entropy(self(inputs).flatten(0, -2), targets.flatten())
        return 300 * loss if int(number) == self.bad_batch and self.global_rank == 1 else loss

    def draw(self, number: int, rank: int, high: int) -> Tensor:
        """Return the indices of a rank's samples in a step, the same for every strategy."""
        generator = torch.Generator().manual_seed((self.seed * 64 + rank) * 100_000 + number)
        return torch.randint(0, high, (BATCH // self.ranks,), generator=generator)

    def configure_optimizers(self) -> dict[str, Any]:
        optimizer: torch.optim.Optimizer
        if self.optimizer == "SGD":
            optimizer = torch.optim.SGD(self.parameters(), lr=self.rates[0], momentum=0.9)
        else:
            optimizer = torch.optim.AdamW(self.parameters(), lr=self.rates[1])
        steps = int(self.trainer.estimated_stepping_batches)  # batches are not counted yet
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, steps)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": schedule, "interval": "step"},
        }

    rates: tuple[float, float]


class Digits(Task):
    """A ConvNet of 38,000 parameters on 8 x 8 digits; score: accuracy on 597 of them in percent."""

    name = "digits ConvNet, accuracy %"
    better = 1.0
    rates = (0.02, 1e-3)

    def __init__(self, optimizer: str, ranks: int, seed: int) -> None:
        super().__init__(optimizer, ranks, seed)
        data = load_digits()
        order = torch.randperm(1797, generator=torch.Generator().manual_seed(0))
        self.inputs = torch.tensor(data.images, dtype=torch.float32)[order].unsqueeze(1) / 16
        self.targets = torch.tensor(data.target)[order]
        torch.manual_seed(seed)
        self.layers = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(16, 32, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(512, 64),
            nn.ReLU(),
            nn.Linear(64, 10),
        )

    def forward(self, inputs: Tensor) -> Tensor:
        return self.layers(inputs)

    def batch(self, number: int, rank: int) -> tuple[Tensor, Tensor]:
        places = self.draw(number, rank, 1200)
        generator = torch.Generator().manual_seed(number * 64 + rank)
        noise = torch.randn(len(places), 1, 8, 8, generator=generator) * 0.2
        return self.inputs[places] + noise, self.targets[places]

    @torch.no_grad()
    def score(self) -> float:
        right = self(self.inputs[1200:]).argmax(1) == self.targets[1200:]
        return 100 * right.float().mean().item()


class Bytes(Task):
    """A transformer of two layers of width 64 on Python's standard library; score: loss in nats."""

    name = "byte-level GPT, loss"
    better = -1.0
    rates = (0.1, 1e-3)
    context = 16

    def __init__(self, optimizer: str, ranks: int, seed: int) -> None:
        super().__init__(optimizer, ranks, seed)
        paths = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
        text = b"".join(path.read_bytes() for path in paths)[:2_000_000]
        self.text = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(256, 64)
        self.places = nn.Parameter(0.02 * torch.randn(self.context, 64))
        layer = nn.TransformerEncoderLayer(64, 4, 256, 0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(64, 256)
        mask = nn.Transformer.generate_square_subsequent_mask(self.context)
        self.register_buffer("mask", mask)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.embed(inputs) + self.places
        return self.head(self.layers(hidden, mask=self.mask, is_causal=True))

    def cut(self, places: Tensor) -> tuple[Tensor, Tensor]:
        rows = self.text[places.unsqueeze(1) + torch.arange(self.context + 1)]
        return rows[:, :-1], rows[:, 1:]

    def batch(self, number: int, rank: int) -> tuple[Tensor, Tensor]:
        return self.cut(self.draw(number, rank, 1_800_000))

    @torch.no_grad()
    def score(self) -> float:
        inputs, targets = self.cut(torch.linspace(1_810_000, 1_990_000, 1024).long())
        return F.cross_entropy(self(inputs).flatten(0, 1), targets.flatten()).item()


TASKS: dict[str, type[Task]] = {"digits": Digits, "bytes": Bytes}
