"""On a GPU the callbacks never wait between reports, by torch's sync debug mode."""

from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from torch.utils.data import DataLoader

import lightning_opt as lo
from benchmarks.models import Regression
from tests.helpers.trainers import quiet_trainer

NEVER = 10**9
HOOKS = (
    "on_train_batch_start",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "on_train_batch_end",
)


class SetSyncMode(Callback):
    """Sets torch's sync debug mode in each hook, from the third step on."""

    def __init__(self, mode: str) -> None:
        self.mode, self.calls = mode, 0

        def hook(trainer: Any, *_: Any) -> None:
            if trainer.global_step >= 3:
                self.calls += 1
                torch.cuda.set_sync_debug_mode(self.mode)

        for name in HOOKS:
            setattr(self, name, hook)


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "16-mixed"])
def test_callbacks_do_not_wait_between_reports(precision):
    network = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(4)])
    module = Regression(network, torch.zeros(1), fused=True)
    strict, lenient = SetSyncMode("error"), SetSyncMode("default")
    callbacks = [
        strict,
        lo.GradientHealth(every_n_steps=NEVER),
        lo.NonFiniteGuard(every_n_steps=NEVER),
        lo.AdaptiveClipping(every_n_steps=NEVER),
        lenient,
    ]
    trainer = quiet_trainer(
        accelerator="gpu", devices=1, precision=precision, callbacks=callbacks, max_steps=8
    )
    try:
        trainer.fit(module, DataLoader(torch.randn(256, 64), batch_size=32))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert strict.calls == lenient.calls >= 20
