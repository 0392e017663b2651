"""ChannelsLast and FusedOptimizer in several processes."""

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from torch import Tensor

import lightning_opt as lo
from tests.helpers.models import SmallNet, assert_same_weights, shard, weights_of
from tests.helpers.processes import launch
from tests.helpers.trainers import quiet_trainer
from tests.kernels.convnets import STEPS, ConvNet

pytestmark = pytest.mark.distributed

CALLBACKS = {
    "plain": list,
    "both": lambda: [lo.FusedOptimizer(), lo.ChannelsLast("always")],
}


def under_ddp() -> dict[str, tuple[dict[str, Tensor], list[Any], list[Any]]]:
    """Warnings are errors: DDP warns of gradients with another layout than its buckets."""
    results = {}
    for name, make in CALLBACKS.items():
        torch.manual_seed(7)
        model, callbacks = ConvNet(), make()
        strategy = DDPStrategy(gradient_as_bucket_view=name == "both")
        quiet_trainer(callbacks=callbacks, strategy=strategy, devices=2, max_epochs=2).fit(model)
        rows = [row for callback in callbacks for row in callback.report().rows]
        results[name] = (weights_of(model), model.seen, rows)
    return results


def test_ddp_trains_equal_weights_on_all_ranks():
    ranks = launch(under_ddp)
    plain = ranks[0]["plain"][0]
    for results in ranks:
        for name, (weights, seen, rows) in results.items():
            assert_same_weights(weights, plain, rtol=1e-3, atol=1e-5)
            learned = {key: value for key, value in weights.items() if "running" not in key}
            others = ranks[0][name][0]
            assert_same_weights(learned, {key: others[key] for key in learned})
            last = name == "both"
            assert seen == ([("train", last, last)] * STEPS + [("validate", last, last)]) * 2
            assert [row["implementation"] for row in rows[:1]] == ["fused"] * last


class Sharded(SmallNet):
    def __init__(self) -> None:
        super().__init__("AdamW")

    def configure_model(self) -> None:
        if self.device_mesh is not None:
            shard(self, *self.layer)


class Flags(Callback):
    def __init__(self, file: Path) -> None:
        self.file, self.flags = file, []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.flags.append(trainer.optimizers[0].param_groups[0]["fused"])
        if batch_idx == 5:
            trainer.save_checkpoint(self.file)


def under_fsdp2(folder: Path) -> dict[str, dict[str, Tensor]]:
    found = {}
    for name, callbacks in (("plain", []), ("fused", [lo.FusedOptimizer()])):
        model, spy = Sharded(), Flags(folder / f"{name}.ckpt")
        trainer = quiet_trainer(
            callbacks=[*callbacks, spy],
            strategy=ModelParallelStrategy(2, 1, save_distributed_checkpoint=False),
            devices=2,
            limit_val_batches=0,
        )
        trainer.fit(model)
        assert spy.flags == [True if callbacks else None] * 12
        found[name] = {key: value.full_tensor() for key, value in model.state_dict().items()}
    return found


@pytest.mark.slow
def test_fsdp2_trains_like_a_single_process(tmp_path):
    single = SmallNet("AdamW")
    quiet_trainer(limit_val_batches=0).fit(single)
    for found in launch(under_fsdp2, tmp_path):
        for weights in found.values():
            assert_same_weights(weights, single, rtol=1e-4, atol=1e-6)
    plain, fused = (
        torch.load(tmp_path / f"{name}.ckpt", weights_only=True) for name in ("plain", "fused")
    )
    assert (
        fused["optimizer_states"][0]["param_groups"] == plain["optimizer_states"][0]["param_groups"]
    )
