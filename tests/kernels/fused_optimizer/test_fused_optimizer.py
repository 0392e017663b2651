"""FusedOptimizer: which optimizers are switched, numerics, checkpoints and undo."""

import functools
import math
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer, RMSprop

import lightning_opt as lo
from lightning_opt.kernels.fused_optimizer.fused_optimizer import Fused, obstacle_to_fused
from tests.helpers import trainers
from tests.helpers.models import SmallNet, assert_same_weights, train_with_loss_scale
from tests.helpers.trainers import SaveAt, quiet_trainer, warnings_of

KINDS: dict[str, tuple[type[Optimizer], dict[str, Any]]] = {
    "Adam": (Adam, {"amsgrad": True, "weight_decay": 0.1}),
    "AdamW": (AdamW, {}),
    "SGD": (SGD, {}),
    "momentum": (SGD, {"lr": 1e-3, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    "maximize": (SGD, {"lr": 1e-4, "momentum": 0.9, "maximize": True}),
    "Adagrad": (Adagrad, {"lr_decay": 0.1}),
}
each_kind = pytest.mark.parametrize("kind", KINDS)


class Net(SmallNet):
    def __init__(self, kind: type[Optimizer] = Adam, **settings: Any) -> None:
        super().__init__()
        self.kind, self.settings = kind, {"lr": 0.02, **settings}

    def configure_optimizers(self) -> Optimizer:
        return self.kind(self.parameters(), **self.settings)


class Spy(Callback):
    def __init__(self) -> None:
        self.flags: list[tuple[Any, Any, Any]] = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        (optimizer,) = trainer.optimizers
        (group,) = optimizer.param_groups
        scaling = getattr(optimizer, "_step_supports_amp_scaling", False)
        self.flags.append((group.get("fused"), group.get("foreach"), scaling))


fit = functools.partial(trainers.fit, limit_val_batches=0)


@each_kind
def test_result_equals_the_optimizer_in_float64(kind):
    cls, settings = KINDS[kind]
    spy, callback = Spy(), lo.FusedOptimizer()
    model = Net(cls, **settings)
    fit(model, callback, spy, max_epochs=3)
    assert spy.flags == [(True, False, False)] * 36
    assert callback.report().rows[0]["implementation"] == "fused"

    exact = Net(cls, **settings)
    fit(exact, precision="64-true", max_epochs=3)
    assert_same_weights(model.double(), exact, rtol=1e-4, atol=1e-5)


@each_kind
def test_fused_and_plain_checkpoints_are_equal_and_both_resume(kind, tmp_path):
    cls, settings = KINDS[kind]
    files = tmp_path / "fused.ckpt", tmp_path / "plain.ckpt"
    runs = [
        fit(Net(cls, **settings), *callbacks, SaveAt(file, 5))
        for callbacks, file in zip(([lo.FusedOptimizer()], []), files, strict=True)
    ]
    (found,), (expected,) = runs[0].optimizers, runs[1].optimizers
    assert found.defaults == expected.defaults  # restored
    saved = [torch.load(file, weights_only=True)["optimizer_states"][0] for file in files]
    for one, other in (saved, (found.state_dict(), expected.state_dict())):
        assert one["param_groups"] == other["param_groups"]
        torch.testing.assert_close(one["state"], other["state"], rtol=1e-4, atol=1e-5)
    for file, tolerance in zip(files, ({}, {"rtol": 1e-4, "atol": 1e-5}), strict=True):
        resumed, spy = Net(cls, **settings), Spy()
        trainer = quiet_trainer(callbacks=[lo.FusedOptimizer(), spy], limit_val_batches=0)
        trainer.fit(resumed, ckpt_path=file, weights_only=True)
        assert spy.flags == [(True, False, False)] * 7
        assert_same_weights(resumed, runs[0].lightning_module, **tolerance)


def test_loaded_state_and_new_groups_are_switched_again():
    parameter = nn.Parameter(torch.ones(3))
    saved = Adam([parameter], foreach=False)
    parameter.grad = torch.ones(3)
    saved.step()
    state = saved.state_dict()

    optimizer = Adam([parameter])
    switch = Fused(optimizer)
    optimizer.load_state_dict(state)
    assert optimizer.param_groups[0]["fused"] is True
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
    assert optimizer.param_groups[1]["fused"] is True
    assert [group["fused"] for group in optimizer.state_dict()["param_groups"]] == [None, None]
    optimizer.step()
    switch.undo()
    assert optimizer.param_groups[0]["foreach"] is False  # from the checkpoint
    assert [group["fused"] for group in optimizer.param_groups] == [None, None]
    assert optimizer.defaults["fused"] is None


# --- layouts ------------------------------------------------------------------------------------


def steps_of(cls: type[Optimizer], changed: str, fused: bool, settings: dict[str, Any]) -> Tensor:
    """Return the weights after three steps in which gradients or state have another layout."""
    generator = torch.Generator().manual_seed(0)
    parameter = nn.Parameter(torch.randn(4, 3, 3, 2, generator=generator))
    optimizer = cls([parameter], **{"lr": 0.1, **settings})
    switch = None
    for step in range(3):
        parameter.grad = torch.randn(4, 3, 3, 2, generator=generator)
        if changed == "gradient":
            parameter.grad = parameter.grad.to(memory_format=torch.channels_last)
        if changed == "state" and step == 1:
            state = optimizer.state[parameter]
            for name, value in state.items():
                if isinstance(value, Tensor) and value.ndim == 4:
                    state[name] = value.to(memory_format=torch.channels_last)
        if fused and step == (1 if changed == "state" else 0):
            switch = Fused(optimizer)
        if switch is not None:
            assert switch.prepare_update() is None
        optimizer.step()
    return parameter.detach()


@each_kind
@pytest.mark.parametrize("changed", ["gradient", "state"])
def test_other_layouts_of_gradients_and_state_give_the_same_weights(kind, changed):
    cls, settings = KINDS[kind]
    expected = steps_of(cls, changed, False, settings)
    torch.testing.assert_close(steps_of(cls, changed, True, settings), expected)


def test_parameter_with_a_late_first_gradient_gets_the_same_update():
    weights = []
    for fused in (False, True):
        pair = [nn.Parameter(torch.ones(3)) for _ in range(2)]
        optimizer = SGD(pair, lr=0.1, momentum=0.9, weight_decay=0.1)
        switch = Fused(optimizer) if fused else None
        for step in range(3):
            for parameter in pair[: 1 + bool(step)]:
                parameter.grad = torch.arange(3.0) * (step + 1)
            assert switch is None or switch.prepare_update() is None
            optimizer.step()
        weights.append([parameter.detach() for parameter in pair])
    torch.testing.assert_close(*weights)


# --- choice of optimizers -----------------------------------------------------------------------


class Overridden(Adam):
    """A user's optimizer with its own update."""

    def step(self, closure=None):
        return super().step(closure)


class Inherited(AdamW):
    """A user's optimizer with the inherited update."""


class First(AdamW):
    """Its ``step`` is wrapped by torch, as it is in the first class that a process uses."""


AdamW([torch.ones(1)])  # wraps AdamW's own step
First.step = Optimizer.profile_hook_step(AdamW.step.__wrapped__)
First.step.hooked = True


def parameter(**settings: Any) -> nn.Parameter:
    return nn.Parameter(torch.ones(4, 4, **settings))


DAMPED = {"momentum": 0.9, "dampening": 0.1}
CHOICES = {
    "fused": (lambda: Adam([parameter()]), None),
    "derived": (lambda: Inherited([parameter()]), None),
    "first": (lambda: First([parameter()]), None),
    "double": (lambda: AdamW([parameter(dtype=torch.float64)]), None),
    "bfloat16": (lambda: SGD([parameter(dtype=torch.bfloat16)], lr=0.1), None),
    "foreach": (lambda: Adam([parameter()], foreach=True), None),
    "already": (lambda: Adam([parameter()], fused=True), "already fused"),
    "chosen": (lambda: Adam([parameter()], fused=False), "fused=False was chosen"),
    "overridden": (lambda: Overridden([parameter()]), "no fused Overridden"),
    "none": (lambda: RMSprop([parameter()]), "no fused RMSprop"),
    "dampening": (
        lambda: SGD([{"params": [parameter()]}, {"params": [parameter()], **DAMPED}]),
        "dampening",
    ),
    "differentiable": (lambda: Adam([parameter()], differentiable=True), "differentiable"),
    "complex": (lambda: Adam([parameter(dtype=torch.complex64)]), "on cpu in torch.complex64"),
    "gaps": (lambda: Adam([nn.Parameter(torch.ones(4, 4)[:, ::2])]), "view with gaps"),
    "device": (lambda: Adam([parameter(device="meta")]), "no fused Adam on meta in torch.float32"),
}


@pytest.mark.parametrize("case", CHOICES)
def test_optimizer_is_fused_or_the_obstacle_is_named(case):
    make, reason = CHOICES[case]
    found = obstacle_to_fused(make())
    assert found is None if reason is None else reason in found


class Sparse(Net):
    def __init__(self) -> None:
        super().__init__(SGD)
        self.embedding = nn.Embedding(8, 6, _weight=torch.ones(8, 6), sparse=True)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + self.embedding(torch.tensor([1, 1])).sum(0))


def test_sparse_gradients_restore_the_optimizer_with_a_warning():
    expected, model, callback = Sparse(), Sparse(), lo.FusedOptimizer()
    fit(expected)
    _, (message,) = warnings_of(lambda: fit(model, callback), "FusedOptimizer")
    assert "restored SGD: fused kernels do not support sparse gradients" in message
    assert_same_weights(model, expected)
    assert callback.report().rows[0]["reason"] == "sparse gradients"


# --- loss scaler --------------------------------------------------------------------------------

MAX_NORM = 0.5


@pytest.mark.parametrize("init_scale", [2.0**17, 2.0**8])  # the first one sometimes overflows
@pytest.mark.parametrize(
    ("cls", "clip"), [(SGD, "none"), (Adam, "none"), (Adam, "ours"), (SGD, "trainer")]
)
def test_result_under_a_loss_scaler_equals_torchs_recipe(cls, init_scale, clip):
    expected, spy, model = Net(cls), Spy(), Net(cls)
    train_with_loss_scale(expected, init_scale, math.inf if clip == "none" else MAX_NORM)
    callbacks = [lo.FusedOptimizer(), spy]
    callbacks += [lo.AdaptiveClipping(lo.FixedNorm(MAX_NORM))] * (clip == "ours")
    settings = {"gradient_clip_val": MAX_NORM} if clip == "trainer" else {}
    plugins = [trainers.loss_scaling(init_scale, growth_interval=4)]
    fit(model, *callbacks, plugins=plugins, **settings)
    assert spy.flags == [(True, False, False)] * 12
    assert_same_weights(model, expected, rtol=1e-4, atol=1e-5)
