"""ChannelsLast: conversion, numerics, decision, checkpoints and undo."""

import pickle
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy
from torch import nn
from torch.nn.parameter import is_lazy

import lightning_opt as lo
from lightning_opt.kernels.channels_last.channels_last import Convolutions
from tests.helpers import trainers
from tests.helpers.footprint import model_footprint
from tests.helpers.models import SmallNet, assert_same_weights
from tests.helpers.trainers import SaveAt, quiet_trainer
from tests.kernels.convnets import STEPS, ConvNet


def fit(model: Any, *callbacks: Callback, **settings: Any) -> Any:
    torch.manual_seed(7)
    return trainers.fit(model, *callbacks, **settings)


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


class Pickles(Callback):
    def on_train_batch_end(self, trainer, *_):
        assert len(pickle.dumps(trainer.callbacks[0])) < 1000  # without weights


@pytest.mark.parametrize(
    ("ndim", "optimizer", "fused"),
    [(4, "Adam", False), (4, "SGD", True), (5, "SGD", False), (5, "Adam", True)],
)
def test_results_differ_only_by_rounding(ndim, optimizer, fused):
    model, expected = ConvNet(optimizer, ndim), ConvNet(optimizer, ndim)
    fused_optimizers = [lo.FusedOptimizer()] * fused
    fit(model, lo.ChannelsLast("always"), *fused_optimizers, Pickles(), max_epochs=3)
    fit(expected, max_epochs=3)
    assert_same_weights(model, expected, rtol=1e-3, atol=1e-5)


def test_gradients_and_optimizer_state_follow_the_weights(tmp_path):
    """A checkpoint within the run does not change the live state."""

    class Layouts(Callback):
        def on_before_optimizer_step(self, trainer, pl_module, optimizer):
            weight = pl_module.net[0].weight
            state = optimizer.state.get(weight, {})
            tensors = [weight.grad, *(t for t in state.values() if t.ndim == 4)]
            layouts.append([t.is_contiguous(memory_format=torch.channels_last) for t in tensors])

    layouts: list[list[bool]] = []
    callbacks = [lo.ChannelsLast("always"), Layouts(), SaveAt(tmp_path / "3.ckpt", 3)]
    trainer, plain = fit(ConvNet(), *callbacks), fit(ConvNet())
    assert layouts == [[True], *[[True] * 3] * (STEPS - 1)]
    (found,), (expected,) = trainer.optimizers, plain.optimizers  # the optimizer is restored
    for mine, theirs in zip(found.state.values(), expected.state.values(), strict=True):
        assert [v.stride() for v in mine.values()] == [v.stride() for v in theirs.values()]
    assert not found._optimizer_state_dict_post_hooks
    assert not found._optimizer_load_state_dict_post_hooks


@pytest.mark.parametrize("fail_at", [0, 2])
def test_layout_is_restored_after_an_exception(fail_at):
    model = ConvNet(fail_at=fail_at)
    before = model_footprint(model)
    with pytest.raises(ArithmeticError, match="planted"):
        fit(model, lo.ChannelsLast())
    assert model_footprint(model)["tensors"] == before["tensors"]
    for weight in model.parameters():
        assert weight.grad is None or weight.grad.is_contiguous()
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
    assert (layout.count, layout.others) == (4, 1)
    layout.convert()
    real = {name: p for name, p in model.named_parameters() if not is_lazy(p)}
    assert [n for n, p in real.items() if not p.is_contiguous()] == ["plane.weight", "space.weight"]
    layout.restore()
    assert all(p.is_contiguous() for p in real.values())


class Late(ConvNet):
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


def test_layers_that_ddp_wraps_when_they_are_created_stay_unchanged(monkeypatch):
    trainer, callback = quiet_trainer(), lo.ChannelsLast("always")
    monkeypatch.setattr(Trainer, "world_size", 2)
    callback.setup(trainer, Late(), "fit")
    assert "wrapped immediately" in callback.report().rows[0]["because"]


# --- decision -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("more", "channels_last"), [(2, True), (3, False)])
def test_auto_needs_convolutions_in_at_least_half_of_the_layers(more, channels_last):
    model, callback = ConvNet(), lo.ChannelsLast()
    model.more = nn.ModuleList(nn.Linear(1, 1) for _ in range(more))
    fit(model, callback)
    (row,) = callback.report().rows
    assert row["memory format"] == ("channels_last" if channels_last else "contiguous")
    assert row["because"].startswith("3 convolutions over two or three dimensions, ")
    assert all(entry[1] is channels_last for entry in model.seen)


def test_model_without_convolutions_is_unchanged():
    model, expected, callback = SmallNet(), SmallNet(), lo.ChannelsLast("always")
    fit(model, callback)
    fit(expected)
    assert_same_weights(model, expected)
    assert callback.report().rows[0]["memory format"] == "contiguous"


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


# --- checkpoints --------------------------------------------------------------------------------


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
    for state in torch.load(file, weights_only=True)["optimizer_states"][0]["state"].values():
        assert all(tensor.is_contiguous() for tensor in state.values())

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
