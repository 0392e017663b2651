"""Rollback and the loss scaler's state: copies to the host and back."""

from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import lightning_opt as lo
from lightning_opt.kernels.fused_optimizer import fused_optimizer
from lightning_opt.precision.loss_scale.dynamic_loss_scale import CountingScaler
from tests.fake_cuda.test_callbacks import count_syncs
from tests.helpers.fake_cuda import (
    Answers,
    Copies,
    FakeNet,
    fake_gradients,
    fit_on_fake_cuda,
    on_fake_cuda,
)

pytestmark = pytest.mark.filterwarnings("ignore:User provided device_type of 'cuda'")


class Damage(Callback):
    """Makes the weights look damaged when the guard checks them after a batch."""

    def __init__(self, answers: Answers, batch: int, clears_state: bool) -> None:
        self.answers, self.batch, self.clears_state = answers, batch, clears_state

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.answers.truth = batch_idx != self.batch

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if self.clears_state and batch_idx == self.batch:
            trainer.optimizers[0].state.clear()


def places(optimizer: Any) -> list[tuple[str, str]]:
    return [
        (key, value.device.type)
        for state in optimizer.state.values()
        for key, value in state.items()
    ]


@pytest.mark.parametrize("clears_state", [False, True])
@pytest.mark.parametrize("scaled", [False, True])
def test_rollback_restores_weights_and_optimizer_state_on_the_device(scaled, clears_state):
    answers = Answers(number=0.0)
    damage = Damage(answers, batch=5, clears_state=clears_state)
    guard = lo.NonFiniteGuard("rollback", snapshot_every_n_steps=2)
    plugins = [lo.DynamicLossScale()] if scaled else []
    settings: dict[str, Any] = {"steps": 8, "answers": answers, "plugins": plugins}
    with Copies() as copies:
        trainer = fit_on_fake_cuda(damage, guard, **settings)
    assert [(event["step"], event["action"]) for event in guard.events] == [(6, "rollback")]
    assert copies.to_device
    plain = fit_on_fake_cuda(answers=Answers(0.0), steps=1).optimizers[0]
    assert places(trainer.optimizers[0]) == places(plain)
    assert {own.device.type for own in trainer.lightning_module.parameters()} == {"cuda"}


class StateReloader(Callback):
    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        plugin = trainer.precision_plugin
        self.state = plugin.state_dict()
        if batch_idx == 2:
            plugin.load_state_dict(self.state)


@pytest.mark.parametrize("lightning_clips", [False, True])
@pytest.mark.parametrize("window", [1, 2])
def test_loss_scaler_trains_and_reloads_its_state_from_the_host(lightning_clips, window):
    plugin, reloader = lo.DynamicLossScale(every_n_steps=2), StateReloader()
    clipping = [] if lightning_clips else [lo.AdaptiveClipping()]
    settings: dict[str, Any] = {"gradient_clip_val": 1.0} if lightning_clips else {}
    fit_on_fake_cuda(
        reloader, *clipping, plugins=[plugin], accumulate_grad_batches=window, **settings
    )
    assert isinstance(plugin.scaler.skipped, Tensor)
    assert plugin.scaler.skipped.device.type == "cuda"
    assert not any(isinstance(value, Tensor) for value in tree_leaves(reloader.state))


def test_host_waits_for_the_flags_of_a_device_before_adding_them():
    """The scale is on the device of the first loss, the weights may be on another."""
    scaler = CountingScaler("cuda", min_scale=1.0)
    model = on_fake_cuda(nn.Linear(3, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler.scale(torch.empty(()))
    fake_gradients(model)
    scaler.unscale_(optimizer)
    with Copies() as copies, Answers():
        scaler.update()
    assert [copy.waited for copy in copies.to_host] == [True]


@pytest.mark.parametrize("window", [1, 2])
def test_loss_scaler_adds_no_host_sync_between_reports(window):
    ours, torchs = (
        count_syncs(plugins=[plugin], accumulate_grad_batches=window)
        for plugin in (
            lo.DynamicLossScale(every_n_steps=1000),
            MixedPrecision("16-mixed", "cuda", torch.amp.GradScaler("cuda")),
        )
    )
    assert ours == torchs


class ForeachNet(FakeNet):
    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), foreach=True)


def test_step_counts_return_to_the_host_after_fused_updates(monkeypatch):
    monkeypatch.setattr(fused_optimizer, "obstacle_to_fused", lambda optimizer: None)
    fused = lo.FusedOptimizer()
    trainer = fit_on_fake_cuda(fused, net=ForeachNet(), answers=Answers(number=1.0), steps=2)
    assert fused.report().rows[0]["implementation"] == "fused"
    plain = fit_on_fake_cuda(net=ForeachNet(), answers=Answers(number=1.0), steps=2)
    assert places(trainer.optimizers[0]) == places(plain.optimizers[0])
    assert ("step", "cpu") in places(plain.optimizers[0])
