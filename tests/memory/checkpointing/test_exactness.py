"""Nothing but memory and time may depend on checkpointing."""

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_opt.memory.checkpointing.activation_checkpointing import ActivationCheckpointing
from lightning_opt.memory.checkpointing.methods.restored_state import Surroundings, WrittenBuffers
from lightning_opt.memory.checkpointing.methods.segments import Segment
from tests.memory.architectures import ARCHITECTURES, Architecture
from tests.memory.runs import assert_identical, train

POLICIES: dict[str, dict[str, Any]] = {
    "every_layer": {},
    "sqrt": {},
    "block": {"interval": 3},
    "every_nth": {"interval": 2},
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
    # Nothing can be gained where every pass of a gradient penalty brings all back at once.
    assert callback.plan or (policy, name) == ("auto", "GradientPenalty")
    assert_identical(model, unchecked(name))


def test_segments_are_joined(monkeypatch: pytest.MonkeyPatch) -> None:
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
    assert lengths == [1, 2, 1, 2], "the dropout after the second block parts them"


@pytest.mark.parametrize("policy", ["every_layer", "block"])
def test_without_random_numbers_put_back_it_differs(
    policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shows that the comparison sees it."""
    monkeypatch.setattr(Surroundings, "restored", lambda self: torch.enable_grad())
    model = train("Transformer", ActivationCheckpointing(policy))
    with pytest.raises(AssertionError):
        assert_identical(model, unchecked("Transformer"))


@pytest.mark.parametrize("name", ["Residual", "SpectralNorm"])
def test_without_scratch_buffers_it_differs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(WrittenBuffers, "scratch", lambda self, values: torch.enable_grad())
    model = train(name, ActivationCheckpointing("every_layer"))
    with pytest.raises(AssertionError):
        assert_identical(model, unchecked(name))


def test_a_graph_can_be_walked_again() -> None:
    model = ARCHITECTURES["Transformer"]()
    batch = torch.randn(2, 8)[None]

    def gradients(loss: Tensor, times: int) -> list[Tensor]:
        for _ in range(times - 1):
            torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
        return list(torch.autograd.grad(loss, list(model.parameters())))

    def loss() -> Tensor:
        torch.manual_seed(3)
        return model.training_step(batch, 0)  # type: ignore[no-any-return]

    expected = gradients(loss(), 1)
    for policy in ("every_layer", "block", "sqrt"):
        callback = ActivationCheckpointing(policy)
        callback.on_fit_start(None, model)  # type: ignore[arg-type]
        try:
            torch.testing.assert_close(gradients(loss(), 3), expected, rtol=0, atol=0)
        finally:
            callback.release(None)


def run_in(segment: Segment, function: Any, args: tuple[Any, ...]) -> Any:
    return segment.run(function, function, args, {})


def test_an_input_changed_in_place_afterwards_is_noticed() -> None:
    segment = Segment()
    weight = torch.ones(3, requires_grad=True)
    x = torch.ones(3)
    output = run_in(segment, lambda value: (value * weight).sin(), (x,))
    x.add_(1)
    with pytest.raises(RuntimeError, match="changed in place after the block had run"):
        output.sum().backward()


def test_a_block_that_does_not_compute_the_same_twice_is_noticed() -> None:
    sizes = iter([3, 4])
    segment = Segment()
    weight = torch.ones((), requires_grad=True)
    output = run_in(segment, lambda x: (x * weight).expand(next(sizes)).sin(), (torch.ones(()),))
    with pytest.raises(RuntimeError, match="do not compute the same twice"):
        output.sum().backward()


def test_a_segment_leaves_no_cycle_behind() -> None:
    """What the graph holds must go with the graph, without the garbage collector."""
    import gc
    from weakref import ref

    gc.disable()
    try:
        segment = Segment()
        weight = torch.ones(3, requires_grad=True)
        hidden = run_in(segment, lambda value: (value * weight).sin(), (torch.ones(3),))
        between = hidden + 1
        output = run_in(segment, lambda value: (value * weight).sin(), (between,))
        watched = ref(segment)
        del segment, hidden, between, output
        assert watched() is None
    finally:
        gc.enable()
