"""ChannelsLast: conversion, numerics, decision, checkpoints and undo."""

from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy
from torch import nn
from torch.nn.parameter import is_lazy

import lightning_opt as lo
from lightning_opt.kernels.channels_last import channels_last as memory_format
from lightning_opt.kernels.channels_last.channels_last import Convolutions
from tests.helpers.footprint import model_footprint
from tests.helpers.models import SmallNet, assert_same_weights
from tests.helpers.trainers import SaveAt, quiet_trainer
from tests.kernels.convnets import STEPS, ConvNet

LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


def fit(model: Any, *callbacks: Callback, seed: int = 7, **settings: Any) -> Any:
    torch.manual_seed(seed)
    trainer = quiet_trainer(callbacks=list(callbacks), **settings)
    trainer.fit(model)
    return trainer


def force(monkeypatch: pytest.MonkeyPatch, channels_last: bool) -> list[bool]:
    """Fake the result of the measurement; return the format of each measured step."""
    ran: list[bool] = []

    class Timed(memory_format.TrialStep):
        def __init__(self, trainer: Any, pl_module: Any, *batch: Any) -> None:
            super().__init__(trainer, pl_module, *batch)
            self.weight = pl_module.net[0].weight

        def run(self, inside: Any = None) -> float:
            super().run(inside)
            ran.append(self.weight.is_contiguous(memory_format=LAST[self.weight.ndim]))
            return 1.0 if ran[-1] == channels_last else 2.0

    monkeypatch.setattr(memory_format, "TrialStep", Timed)
    return ran


# --- conversion ---------------------------------------------------------------------------------


@pytest.mark.parametrize("ndim", [4, 5])
def test_weights_and_images_are_converted_in_every_stage(ndim):
    model, callback = ConvNet(ndim=ndim), lo.ChannelsLast("always")
    before = model_footprint(model)
    trainer = quiet_trainer(callbacks=[callback])
    for run in (trainer.fit, trainer.validate, trainer.test, trainer.predict):
        run(model)
    stages = ["train"] * STEPS + ["validate"] * 2 + ["test", "predict"]
    assert model.seen == [(stage, True, True) for stage in stages]
    del model.seen[:]
    assert model_footprint(model)["tensors"] == before["tensors"]
    quiet_trainer().validate(model, verbose=False)
    assert model.seen == [("validate", False, False)]


@pytest.mark.parametrize("ndim", [4, 5])
@pytest.mark.parametrize("optimizer", ["Adam", "SGD"])
@pytest.mark.parametrize("fused", [False, True])
def test_results_differ_only_by_rounding(ndim, optimizer, fused):
    model, expected = ConvNet(optimizer, ndim), ConvNet(optimizer, ndim)
    fused_optimizers = [lo.FusedOptimizer()] * fused
    fit(model, lo.ChannelsLast("always"), *fused_optimizers, max_epochs=3)
    fit(expected, max_epochs=3)
    assert_same_weights(model, expected, rtol=1e-3, atol=1e-5)


def test_gradients_and_optimizer_state_follow_the_weights():
    class Layouts(Callback):
        def on_before_optimizer_step(self, trainer, pl_module, optimizer):
            weight = pl_module.net[0].weight
            state = optimizer.state.get(weight, {})
            tensors = [weight.grad, *(t for t in state.values() if t.ndim == 4)]
            layouts.append([t.is_contiguous(memory_format=torch.channels_last) for t in tensors])

    layouts: list[list[bool]] = []
    fit(ConvNet(), lo.ChannelsLast("always"), Layouts())
    assert layouts == [[True], *[[True] * 3] * (STEPS - 1)]


def test_optimizer_is_restored():
    trainer, plain = fit(ConvNet(), lo.ChannelsLast("always")), fit(ConvNet())
    (found,), (expected,) = trainer.optimizers, plain.optimizers
    for mine, theirs in zip(found.state.values(), expected.state.values(), strict=True):
        assert {k: v.stride() for k, v in mine.items()} == {
            k: v.stride() for k, v in theirs.items()
        }
    assert not found._optimizer_state_dict_post_hooks
    assert not found._optimizer_load_state_dict_post_hooks


@pytest.mark.parametrize("fail_at", [0, 2])
@pytest.mark.parametrize("policy", ["always", "auto"])
def test_layout_is_restored_after_an_exception(fail_at, policy, monkeypatch):
    force(monkeypatch, True)
    model = ConvNet(fail_at=fail_at)
    before = model_footprint(model)
    with pytest.raises(ArithmeticError, match="planted"):
        fit(model, lo.ChannelsLast(policy))
    assert model_footprint(model)["tensors"] == before["tensors"]
    (optimizer,) = model.trainer.optimizers
    for state in optimizer.state.values():
        assert all(value.is_contiguous() for value in state.values())


def test_only_weights_of_convolutions_are_converted():
    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.plane, self.space = nn.Conv2d(3, 4, 3), nn.ConvTranspose3d(2, 4, 3)
            self.bias = nn.Parameter(torch.ones(2, 3, 4, 5))
            self.line = nn.Conv1d(3, 4, 3)
            whole = torch.ones(2, 4, 3, 3, 3)
            self.part = nn.Conv2d(3, 4, 3)
            self.part.weight = nn.Parameter(whole[0])  # part of a larger memory block
            self.lazy = nn.LazyConv2d(3, 3)

    model = Mixed()
    layout = Convolutions(model)
    assert (layout.count, layout.others, layout.are_majority) == (4, 1, True)
    layout.convert()
    real = {name: p for name, p in model.named_parameters() if not is_lazy(p)}
    assert [n for n, p in real.items() if not p.is_contiguous()] == ["plane.weight", "space.weight"]
    layout.restore()
    assert all(p.is_contiguous() for p in real.values())


class Late(ConvNet):
    """Has its layers from `configure_model`."""

    def __init__(self):
        super().__init__()
        self.late, self.net = self.net, None

    def configure_model(self):
        if self.net is None:
            self.net = self.late


def test_layers_from_configure_model_are_converted():
    model, trainer = Late(), quiet_trainer(callbacks=[lo.ChannelsLast("always")])
    trainer.fit(model)
    trainer.test(model, verbose=False)
    assert set(model.seen) == {(stage, True, True) for stage in ("train", "validate", "test")}
    assert model.net[0].weight.is_contiguous()


# --- decision -----------------------------------------------------------------------------------


@pytest.mark.parametrize("channels_last", [False, True])
def test_auto_uses_the_format_that_is_faster_on_the_first_batch(channels_last, monkeypatch):
    ran = force(monkeypatch, channels_last)
    model, callback, expected = ConvNet(), lo.ChannelsLast(), ConvNet()
    fit(model, callback, max_epochs=2)
    fit(expected, max_epochs=2)
    assert ran == [False, True, True, False] * 2
    real = [entry for entry in model.seen if entry[0] == "train"][-2 * STEPS :]
    assert real == [("train", channels_last, channels_last)] * (2 * STEPS)
    (row,) = callback.report().rows
    assert row["memory format"] == ("channels_last" if channels_last else "contiguous")
    assert row["because"] == "a measurement on the first batch"
    assert {row["ms contiguous"], row["ms channels_last"]} == {1e3, 2e3}
    exact = {"rtol": 1e-3, "atol": 1e-5} if channels_last else {}
    assert_same_weights(model, expected, **exact)  # buffers of BatchNorm and draws of Dropout too


def test_small_gain_counts_as_noise(monkeypatch):
    class Timed(memory_format.TrialStep):
        def run(self, inside: Any = None) -> float:
            return next(times)

    times = iter([9.0, 9.0, 0.98, 1.0, 1.0, 0.98, 0.98, 1.0])  # the order rotates
    monkeypatch.setattr(memory_format, "TrialStep", Timed)
    callback = lo.ChannelsLast()
    fit(ConvNet(), callback)
    assert callback.report().rows[0]["memory format"] == "contiguous"


def test_layers_decide_if_memory_runs_out_while_measuring(monkeypatch):
    class Full(memory_format.TrialStep):
        def run(self, inside: Any = None) -> float:
            raise torch.OutOfMemoryError("planted")

    monkeypatch.setattr(memory_format, "TrialStep", Full)
    model, callback = ConvNet(), lo.ChannelsLast()
    fit(model, callback)
    assert "memory ran out" in callback.report().rows[0]["because"]
    assert model.seen[1] == ("train", True, True)


def test_other_errors_while_measuring_are_raised(monkeypatch):
    class Broken(memory_format.TrialStep):
        def run(self, inside: Any = None) -> float:
            raise RuntimeError("planted")

    monkeypatch.setattr(memory_format, "TrialStep", Broken)
    model = ConvNet()
    with pytest.raises(RuntimeError, match="planted"):
        fit(model, lo.ChannelsLast())
    assert model.net[0].weight.is_contiguous()


@pytest.mark.parametrize("reason", ["validate", "deterministic", "compile"])
def test_layers_decide_where_a_measurement_is_meaningless(reason, monkeypatch):
    ran = force(monkeypatch, False)
    callback, model = lo.ChannelsLast(), ConvNet()
    callbacks = [callback, *[lo.CompileModel(backend="eager")] * (reason == "compile")]
    trainer = quiet_trainer(callbacks=callbacks)
    if reason == "deterministic":
        monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    if reason == "validate":
        trainer.validate(model, verbose=False)
    else:
        trainer.fit(model)
    assert not ran
    (row,) = callback.report().rows
    assert row["memory format"] == "channels_last"
    assert row["because"].startswith("3 convolutions, 1 other layers that multiply (")
    assert all(entry[1:] == (True, True) for entry in model.seen)


def test_model_with_few_convolutions_stays_contiguous():
    model, callback = ConvNet(), lo.ChannelsLast("layers")
    model.more = nn.ModuleList(nn.Linear(1, 1) for _ in range(3))
    fit(model, callback)
    assert callback.report().rows[0]["memory format"] == "contiguous"
    assert all(entry[1] is False for entry in model.seen)


@pytest.mark.parametrize("policy", ["auto", "layers", "always"])
def test_model_without_convolutions_is_unchanged(policy):
    model, expected, callback = SmallNet(), SmallNet(), lo.ChannelsLast(policy)
    fit(model, callback)
    fit(expected)
    assert_same_weights(model, expected)
    assert callback.report().rows == [
        {
            "memory format": "contiguous",
            "because": "no convolutions over two or three dimensions",
        }
    ]


@pytest.mark.parametrize("strategy", [FSDPStrategy, ModelParallelStrategy])
def test_sharded_models_raise_or_stay_unchanged(strategy):
    model = ConvNet()
    trainer = quiet_trainer()
    trainer.strategy.__class__ = type("Pretends", (type(trainer.strategy), strategy), {})
    with pytest.raises(ValueError, match=r"ChannelsLast\('always'\) does not work with"):
        lo.ChannelsLast("always").setup(trainer, model, "fit")
    callback = lo.ChannelsLast()
    callback.setup(trainer, model, "fit")
    assert "lays out the weights itself" in callback.report().rows[0]["because"]
    assert model.net[0].weight.is_contiguous()


def test_invalid_policy_raises():
    with pytest.raises(ValueError, match="policy must be one of"):
        lo.ChannelsLast("on")


# --- checkpoints --------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["always", "auto"])
def test_checkpoints_hold_contiguous_state(policy, tmp_path, monkeypatch):
    force(monkeypatch, True)
    file = tmp_path / "saved.ckpt"
    fit(ConvNet(), lo.ChannelsLast(policy), SaveAt(file, STEPS))
    saved = torch.load(file, weights_only=True)
    tensors = []
    for state in saved["optimizer_states"][0]["state"].values():
        tensors += state.values()
    assert all(tensor.is_contiguous() for tensor in tensors)


@pytest.mark.parametrize("optimizer", ["Adam", "SGD"])
@pytest.mark.parametrize(("saved_with", "resumed_with"), [(1, 0), (0, 1), (1, 1)])
def test_run_resumes_with_and_without_the_callback(optimizer, saved_with, resumed_with, tmp_path):
    """With fused CPU kernels, which give wrong weights if the state has another layout."""
    file = tmp_path / "saved.ckpt"
    fit(
        ConvNet(optimizer),
        *[lo.ChannelsLast("always")] * saved_with,
        SaveAt(file, STEPS),
        max_epochs=2,
    )

    class Fused(Draws):
        """Switches to fused kernels without a check of layouts, like `fused=True`."""

        def on_train_start(self, trainer, pl_module):
            super().on_train_start(trainer, pl_module)
            (optimizer,) = trainer.optimizers
            for settings in (optimizer.defaults, *optimizer.param_groups):
                settings.update(fused=True, foreach=False)

    nets = [ConvNet(optimizer), ConvNet(optimizer)]
    tried = [*[lo.ChannelsLast("always")] * resumed_with, Fused()]
    for net, callbacks in zip(nets, (tried, [Draws()]), strict=True):
        quiet_trainer(callbacks=callbacks, max_epochs=2).fit(net, ckpt_path=file, weights_only=True)
    assert_same_weights(*nets, rtol=1e-3, atol=1e-5)


class Draws(Callback):
    """Sets the seed of a resumed run."""

    def on_train_start(self, trainer, pl_module):
        torch.manual_seed(3)
