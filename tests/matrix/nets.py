"""The model of the matrix: small, with the layers that the plugins act on."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer
from torch.utils.data import TensorDataset

from tests.helpers.models import FEATURES, ResumableLoader, SmallNet, batches_of

BATCHES, BATCH_SIZE = 6, 8
WIDTH = 8


class Stem(nn.Module):
    """Reshapes the features to an image and turns its pixels into tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(1, WIDTH, 3, padding=1)

    def forward(self, inputs: Tensor) -> Tensor:
        pixels: Tensor = self.convolution(inputs.view(-1, 1, 2, FEATURES // 2))
        return pixels.flatten(2).transpose(1, 2)


class Block(nn.Module):
    """A residual attention block."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        batch, length, _ = tokens.shape
        qkv = self.qkv(self.norm(tokens)).view(batch, length, 3, 2, WIDTH // 2)
        mixed = F.scaled_dot_product_attention(*qkv.permute(2, 0, 3, 1, 4))
        mixed = mixed.transpose(1, 2).reshape(batch, length, WIDTH)
        return tokens + self.out(F.gelu(mixed))


class Head(nn.Module):
    """Projects the mean of the tokens to one number."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, 1)

    def forward(self, tokens: Tensor) -> Tensor:
        mean: Tensor = self.linear(tokens.mean(1))
        return mean


class MatrixNet(SmallNet):
    """A small vision transformer, sharded if the strategy has a mesh; counts begun steps.

    Args:
        manual: Use manual optimization with two optimizers: one for the blocks, one for the rest.
    """

    def __init__(self, manual: bool = False) -> None:
        super().__init__()
        self.automatic_optimization = not manual
        self.begun = 0
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(3)
            self.layer = nn.Sequential(Stem(), Block(), Block(), Head())  # type: ignore[assignment]

    def configure_model(self) -> None:
        from torch.distributed.fsdp import fully_shard

        if self.device_mesh is not None and not hasattr(self, "sharded"):
            self.sharded = True
            for part in self.layer:  # type: ignore[attr-defined]
                fully_shard(part, mesh=self.device_mesh["data_parallel"])
            fully_shard(self, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.begun += 1
        inputs, targets = batch
        loss = self.loss(self(inputs), targets)
        if self.automatic_optimization:
            return {"loss": loss}
        optimizers: Any = self.optimizers()
        for optimizer in optimizers:
            optimizer.zero_grad()
        self.manual_backward(loss)
        for optimizer in optimizers:
            optimizer.step()
        return None

    def configure_optimizers(self) -> Any:
        def sgd(*parts: nn.Module) -> Optimizer:
            parameters = [parameter for part in parts for parameter in part.parameters()]
            return torch.optim.SGD(parameters, lr=0.01, momentum=0.9)

        stem, *blocks, head = self.layer  # type: ignore[misc]
        if self.automatic_optimization:
            return sgd(stem, *blocks, head)
        return [sgd(*blocks), sgd(stem, head)]

    def train_dataloader(self) -> Any:
        """Distribute the rows of each batch over the ranks; together they form the same batch."""
        rank, ranks = self.global_rank, self.trainer.world_size
        rows = [tensor[rank::ranks] for tensor in batches_of(BATCHES, BATCH_SIZE).tensors]
        return ResumableLoader(TensorDataset(*rows), batch_size=BATCH_SIZE // ranks)
