"""The user's globals, environment variables and hooks survive each feature."""

import gc
from collections import Counter
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader

import lightning_opt as lo
from tests.helpers.footprint import process_footprint
from tests.helpers.models import loader_of
from tests.helpers.trainers import quiet_trainer

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
    pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step"),
]

FEATURES = {
    "AttentionBackend": lambda: {"callbacks": [lo.AttentionBackend()]},
    "ChannelsLast": lambda: {"callbacks": [lo.ChannelsLast("always")]},
    "CompileModel": lambda: {"callbacks": [lo.CompileModel(backend="eager")]},
    "DataMonitor": lambda: {"callbacks": [lo.DataMonitor(every_n_steps=1)]},
    "DataPipelineTuner": lambda: {"callbacks": [lo.DataPipelineTuner(verbose=False)]},
    "DevicePrefetcher": lambda: {"callbacks": [lo.DevicePrefetcher()]},
    "DynamicLossScale": lambda: {"plugins": [lo.DynamicLossScale(256.0)]},
    "FusedOptimizer": lambda: {"callbacks": [lo.FusedOptimizer()]},
    "Runtime": lambda: {"callbacks": [lo.Runtime(deterministic=True, threads=1)]},
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


def settings() -> dict[str, Any]:
    """Return the settings of this process."""
    import torch._dynamo.config as dynamo_config
    import torch._functorch.config as functorch_config

    return {
        **process_footprint(),
        "dynamo": dynamo_config.get_config_copy(),
        "functorch": functorch_config.get_config_copy(),
    }


@pytest.fixture
def _unusual(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Change every setting from torch's default."""
    import torch._dynamo.config as dynamo_config

    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":0:0")
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:64")
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    matmul, collected = torch.get_float32_matmul_precision(), gc.get_threshold()
    with dynamo_config.patch(optimize_ddp=False, cache_size_limit=5):
        torch.set_float32_matmul_precision("medium")
        torch.set_deterministic_debug_mode("warn")
        gc.set_threshold(701, 11, 12)
        yield
    gc.set_threshold(*collected)
    torch.set_deterministic_debug_mode("default")
    torch.set_float32_matmul_precision(matmul)


def run(**ours: Any) -> Counter[str]:
    model = Hooked()
    trainer = quiet_trainer(limit_val_batches=0, **ours)
    trainer.fit(model)
    (optimizer,) = trainer.optimizers
    assert (optimizer.param_groups[0]["foreach"], optimizer.param_groups[0]["fused"]) == (
        True,
        None,
    )
    return model.called


@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.usefixtures("_unusual")
def test_settings_are_restored_and_hooks_run(feature):
    expected = run()
    assert set(expected) == {*HOOKS, "forward", "pre_step"}
    before = settings()
    found = run(**FEATURES[feature]())
    after = settings()
    assert {name for name in before if before[name] != after[name]} == set()
    if feature == "DataPipelineTuner":  # it runs trial steps
        tried = found - expected
        assert set(tried) <= {"forward", "on_before_batch_transfer", "on_after_batch_transfer",
                              "transfer_batch_to_device"}  # fmt: skip
        found -= tried
    assert found == expected
