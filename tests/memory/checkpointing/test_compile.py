"""torch.compile before and after checkpointing, around the model and around blocks."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_opt.core.blocks import find_blocks
from lightning_opt.memory.checkpointing.methods.policies import (
    AppliedPlan,
    every_layer,
    square_root,
)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::DeprecationWarning:torch"),
    pytest.mark.filterwarnings("ignore:`torch.jit.script"),
    pytest.mark.filterwarnings("ignore::FutureWarning:torch"),
    pytest.mark.filterwarnings("ignore::UserWarning:torch"),
]


class Block(nn.Module):
    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(8, 8), norm

    def forward(self, x: Tensor, *, scale: float) -> Tensor:
        return x + scale * torch.tanh(self.norm(self.linear(x)))


class Model(nn.Module):
    def __init__(self, norm: Any) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(norm(8)) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, scale=0.5)
        return x


def results(model: Model, run: Any, batch: Tensor) -> list[Tensor]:
    loss = run(batch).square().mean()
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters()), *model.buffers()]


@pytest.mark.parametrize("norm", [nn.LayerNorm, nn.BatchNorm1d])
@pytest.mark.parametrize("plan", [every_layer, square_root])
@pytest.mark.parametrize("where", ["model", "blocks", "blocks wrapped", "blocks afterwards"])
def test_gradients_are_the_same(where: str, plan: Any, norm: Any) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    expected, model, batch = Model(norm), Model(norm), torch.randn(4, 8)
    model.load_state_dict(expected.state_dict())
    run: Any = model
    if where == "model":
        run = torch.compile(model, backend="aot_eager")
    if where == "blocks":
        for layer in model.layers:
            layer.compile(backend="aot_eager")
    if where == "blocks wrapped":
        model.layers = nn.ModuleList(
            torch.compile(layer, backend="aot_eager") for layer in model.layers
        )
    applied = AppliedPlan(plan(find_blocks(model)))
    if where == "blocks afterwards":
        for layer in model.layers:
            layer.compile(backend="aot_eager")
    try:
        torch.testing.assert_close(
            results(model, run, batch), results(expected, expected, batch), rtol=1e-6, atol=1e-7
        )
    finally:
        applied.undo()
        torch._dynamo.reset()


class Masked(nn.Module):
    """What most norms are to a compiler, with a buffer that is only read."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.register_buffer("mask", torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.mask


def test_blocks_without_buffers_stay_in_one_graph() -> None:
    from torch._dynamo.testing import CompileCounter

    torch._dynamo.reset()
    model, counter = Model(nn.LayerNorm), CompileCounter()
    applied = AppliedPlan(every_layer(find_blocks(model)))
    torch.compile(model, backend=counter, fullgraph=True)(torch.randn(4, 8)).sum().backward()
    applied.undo()
    assert counter.frame_count == 1
    torch._dynamo.reset()


def test_blocks_that_only_read_buffers_are_in_graphs_from_the_second_step_on() -> None:
    """The first step shows that none is written."""
    from torch._dynamo.testing import CompileCounter

    torch._dynamo.reset()
    model, counter = Model(Masked), CompileCounter()
    applied = AppliedPlan(every_layer(find_blocks(model)))
    for layer in model.layers:
        layer.compile(backend=counter)
    model(torch.randn(4, 8)).sum().backward()
    assert counter.op_count == 0
    model(torch.randn(4, 8)).sum().backward()
    applied.undo()
    assert counter.op_count > 0
    torch._dynamo.reset()
