"""Checkpointing changes memory and time only."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_opt.core.modules.blocks import Block
from lightning_opt.memory.checkpointing.activation_checkpointing import ActivationCheckpointing
from lightning_opt.memory.checkpointing.policies import AppliedPlan, make_plan
from lightning_opt.memory.checkpointing.segments import Segment
from tests.memory.architectures import ARCHITECTURES, Architecture, assert_identical, train

POLICIES: dict[str, dict[str, Any]] = {
    "every_layer": {},
    "block": {"interval": 3},
    "selective": {},
    "auto": {"budget": 0.5, "strict": False},
}


@cache
def unchecked(name: str) -> Architecture:
    return train(name, None)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.filterwarnings("ignore:ActivationCheckpointing cannot meet budget=0.5")
def test_training_is_bit_identical(name: str, policy: str) -> None:
    callback = ActivationCheckpointing(policy, **POLICIES[policy])
    model = train(name, callback)
    # Each pass of a gradient penalty brings everything back, so the plan may be empty.
    assert callback.plan or (policy == "auto" and name in ("GradientPenalty", "InputGradients"))
    assert_identical(model, unchecked(name))


def test_consecutive_blocks_are_joined_into_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = []
    original = Segment.run

    def run(self: Segment, *args: Any, **kwargs: Any) -> Any:
        output = original(self, *args, **kwargs)
        lengths.append(len(self))
        return output

    monkeypatch.setattr(Segment, "run", run)
    train("EncoderDecoder", ActivationCheckpointing("block", interval=3), max_steps=1)
    assert lengths == [1, 2, 3, 1, 2, 3]
    lengths.clear()
    train("Transformer", ActivationCheckpointing("block", interval=4), max_steps=1)
    assert lengths == [1, 2, 1, 2], "dropout after the second block separates them"


class Layer(nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.weight, self.function = nn.Parameter(torch.ones(3)), function

    def forward(self, x: Tensor, other: Tensor | float = 0.0) -> Tensor:
        return self.function(x * self.weight + other)


@contextmanager
def checkpointed(policy: str, *functions: Any) -> Iterator[list[Layer]]:
    layers = [Layer(function) for function in functions]
    blocks = [Block(str(number), (layer,)) for number, layer in enumerate(layers)]
    with AppliedPlan(make_plan(policy, blocks, len(blocks))):
        yield layers


@pytest.mark.parametrize("policy", ["every_layer", "block"])
def test_input_changed_in_place_after_the_block_raises(policy: str) -> None:
    with checkpointed(policy, torch.sin, torch.sin) as (first, _):
        x = torch.ones(3)
        output = first(x)
        x.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            output.sum().backward()


@pytest.mark.parametrize("policy", ["every_layer", "block"])
def test_output_changed_in_place_before_the_next_block_gives_the_same_gradient(policy: str) -> None:
    def gradient(first: Any, second: Any) -> Tensor:
        x = torch.ones(3, requires_grad=True)
        second(first(x).add_(1)).sum().backward()
        assert x.grad is not None
        return x.grad

    with checkpointed(policy, torch.sin, torch.sin) as layers:
        assert torch.equal(gradient(*layers), gradient(torch.sin, torch.sin))


def test_segment_with_other_shapes_in_the_recomputation_raises() -> None:
    sizes = iter([(2, 3), (4, 3)])
    with checkpointed("block", lambda x: x.expand(next(sizes)).sin(), torch.sin) as (first, _):
        output = first(torch.ones(3))
        with pytest.raises(RuntimeError, match="do not compute the same twice"):
            output.sum().backward()


def test_segment_is_freed_with_its_graph() -> None:
    """Without the garbage collector."""
    gc.disable()
    try:
        with checkpointed("block", torch.sin, torch.sin) as (first, second):
            hidden = first(torch.ones(3))
            output = second(hidden, hidden + 1)
            segment = first.forward.chain._open
            assert len(segment()) == 2
            del hidden, output
            assert segment() is None
    finally:
        gc.enable()
