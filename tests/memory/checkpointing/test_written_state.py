"""State that a block reads and writes besides its inputs: random numbers, buffers, attributes."""

import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torchmetrics import MeanMetric

from lightning_opt.core.modules.blocks import Block as Found
from lightning_opt.core.modules.blocks import find_blocks
from lightning_opt.core.modules.preserve import ALWAYS_COPIED_BYTES
from lightning_opt.memory.checkpointing.forward import CheckpointedForward, InputChangedError
from lightning_opt.memory.checkpointing.policies import AppliedPlan, make_plan

POLICIES = ("every_layer", "sqrt", "selective")


class Stacked(nn.Module):
    def __init__(self, block: type[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(block() for _ in range(4))

    def forward(self, x: Any) -> Tensor:
        for layer in self.layers:
            x = layer(x)
            x = x.x if isinstance(layer, ReturnsDataclass) else x
        return x.x if isinstance(x, Hidden) else x


@dataclass
class Hidden:
    """A dataclass, which torch's pytrees treat as a leaf."""

    mask: Tensor
    x: Tensor


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.prepare()

    def prepare(self) -> None: ...

    def written(self) -> Any: ...


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


class Average(Block):
    """A moving average of the hidden values."""

    def prepare(self) -> None:
        self.register_buffer("average", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.linear(x)
        self.write(hidden.detach().mean(0))
        return x + (hidden - self.average).sin()


class LateAverage(Average):
    """It starts at the second step."""

    begun = False

    def write(self, mean: Tensor) -> None:
        if self.begun:
            self.average.mul_(0.9).add_(mean, alpha=0.1)


class HiddenAverage(Average):
    """It is written through `.data`, which has no version."""

    def write(self, mean: Tensor) -> None:
        self.average.data.mul_(0.9).add_(mean, alpha=0.1)


class Counting(Block):
    """A number and a list in attributes, and a metric, which are written in every run."""

    def prepare(self) -> None:
        self.count, self.collected, self.metric = 0, [], MeanMetric()

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        self.collected.append(self.count)
        self.metric.update(x.detach())
        return x + (self.linear(x) / len(self.collected)).sin()

    def written(self) -> Any:
        return self.count, self.collected, self.metric.compute()


class Sparse(Block):
    """A buffer without strides."""

    def prepare(self) -> None:
        self.register_buffer("adjacency", torch.eye(8).to_sparse())

    def forward(self, x: Tensor) -> Tensor:
        return x + (self.adjacency @ self.linear(x).sin().mT).mT


class ReturnsDataclass(Block):
    def forward(self, x: Tensor) -> Hidden:
        return Hidden(x.detach() > 0, torch.dropout(self.linear(x).sin(), 0.5, True))


class TakesDataclass(Block):
    def forward(self, x: Any) -> Hidden:
        hidden = x if isinstance(x, Hidden) else Hidden(x, x)
        return Hidden(hidden.mask, torch.dropout(self.linear(hidden.x).sin(), 0.5, True))


KINDS = (
    PythonsRandom,
    NumpysRandom,
    OwnGenerator,
    LateAverage,
    HiddenAverage,
    Counting,
    Sparse,
    ReturnsDataclass,
    TakesDataclass,
)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("policy", POLICIES)
def test_gradients_state_and_random_numbers_are_identical(policy: str, kind: type[Block]) -> None:
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
        buffers = {name: buffer.to_dense() for name, buffer in model.named_buffers()}
        written = [layer.written() for layer in model.layers]
        return [p.grad for p in model.parameters()], buffers, drawn, written

    *tensors, written = run(policy)
    *expected, plain = run("none")
    torch.testing.assert_close(tensors, expected, rtol=0, atol=0)
    assert written == plain


def test_block_that_changes_its_parameters_raises() -> None:
    class MaxNorm(Block):
        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                self.linear.weight.div_(self.linear.weight.norm())
            return self.linear(x)

    model = Stacked(MaxNorm)
    with (
        AppliedPlan(make_plan("every_layer", find_blocks(model), None)),
        pytest.raises(InputChangedError, match="MaxNorm changes its parameters"),
    ):
        model(torch.ones(3, 8))


def test_late_write_to_a_large_buffer_raises() -> None:
    class Large(Block):
        def prepare(self) -> None:
            self.register_buffer("queue", torch.zeros(ALWAYS_COPIED_BYTES))

        def forward(self, x: Tensor) -> Tensor:
            if x.sum() > 24:
                self.queue += 1
            return self.linear(x) + self.queue[0]

    model = Stacked(Large)
    with AppliedPlan(make_plan("every_layer", find_blocks(model), None)):
        model(torch.ones(3, 8)).sum().backward()
        with pytest.raises(RuntimeError, match="Large writes to its buffer 'queue'"):
            model(2 * torch.ones(3, 8))


@pytest.mark.parametrize("policy", ["every_layer", "block"])
def test_random_state_of_the_parameters_device_is_restored_if_no_argument_is_on_it(
    policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn = [7]
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda device: list(drawn))
    monkeypatch.setattr(
        torch.cuda, "set_rng_state", lambda state, device: drawn.__setitem__(slice(None), state)
    )

    class OnDevice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            with FakeTensorMode():
                self.weight = nn.Parameter(torch.empty(2, device="cuda"))

        def forward(self, hidden: Hidden) -> Tensor:
            drawn[0] += 1
            seen.append(drawn[0])
            return hidden.x.exp()

    seen: list[int] = []
    module = OnDevice()
    with AppliedPlan(make_plan(policy, [Found("two", (module, nn.Identity()))], 1)):
        loss = module(Hidden(torch.ones(2), torch.ones(2, requires_grad=True))).sum()
        drawn[0] = 99
        loss.backward()
    assert seen == [8, 8]
    assert drawn == [99]


def test_parameters_replaced_before_the_backward_pass_are_not_used():
    def gradients(checkpointed: bool) -> list[Any]:
        torch.manual_seed(0)
        blocks = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(2)))
        for block in blocks if checkpointed else []:
            CheckpointedForward(block).apply()
        used = list(blocks.parameters())
        loss = blocks(torch.ones(4, 8)).square().mean()
        for block in blocks:
            block[0].weight = nn.Parameter(torch.zeros(8, 8))  # type: ignore[index]
        loss.backward()
        assert not any(block[0].weight.any() for block in blocks)  # type: ignore[index]
        return [one.grad for one in used] + [block[0].weight.grad for block in blocks]  # type: ignore[index]

    torch.testing.assert_close(gradients(True), gradients(False), rtol=0, atol=0)
