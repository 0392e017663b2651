"""Micro-batches on several ranks: real processes over gloo."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.utils.data import DataLoader, Subset

import lightning_opt as lo
from tests.batching.nets import Hooks, Net, Samples
from tests.gradients.clipping.test_distributed import FSDPOnCPU
from tests.helpers.processes import launch
from tests.helpers.trainers import quiet_trainer

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.filterwarnings("ignore:Trying to infer the `batch_size`"),
    pytest.mark.filterwarnings("ignore:It is recommended to use `self.log"),
]


class Shared(Net):
    """Each rank has samples of its own, and perhaps fewer of them in its last batch.

    Args:
        counts: Samples of each rank.
        sharded: Whether the parameters are, in the manner of FSDP2.
    """

    def __init__(self, counts: tuple[int, int], sharded: bool = False) -> None:
        super().__init__()
        self.counts, self.sharded = counts, sharded

    def configure_model(self) -> None:
        if self.sharded:
            from torch.distributed.fsdp import fully_shard

            for part in (self.layers[0], self.layers[2]):
                fully_shard(part, mesh=self.device_mesh["data_parallel"])
            fully_shard(self, mesh=self.device_mesh["data_parallel"])

    def train_dataloader(self) -> Any:
        first = sum(self.counts[: self.global_rank])
        own = range(first, first + self.counts[self.global_rank])
        return DataLoader(Subset(Samples(sum(self.counts)), own), batch_size=8)


Result = tuple[dict[str, Tensor], list[str], list[float], int]


def train(size: int | None, counts: tuple[int, int], accumulate: int, strategy: str) -> Result:
    sharded = strategy == "fsdp2"
    model, hooks, reductions = Shared(counts, sharded), Hooks(), []
    callbacks = [hooks] if size is None else [hooks, lo.MicroBatching(size)]

    class Strategy(DDPStrategy):
        def configure_ddp(self) -> None:
            super().configure_ddp()

            def count(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
                reductions.append(1)
                return allreduce_hook(None, bucket)

            self.model.register_comm_hook(None, count)

    kinds: dict[str, Any] = {
        "ddp": Strategy,
        "fsdp1": lambda: FSDPOnCPU(use_orig_params=True),
        "fsdp2": lambda: ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1),
    }
    trainer = quiet_trainer(
        devices=2,
        strategy=kinds[strategy](),
        callbacks=callbacks,
        max_epochs=2,
        accumulate_grad_batches=accumulate,
    )
    trainer.fit(model)
    weights = {
        name: (value.full_tensor() if hasattr(value, "full_tensor") else value).detach().clone()
        for name, value in model.named_parameters()  # under FSDP1 this rank's shards
    }
    return weights, hooks.called, hooks.losses, len(reductions)


def train_all(strategy: str) -> list[tuple[Result, Result]]:
    cases = [
        (3, (20, 20), 1),
        (1, (20, 20), 3),
        # The last batches have 4 and 1, or 8 and 2 samples: no rank may wait for another.
        (3, (20, 17), 1),
        (2, (24, 18), 2),
    ]
    if strategy != "ddp":
        cases = cases[:3]
    return [
        (train(size, counts, accumulate, strategy), train(None, counts, accumulate, strategy))
        for size, counts, accumulate in cases
    ]


@pytest.mark.parametrize("strategy", ["ddp", "fsdp1", "fsdp2"])
def test_equals_whole_batches_on_two_ranks(strategy):
    for results in launch(train_all, strategy):
        for (weights, called, losses, reductions), expected in results:
            torch.testing.assert_close(weights, expected[0], rtol=0.0, atol=1e-6)
            assert called == expected[1]
            assert losses == pytest.approx(expected[2], rel=1e-5)
            assert reductions == expected[3]  # once a step, not once a micro-batch
