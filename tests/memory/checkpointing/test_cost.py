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


PRODUCTS = [torch.ops.aten.addmm.default]


@pytest.mark.parametrize(
    ("policy", "segment", "norm", "calls", "operators"),
    [  # calls and operators of a block in addition to torch's checkpoint
        ("every_layer", 1, partial(nn.LayerNorm, 8), 35, 0),
        ("every_layer", 1, Masked, 35, 0),
        ("block", 3, partial(nn.LayerNorm, 8), 35, 4 / 3),
        ("block", 3, Masked, 35, 4 / 3),
        ("selective", 1, partial(nn.LayerNorm, 8), 40, 0),
        # It copies the mean, the variance and the counter before both runs.
        ("every_layer", 1, partial(nn.BatchNorm1d, 8), 70, 2 * 3),
    ],
)
def test_recomputed_block_costs_as_much_as_with_torchs_checkpoint(
    policy: str, segment: int, norm: Any, calls: int, operators: float
) -> None:
    model = nn.Sequential(*(Layer(norm) for _ in range(BLOCKS)))
    contexts = partial(create_selective_checkpoint_contexts, PRODUCTS)
    settings = {"context_fn": contexts} if policy == "selective" else {}
    expected = counts_of_torch(model, segment, **settings)
    interval = segment if policy == "block" else None
    with AppliedPlan(make_plan(policy, find_blocks(model), interval)):
        ours = counts_of(model)
    assert ours.calls <= expected.calls + calls * BLOCKS
    assert ours.operators <= expected.operators + operators * BLOCKS
