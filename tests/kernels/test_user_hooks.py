"""The hooks of the user's module and optimizer run with each feature."""

import functools
from collections import Counter
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader

import lightning_opt as lo
from tests.helpers.models import loader_of
from tests.helpers.trainers import quiet_trainer

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
    pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step"),
]

FEATURES = {
    "ChannelsLast": lambda: {"callbacks": [lo.ChannelsLast("always")]},
    "CompileModel": lambda: {"callbacks": [lo.CompileModel(backend="eager")]},
    "DataMonitor": lambda: {"callbacks": [lo.DataMonitor(every_n_steps=1)]},
    "DataPipelineTuner": lambda: {"callbacks": [lo.DataPipelineTuner(verbose=False)]},
    "DevicePrefetcher": lambda: {"callbacks": [lo.DevicePrefetcher()]},
    "DynamicLossScale": lambda: {"plugins": [lo.DynamicLossScale(256.0)]},
    "FusedOptimizer": lambda: {"callbacks": [lo.FusedOptimizer()]},
}
HOOKS = (
    "configure_gradient_clipping",
    "lr_scheduler_step",
    "on_after_batch_transfer",
    "on_before_batch_transfer",
    "on_before_optimizer_step",
    "optimizer_step",
    "optimizer_zero_grad",
    "transfer_batch_to_device",
)


class Hooked(LightningModule):
    """Has every hook that a feature might replace, and a hook on a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.called: Counter[str] = Counter()
        self.net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
        self.net.register_forward_hook(lambda *_: self.called.update(["forward"]))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return nn.functional.mse_loss(self.net(batch[0]).float(), batch[1])

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), foreach=True)
        optimizer.register_step_pre_hook(lambda *_: self.called.update(["pre_step"]))
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]

    def train_dataloader(self) -> DataLoader[Any]:
        return loader_of(3)


def counted(name: str) -> Any:
    def hook(self: Any, *args: Any, **kwargs: Any) -> Any:
        self.called[name] += 1
        return getattr(LightningModule, name)(self, *args, **kwargs)

    return hook


for _name in HOOKS:
    setattr(Hooked, _name, counted(_name))


def run(**ours: Any) -> Counter[str]:
    model = Hooked()
    trainer = quiet_trainer(limit_val_batches=0, **ours)
    trainer.fit(model)
    (group,) = trainer.optimizers[0].param_groups
    assert (group["foreach"], group["fused"]) == (True, None)
    return model.called


run_without_feature = functools.cache(run)


@pytest.mark.parametrize("feature", FEATURES)
def test_hooks_run_as_often_as_without_the_feature(feature):
    expected = run_without_feature()
    assert set(expected) == {*HOOKS, "forward", "pre_step"}
    found = run(**FEATURES[feature]())
    if feature == "DataPipelineTuner":  # it runs trial steps
        tried = found - expected
        assert set(tried) <= {"forward", "on_before_batch_transfer", "on_after_batch_transfer",
                              "transfer_batch_to_device"}  # fmt: skip
        found -= tried
    assert found == expected
