"""What a block reads and writes besides its inputs: random numbers of all kinds, and buffers."""

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from lightning_opt.core.blocks import find_blocks
from lightning_opt.memory.checkpointing.activation_checkpointing import make_plan
from lightning_opt.memory.checkpointing.methods.policies import AppliedPlan

POLICIES = ("every_layer", "sqrt", "selective")


class Stacked(nn.Module):
    def __init__(self, block: type[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(block() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.prepare()

    def prepare(self) -> None: ...


class PythonsRandom(Block):
    def forward(self, x: Tensor) -> Tensor:
        return x + random.random() * self.linear(x).sin()


class NumpysRandom(Block):
    def forward(self, x: Tensor) -> Tensor:
        return x + float(np.random.rand()) * self.linear(x).sin()  # noqa: NPY002 - as users do


class OwnGenerator(Block):
    def prepare(self) -> None:
        self.generator = torch.Generator().manual_seed(3)

    def forward(self, x: Tensor) -> Tensor:
        return x + (torch.rand(x.shape, generator=self.generator) * self.linear(x)).sin()


class OwnStatistics(Block):
    """BatchNorm as a function, whose kernel writes to buffers without a trace."""

    def prepare(self) -> None:
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("var", torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.linear(x)
        return x + functional.batch_norm(hidden, self.mean, self.var, training=True).sin()


class LateAverage(Block):
    """A moving average that begins with the second step, and that the output depends on."""

    def prepare(self) -> None:
        self.register_buffer("average", torch.zeros(8))
        self.steps = 0

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.linear(x)
        if self.begun:
            self.average.mul_(0.9).add_(hidden.detach().mean(0), alpha=0.1)
        return x + (hidden - self.average).sin()

    begun = False


class Masked(Block):
    """What it has is only read."""

    def prepare(self) -> None:
        self.register_buffer("mask", torch.full((8,), -torch.inf).masked_fill(torch.ones(8) > 0, 1))

    def forward(self, x: Tensor) -> Tensor:
        return x + (self.linear(x) * self.mask).sin()


KINDS = (PythonsRandom, NumpysRandom, OwnGenerator, OwnStatistics, LateAverage, Masked)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("policy", POLICIES)
def test_gradients_and_buffers_are_those_without_it(policy: str, kind: type[Block]) -> None:
    def run(policy: str) -> Any:
        for seed in (torch.manual_seed, random.seed, np.random.seed):
            seed(0)
        model = Stacked(kind)
        applied = AppliedPlan(make_plan(policy, find_blocks(model), None))
        for step in range(3):
            kind.begun = step > 0
            model(torch.ones(3, 8)).square().sum().backward()
        applied.undo()
        kind.begun = False
        drawn = [random.random(), np.random.rand(), torch.rand(2)]  # noqa: NPY002
        return [p.grad for p in model.parameters()], dict(model.named_buffers()), drawn

    torch.testing.assert_close(run(policy), run("none"), rtol=0, atol=0)
