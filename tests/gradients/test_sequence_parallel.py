"""Gradients whose sum over ranks is pending, as SequenceParallel leaves them in ``Parameter.grad``.

Clipping rules and GradientHealth have their own tests with the same model.
"""

from typing import Any

import pytest
from lightning.pytorch import Callback
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Subset

import lightning_opt as lo
from tests.gradients.clipping.test_distributed import FullTensors, ShardedNet
from tests.helpers.models import assert_same_weights, batches_of
from tests.helpers.processes import launch
from tests.helpers.trainers import quiet_trainer

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

BATCHES = 8
FAULTY = 3


class Poison(Callback):
    """Makes one element of one rank's summand of a LayerNorm's gradient infinite."""

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        if trainer.global_step == FAULTY and trainer.global_rank == 1:
            pl_module.layer[4].weight.grad.to_local()[0] = float("inf")


def fit(shard: str, *callbacks: Callback, leave_out: int | None = None) -> dict[str, Tensor]:
    strategy: Any = ModelParallelStrategy(1, 2) if shard else "auto"
    data: Dataset[Any] = batches_of(BATCHES)
    rows = [row for row in range(4 * BATCHES) if row // 4 != leave_out]
    final = FullTensors()
    trainer = quiet_trainer(
        strategy=strategy,
        devices=2 if shard else 1,
        callbacks=[*callbacks, final],
        limit_val_batches=0,
    )
    trainer.fit(ShardedNet(shard), DataLoader(Subset(data, rows), batch_size=4))
    return final.weights


def fit_all() -> dict[str, Any]:
    guard = lo.NonFiniteGuard("rollback", snapshot_every_n_steps=2)
    return {
        "guard": fit("sequence", Poison(), guard),
        "events": guard.events,
        "window": fit("sequence", lo.Accumulation(3)),
    }


def test_guard_skips_an_infinity_of_one_rank_and_a_short_window_equals_one_process() -> None:
    guarded, window = fit("", leave_out=FAULTY), fit("", lo.Accumulation(3))
    for rank in launch(fit_all):
        (event,) = rank["events"]
        assert event["kind"] == "nonfinite_gradient"
        assert event["parameters"] == ["layer.4.weight"]
        assert_same_weights(rank["guard"], guarded, atol=1e-6)
        assert_same_weights(rank["window"], window, atol=1e-6)
