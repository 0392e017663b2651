"""The Python calls and operators of a recomputed block, compared with torch's own checkpoint."""

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from lightning_opt.core.modules.blocks import find_blocks
from lightning_opt.memory.checkpointing.policies import AppliedPlan, make_plan

BLOCKS = 6


class Layer(nn.Module):
    def __init__(self, norm: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(8, 8), norm()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.norm(self.linear(x)).relu()


class Masked(nn.Module):
    """A large buffer that is only read."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.ones(256, 256))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.mask[0, 0]


class Counts(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls = self.operators = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operators += 1
        return func(*args, **(kwargs or {}))

    def count(self, frame: Any, event: str, argument: Any) -> None:
        self.calls += event == "call"


def counts_of(model: nn.Module) -> Counts:
    """Count the third step: the first one shows what a block needs."""
    batch = torch.randn(4, 8)
    for _ in range(2):
        model(batch).sum().backward()
    counts = Counts()
    with counts:
        model(batch).sum().backward()
    previous = sys.getprofile()
    sys.setprofile(counts.count)
    try:
        model(batch).sum().backward()
    finally:
        sys.setprofile(previous)
    return counts


def counts_of_torch(model: nn.Module, segment: int, **settings: Any) -> Counts:
    def run(layers: Any, x: Tensor) -> Tensor:
        for layer in layers:
            x = layer(x)
        return x

    def forward(x: Tensor) -> Tensor:
        for start in range(0, BLOCKS, segment):
            x = checkpoint(run, model[start : start + segment], x, use_reentrant=False, **settings)
        return x

    wrapped = nn.Module()
    wrapped.forward = forward
    return counts_of(wrapped)


@pytest.mark.parametrize(("policy", "segment", "keeping"), [("every_layer", 1, 0), ("block", 3, 4)])
@pytest.mark.parametrize("norm", [partial(nn.LayerNorm, 8), Masked])
def test_block_without_written_state_costs_as_much_as_torchs_checkpoint(
    policy: str, segment: int, keeping: int, norm: Any
) -> None:
    model = nn.Sequential(*(Layer(norm) for _ in range(BLOCKS)))
    expected = counts_of_torch(model, segment)
    with AppliedPlan(make_plan(policy, find_blocks(model), segment)):
        ours = counts_of(model)
    assert ours.calls <= expected.calls + 35 * BLOCKS
    assert ours.operators <= expected.operators + keeping * BLOCKS // segment


def test_selective_block_costs_as_much_as_torchs_with_the_same_operators() -> None:
    model = nn.Sequential(*(Layer(partial(nn.LayerNorm, 8)) for _ in range(BLOCKS)))
    products = [torch.ops.aten.addmm.default]
    contexts = partial(create_selective_checkpoint_contexts, products)
    expected = counts_of_torch(model, 1, context_fn=contexts)
    with AppliedPlan(make_plan("selective", find_blocks(model), None)):
        ours = counts_of(model)
    assert ours.calls <= expected.calls + 40 * BLOCKS
    assert ours.operators == expected.operators


def test_block_with_running_statistics_copies_them_twice() -> None:
    model = nn.Sequential(*(Layer(partial(nn.BatchNorm1d, 8)) for _ in range(BLOCKS)))
    expected = counts_of_torch(model, 1)
    with AppliedPlan(make_plan("every_layer", find_blocks(model), None)):
        ours = counts_of(model)
    copies = 2 * 3  # of the mean, the variance and the counter, before both runs
    assert ours.operators == expected.operators + copies * BLOCKS
    assert ours.calls <= expected.calls + 70 * BLOCKS
