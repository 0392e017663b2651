"""A model that runs out of memory at a chosen place, and limits of memory."""

from __future__ import annotations

import gc
import math
import random
from typing import Any

import lightning as L
import psutil
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_opt.core.measure.memory import MB


class Squander(torch.autograd.Function):
    """An identity that allocates memory per element, in its forward or backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: int, backward: int) -> Tensor:
        ctx.backward = backward
        x.new_ones(x.numel() * forward)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        gradient.new_ones(gradient.numel() * ctx.backward)
        return gradient, None, None


class Sequences(L.LightningModule):
    """Sequences of random lengths, and a peak of memory in one place of the step."""

    def __init__(self, batches: list[dict[str, Tensor]], where: str, factor: int) -> None:
        super().__init__()
        self.batches, self.where, self.factor = batches, where, factor
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))
        self.seen: list[int] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.seen += batch["id"].tolist()
        hidden = self.layers[:2](batch["x"])
        factors = {"forward": (self.factor, 0), "backward": (0, self.factor), "loss": (0, 0)}
        hidden = Squander.apply(hidden, *factors[self.where])
        if self.where == "loss":
            hidden.new_ones(self.factor * hidden.numel())
        loss: Tensor = self.layers[2](hidden).square().mean(dim=(1, 2)).mean()
        self.log("loss", loss, on_step=False, on_epoch=True, batch_size=len(hidden))
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.02, momentum=0.5)

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.batches, batch_size=None)


def some_batches(draw: random.Random, count: int) -> list[dict[str, Tensor]]:
    """Return batches of random sizes and lengths; lengths differ by up to a factor of 8."""
    found, number = [], 0
    for _ in range(count):
        samples, length = draw.randint(4, 24), draw.choice([16, 32, 64, 128])
        x = torch.randn(samples, length, 64)
        found.append({"id": torch.arange(number, number + samples), "x": x})
        number += samples
    return found


def limit_address_space(room: float) -> None:
    """Limit the address space to ``room`` MB more than now; infinity removes the limit."""
    import resource

    limit = resource.RLIM_INFINITY
    if room < math.inf:
        limit = psutil.Process().memory_info().vms + int(room * MB)
    resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))


def limit_device(room: float) -> None:
    """Limit the GPU memory of torch's allocator in the same way."""
    gc.collect()
    torch.cuda.empty_cache()
    total = torch.cuda.mem_get_info()[1]
    share = (torch.cuda.memory_reserved() + room * MB) / total if room < math.inf else 1.0
    torch.cuda.set_per_process_memory_fraction(min(share, 1.0))


class Limit(L.Callback):
    """Limits the address space at the first batch, after all threads have started.

    Args:
        room: MB more than in use then.
    """

    def __init__(self, room: float) -> None:
        self.room = room

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 0:
            gc.collect()
            limit_address_space(self.room)
