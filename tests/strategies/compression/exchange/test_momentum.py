"""Momentum before compression, against a simulation of the published algorithm and against SGD."""

import itertools
import warnings
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn

from lightning_opt.strategies.compression.codecs.compressors import Quantize, Threshold
from lightning_opt.strategies.compression.compressed_ddp import (
    CHECKPOINT_KEY,
    CompressedDDPStrategy,
)
from lightning_opt.strategies.compression.exchange.momentum import check_optimizers
from tests.helpers.models import SmallNet
from tests.helpers.processes import launch
from tests.strategies.runs import (
    SIZES,
    SMALL_BUCKETS,
    KeptResiduals,
    Ledger,
    dist_world,
    fit,
    gradient,
    same_on_all_ranks,
)

FACTOR = 0.875
WARMUP = 4
BOUND = 6.0


def with_momentum(compressor: Any = "topk", **settings: Any) -> KeptResiduals:
    settings = {
        "momentum_correction": FACTOR,
        "warmup_steps": WARMUP,
        "bucket_cap_mb": SMALL_BUCKETS,
        "fallback": "never",
        **settings,
    }
    return KeptResiduals(compressor, **settings)


def sgd(windows: list[list[int]], worlds: list[int]) -> list[Tensor]:
    """Where torch's SGD with momentum, in float64, takes the weights.

    Args:
        windows: For each optimizer step the batches in it.
        worlds: Number of ranks in each.
    """
    weights = [torch.zeros(numel, dtype=torch.float64) for numel in SIZES]
    optimizer = torch.optim.SGD(weights, lr=1.0, momentum=FACTOR)
    for window, world in zip(windows, worlds, strict=True):
        for weight in weights:
            parts = itertools.product(window, range(world))
            weight.grad = sum(gradient(*part, weight.numel()).double() / world for part in parts)
        optimizer.step()
    return weights


def assert_weights(model: Ledger, expected: list[Tensor], tolerance: float = 2e-4) -> None:
    for weight, want in zip(model.weights, expected, strict=True):
        torch.testing.assert_close(weight.detach().double(), want, rtol=0, atol=tolerance)
    assert same_on_all_ranks(model)


# --- uncompressed, it is SGD --------------------------------------------------------------------


def _dense(steps: int) -> None:
    world = dist_world()
    runs: list[tuple[dict[str, Any], int, dict[str, Any]]] = [
        ({}, 1, {}),
        ({"gradient_as_bucket_view": True}, 2, {"accumulate_grad_batches": 2}),
        ({"static_graph": True}, 1, {}),
    ]
    for settings, window, trainer in runs:
        model = Ledger(window=window)
        strategy = with_momentum(fallback="always", **settings)
        fit(model, strategy, range(steps), **trainer)
        windows = [list(range(start, start + window)) for start in range(0, steps, window)]
        assert_weights(model, sgd(windows, [world] * len(windows)))


@pytest.mark.distributed
@pytest.mark.parametrize("processes", [1, 2])
def test_uncompressed_steps_are_those_of_sgd_with_momentum(processes):
    launch(_dense, 12, processes=processes)


# --- compressed, it is the published algorithm --------------------------------------------------


def simulate(steps: range, world: int, left_out: int = -1) -> tuple[list[Tensor], list[Tensor]]:
    """Deep Gradient Compression with a hard threshold, one parameter after the other.

    Returns:
        The weights after the steps, and the mean over ranks of what is still owed.
    """
    weights, owed = [], []
    for numel in SIZES:
        weight = torch.zeros(numel)
        velocities, residuals = torch.zeros(world, numel), torch.zeros(world, numel)
        for number, step in enumerate(step for step in steps if step != left_out):
            gradients = torch.stack([gradient(step, rank, numel) for rank in range(world)])
            velocities = FACTOR * velocities + gradients
            if number < WARMUP:
                weight = weight - velocities.mean(0)
                continue
            residuals = residuals + velocities
            mask = residuals.abs() >= BOUND
            sent = torch.where(mask, residuals, 0.0).bfloat16().float()
            residuals, velocities = residuals - sent, torch.where(mask, 0.0, velocities)
            weight = weight - sent.mean(0)
        weights.append(weight)
        owed.append(residuals.mean(0))
    return weights, owed


def dgc(**settings: Any) -> KeptResiduals:
    return with_momentum(Threshold(BOUND, max_ratio=1.0, values="bf16"), **settings)


def assert_simulated(
    model: Ledger, strategy: KeptResiduals, simulated: tuple[list[Tensor], list[Tensor]]
) -> None:
    weights, owed = simulated
    assert_weights(model, [weight.double() for weight in weights])
    for index, rest in enumerate(owed):
        kept = strategy.kept[f"weights.{index}"]
        torch.testing.assert_close(kept, rest, rtol=0, atol=2e-4)
    assert max(rest.abs().max() for rest in owed) > 1


def _compressed() -> None:
    model, strategy = Ledger(), dgc()
    fit(model, strategy, range(25))
    assert_simulated(model, strategy, simulate(range(25), 2))


@pytest.mark.distributed
def test_compressed_steps_are_those_of_deep_gradient_compression():
    launch(_compressed)


def _overflow() -> None:
    for bucket_cap_mb, step in itertools.product((25, SMALL_BUCKETS), (12, 2)):
        bad = (step, 1, 3)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=7)
        model, strategy = Ledger(bad=bad), dgc(bucket_cap_mb=bucket_cap_mb)
        # A step that is left out counts as one of the warm-up.
        strategy.warmup_steps = WARMUP + (bad[0] < WARMUP)
        fit(model, strategy, range(25), scaler=scaler)
        assert scaler.get_scale() != 1024.0
        assert_simulated(model, strategy, simulate(range(25), 2, left_out=bad[0]))


@pytest.mark.distributed
def test_a_step_with_an_overflow_leaves_no_trace_in_any_velocity():
    launch(_overflow)


def _quantised(processes: int) -> None:
    model, strategy = Ledger(), with_momentum(Quantize(8))
    fit(model, strategy, range(20))
    expected = sgd([[step] for step in range(20)], [processes] * 20)
    rest = [strategy.kept[f"weights.{index}"].double() for index in range(len(SIZES))]
    assert_weights(model, [one + other for one, other in zip(expected, rest, strict=True)], 5e-4)
    assert max(one.abs().max() for one in rest) > 1e-3


@pytest.mark.distributed
@pytest.mark.parametrize("processes", [2, 3])
def test_where_everything_is_sent_nothing_is_masked(processes):
    launch(_quantised, processes, processes=processes)


# --- resume -------------------------------------------------------------------------------------


class SaveAtEnd(Callback):
    def __init__(self, path: str) -> None:
        self.path = path

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        trainer.save_checkpoint(self.path)


def _first_half(path: str) -> None:
    fit(Ledger(), with_momentum(Quantize(8)), range(10), callbacks=[SaveAtEnd(path)])


def _second_half(path: str) -> None:
    model, strategy = Ledger(), with_momentum(Quantize(8))
    # The second epoch's batches are numbered on from the first's.
    fit(model, strategy, range(10, 20), ckpt_path=path, max_epochs=2)
    expected = sgd([[step] for step in range(20)], [2] * 10 + [dist_world()] * 10)
    rest = [strategy.kept[f"weights.{index}"].double() for index in range(len(SIZES))]
    assert_weights(model, [one + other for one, other in zip(expected, rest, strict=True)], 1e-3)


@pytest.mark.distributed
@pytest.mark.parametrize("processes", [2, 3])
def test_a_resumed_run_goes_on_at_the_same_speed(tmp_path, processes):
    path = str(tmp_path / "half.ckpt")
    launch(_first_half, path)
    velocities = torch.load(path, weights_only=True)[CHECKPOINT_KEY]["velocities"]
    assert sorted(velocities) == [f"weights.{index}" for index in range(len(SIZES))]
    launch(_second_half, path, processes=processes)


def _other_half(path: str) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(Ledger(), with_momentum(), range(10, 12), ckpt_path=path, max_epochs=2)
    assert any("without momentum_correction" in str(warning.message) for warning in caught)


def _without(path: str) -> None:
    strategy = CompressedDDPStrategy("int8", fallback="never")
    fit(Ledger(), strategy, range(10), callbacks=[SaveAtEnd(path)])


@pytest.mark.distributed
def test_momentum_that_begins_in_mid_run_says_so(tmp_path):
    path = str(tmp_path / "half.ckpt")
    launch(_without, path, processes=1)
    launch(_without, path)
    launch(_other_half, path, processes=1)


# --- refusals -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        ({"momentum_correction": 1.0}, "below 1"),
        ({"momentum_correction": -0.1}, "momentum_correction"),
        ({"momentum_correction": "0.9"}, "momentum_correction"),
        ({"momentum_correction": 0.9, "error_feedback": False}, "error_feedback"),
        ({"momentum_correction": 0.9, "find_unused_parameters": True}, "find_unused_parameters"),
    ],
)
def test_bad_arguments_are_named(arguments, word):
    with pytest.raises(ValueError, match=word):
        CompressedDDPStrategy(**arguments)


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.SGD(p, momentum=0.9),
        lambda p: torch.optim.SGD(p, momentum=0.9, nesterov=True),
        lambda p: torch.optim.RMSprop(p, momentum=0.5),
        lambda p: torch.optim.AdamW(p),
        lambda p: torch.optim.SGD([{"params": p[:1]}, {"params": p[1:], "momentum": 0.1}]),
    ],
)
def test_momentum_is_not_applied_twice(make):
    parameters = [nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(3))]
    with pytest.raises(ValueError, match=r"SGD with momentum=0.*momentum_correction"):
        check_optimizers([make(parameters)])
    plain = torch.optim.SGD(parameters)
    check_optimizers([plain])
    with pytest.raises(ValueError, match="one optimizer, but there are 2"):
        check_optimizers([plain, plain])


class Momentous(SmallNet):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class Sparse(SmallNet):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(4, 4, sparse=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def _refused() -> None:
    for model, word in ((Momentous(), "would apply it twice"), (Sparse(), "sparse gradients")):
        with pytest.raises(ValueError, match=word):
            fit(model, with_momentum(), max_steps=1)


@pytest.mark.distributed
def test_a_model_that_does_not_suit_is_refused_before_the_first_step():
    launch(_refused, processes=1)
