"""Rounding and other random numbers are accepted; faults in learning are rejected."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from lightning_opt.tuner.numerics import compare_distances, compare_gradients, compare_losses

Step = dict[str, Tensor]


def gradients(seed: int = 0, drop: float = 0.0, masks: int = 0) -> list[Step]:
    """Return the first gradients of a net, with weights and batches from a seed."""
    torch.manual_seed(seed)
    net = nn.Sequential(
        nn.Linear(16, 64), nn.LayerNorm(64), nn.GELU(), nn.Dropout(drop), nn.Linear(64, 4)
    )
    found = []
    for step in range(4):
        inputs, classes = torch.randn(32, 16), torch.randint(4, (32,))
        with torch.random.fork_rng():
            torch.manual_seed(1000 * masks + step)
            loss = nn.functional.cross_entropy(net(inputs), classes)
        net.zero_grad()
        loss.backward()
        found.append({name: p.grad.clone().flatten() for name, p in net.named_parameters()})
    return found


def changed(steps: list[Step], change: Callable[[str, Tensor], Tensor]) -> list[Step]:
    return [{name: change(name, values) for name, values in step.items()} for step in steps]


def shuffled(values: Tensor) -> Tensor:
    """Return random values with the same norm."""
    return torch.randn_like(values) * values.norm() / math.sqrt(len(values))


PLANTED: dict[str, Callable[[str, Tensor], Tensor]] = {
    "flipped": lambda name, values: -values,
    "random": lambda name, values: shuffled(values),
    "one layer random": lambda name, values: shuffled(values) if name[0] == "0" else values,
    "one layer flipped": lambda name, values: -values if name[0] == "4" else values,
    "no gradient": lambda name, values: values * (name[0] != "1"),
    "too long": lambda name, values: values * 3,
    "too short": lambda name, values: values / 3,
}


@pytest.mark.parametrize("fault", PLANTED)
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("drop", [0.0, 0.3])
def test_planted_gradient_faults_are_rejected(fault: str, seed: int, drop: float) -> None:
    """Also if the candidate draws other random numbers, as compiled dropout does."""
    usual, noise = gradients(seed, drop), gradients(seed, drop, masks=1)
    wrong = changed(gradients(seed, drop, masks=2 if drop else 0), PLANTED[fault])
    assert "gradient" in compare_gradients(wrong, usual, noise)


@pytest.mark.parametrize("seed", range(4))
def test_noise_run_makes_other_random_numbers_acceptable(seed: int) -> None:
    usual, other = gradients(seed, 0.5), gradients(seed, 0.5, masks=2)
    noise = gradients(seed, 0.5, masks=1)
    assert compare_gradients(other, usual, noise) == ""
    assert compare_gradients(other, usual), "the gradients differ without noise"


def test_zero_gradient_is_compared_at_a_later_update() -> None:
    usual = gradients()
    usual[0]["0.weight"].zero_()
    usual[0]["0.bias"].zero_()
    assert compare_gradients(usual, usual) == ""
    wrong = changed(usual, PLANTED["one layer flipped"])
    wrong[1]["0.weight"] = -wrong[1]["0.weight"]
    assert "gradient of 4.weight" in compare_gradients(wrong, usual)
    wrong = [usual[0], changed(usual, PLANTED["flipped"])[1]]
    assert "gradient of 0.weight" in compare_gradients(wrong, usual)


def test_infinite_first_gradient_is_skipped() -> None:
    usual = gradients()
    first = changed(usual, lambda name, values: values * math.inf)[0]
    assert compare_gradients([first, *usual[1:]], usual) == ""
    assert compare_gradients([first, *changed(usual, PLANTED["flipped"])[1:]], usual)


class Cancelling(nn.Module):
    """Has two biases with zero gradient: of attention's keys, and before a normalisation."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(32, 32) for _ in range(3))
        self.conv, self.norm = nn.Conv1d(32, 32, 3, padding=1), nn.BatchNorm1d(32)
        self.head = nn.Linear(32, 4)

    def forward(self, inputs: Tensor) -> Tensor:
        scores = self.query(inputs) @ self.key(inputs).mT / math.sqrt(32)
        mixed = inputs + scores.softmax(-1) @ self.value(inputs)
        return self.head(self.norm(self.conv(mixed.mT)).relu().mean(-1))


@pytest.mark.parametrize("seed", range(4))
def test_cancelled_gradients_may_differ(seed: int) -> None:
    found = []
    for dtype in (None, torch.bfloat16):
        torch.manual_seed(seed)
        net = Cancelling()
        inputs, classes = torch.randn(16, 12, 32), torch.randint(4, (16,))
        with torch.autocast("cpu", dtype, enabled=dtype is not None):
            loss = nn.functional.cross_entropy(net(inputs), classes)
        loss.backward()
        found.append([{name: p.grad.flatten() for name, p in net.named_parameters()}])
    usual, rounded = found
    for name in ("key.bias", "conv.bias"):
        assert rounded[0][name].norm() > 100 * usual[0][name].norm(), "both are rounding errors"
    assert compare_gradients(rounded, usual) == ""
    for name in usual[0]:
        if name not in ("key.bias", "conv.bias"):
            wrong = [{**rounded[0], name: -rounded[0][name]}]
            assert f"gradient of {name} has another direction" in compare_gradients(wrong, usual)


def test_frozen_parameter_is_rejected_by_name() -> None:
    near = dict.fromkeys("abcdef", 1.0)
    reference = {2: {**near, "c": 0.0}, 4: near}
    assert compare_distances({2: {**near, "c": 0.0}, 4: near}, reference) == ""
    why = compare_distances({4: {**near, "b": 0.0}}, reference)
    assert why.endswith("has not changed b (1 in all), which the baseline trains")
    assert compare_distances({2: dict.fromkeys(near, 0.0)}, reference) == "", (
        "the loss scaler may have skipped all steps"
    )
    assert compare_distances({}, reference) == ""
    assert compare_distances({4: near}, {4: dict.fromkeys(near, 0.0)}) == "", (
        "the learning rate is still 0"
    )
    assert "b, c, d (5 in all)" in compare_distances({4: {"a": 1.0}}, reference)


def test_distances_that_differ_tenfold_are_rejected() -> None:
    """A tenth of the learning rate changes distances, not gradients."""
    reference = {8: {"a": 1.0, "b": 2.0}}
    assert compare_distances({8: {"a": 0.5, "b": 1.4}}, reference) == ""
    for factor in (0.1, 10.0):
        own = {8: {"a": factor, "b": 2 * factor}}
        assert f"moved {factor:g} times as far" in compare_distances(own, reference)


FALLING = [1 + 4 * math.exp(-0.1 * step) for step in range(30)]


def test_losses_may_differ_by_a_share_of_loss_or_progress() -> None:
    assert compare_losses(FALLING, FALLING) == ""
    assert compare_losses([1.01 * loss for loss in FALLING], FALLING) == ""
    late = [*FALLING[:20], *(loss + 0.9 for loss in FALLING[20:])]
    assert "differs by +0.9 in the last third of 30 steps" in compare_losses(late, FALLING)
    assert compare_losses([5.0] * 30, FALLING)
    assert compare_losses([], FALLING) == ""


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_nonfinite_loss_is_rejected(value: float) -> None:
    losses = [*FALLING[:7], value, *FALLING[8:]]
    assert compare_losses(losses, FALLING) == (
        f"its loss is {value} at step 7, the baseline's is finite"
    )
    assert compare_losses(losses, losses) == ""
    assert compare_losses(FALLING, losses) == "", "there is nothing to compare with"


def test_losses_may_differ_by_the_noise_of_random_numbers() -> None:
    """200 runs that differ only in random numbers, and a run with a fault."""
    torch.manual_seed(0)
    flat, verdicts = torch.full((9,), 2.0), []
    for _ in range(200):
        usual, noise, other = ((flat + 0.1 * torch.randn(9)).tolist() for _ in range(3))
        verdicts.append((compare_losses(other, usual), compare_losses(other, usual, noise)))
    without, with_noise = (sum(map(bool, whys)) for whys in zip(*verdicts, strict=True))
    assert without > 10
    assert with_noise <= 2
    assert compare_losses((flat + 0.6).tolist(), usual, noise)
