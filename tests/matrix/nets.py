"""The model of the matrix: small, with the layers that the plugins act on."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional as F
from torch.optim import Optimizer
from torch.utils.data import TensorDataset

from tests.helpers.models import FEATURES, ResumableLoader, SmallNet, batches_of, shard

BATCHES, BATCH_SIZE = 7, 12
WIDTH, HEADS = 8, 2
BAD = (2, 3)
"""Batches that are NaN or left out, if the model is to have such."""

TOKENS = Shard(1)
BLOCK = {
    "norm": SequenceParallel(),
    "qkv": ColwiseParallel(input_layouts=TOKENS),
    "out": RowwiseParallel(output_layouts=TOKENS),
}
SEQUENCE_PARALLEL = {
    "0": PrepareModuleOutput(output_layouts=Replicate(), desired_output_layouts=TOKENS),
    **{f"{block}.{name}": style for block in (1, 2) for name, style in BLOCK.items()},
    "3": PrepareModuleInput(
        input_layouts=TOKENS, desired_input_layouts=Replicate(), use_local_output=True
    ),
}


class Stem(nn.Module):
    """Reshapes the features to an image and turns its pixels into tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(1, WIDTH, 3, padding=1)

    def forward(self, inputs: Tensor) -> Tensor:
        pixels: Tensor = self.convolution(inputs.view(-1, 1, 2, FEATURES // 2))
        return pixels.flatten(2).transpose(1, 2)


class Block(nn.Module):
    """A residual attention block. Its heads may be on several ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        qkv = self.qkv(self.norm(tokens)).unflatten(-1, (-1, 3, WIDTH // HEADS))
        mixed = F.scaled_dot_product_attention(*qkv.permute(3, 0, 2, 1, 4))
        return tokens + self.out(F.gelu(mixed.transpose(1, 2).flatten(2)))


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
        bad: The batches :data:`BAD` are NaN.
        memory: More than half a batch runs out of memory.
        leave_out: Train without the batches :data:`BAD`.
        merge: Number of batches that form one.
        clip: Largest norm of an optimizer's gradients, on one process.
    """

    def __init__(
        self,
        manual: bool = False,
        bad: bool = False,
        memory: bool = False,
        leave_out: bool = False,
        merge: int = 1,
        clip: float | None = None,
    ) -> None:
        super().__init__()
        self.automatic_optimization = not manual
        self.bad, self.memory, self.leave_out = bad, memory, leave_out
        self.merge, self.clip = merge, clip
        self.begun = 0
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(3)
            self.layer = nn.Sequential(Stem(), Block(), Block(), Head())  # type: ignore[assignment]

    def configure_model(self) -> None:
        if self.device_mesh is None or hasattr(self, "sharded"):
            return
        self.sharded = True
        if self.device_mesh["tensor_parallel"].size() > 1:
            parallelize_module(self.layer, self.device_mesh["tensor_parallel"], SEQUENCE_PARALLEL)
            return
        shard(self, *self.layer)  # type: ignore[misc]

    @property
    def replicas(self) -> tuple[int, int]:
        """This process's number among those that have different rows, and how many there are."""
        if self.device_mesh is not None and self.device_mesh["tensor_parallel"].size() > 1:
            return 0, 1
        return self.global_rank, self.trainer.world_size

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.begun += 1
        inputs, targets = batch
        if self.memory and 2 * len(inputs) * self.replicas[1] > BATCH_SIZE:
            raise torch.OutOfMemoryError("planted")
        if self.bad and batch_idx in BAD:
            inputs = inputs * float("nan")
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

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        if self.clip is not None:
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            nn.utils.clip_grad_norm_(parameters, self.clip)

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
        rank, ranks = self.replicas
        left_out = BAD if self.leave_out else ()
        rows = [
            row
            for row in range(rank, BATCHES * BATCH_SIZE, ranks)
            if row // BATCH_SIZE not in left_out
        ]
        tensors = [tensor[rows] for tensor in batches_of(BATCHES, BATCH_SIZE).tensors]
        return ResumableLoader(TensorDataset(*tensors), self.merge * BATCH_SIZE // ranks)
