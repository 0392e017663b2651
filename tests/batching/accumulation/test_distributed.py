"""Accumulation on two ranks whose batches differ: real processes over gloo."""

import copy
import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import LambdaCallback
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Partial, Replicate, distribute_tensor
from torch.utils.data import DataLoader

import lightning_opt as lo
from tests.batching.accumulation.test_accumulation import (
    TextNet,
    Texts,
    Windows,
    count_tokens,
    reference,
)
from tests.batching.nets import counting_ddp
from tests.helpers.models import shard, weights_of
from tests.helpers.processes import launch
from tests.helpers.trainers import quiet_trainer

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.filterwarnings("ignore:FSDP2-wrapped module"),
    pytest.mark.filterwarnings("ignore:.*. it was not possible to check"),
]

BATCHES = {0: [4, 4, 4, 1], 1: [2, 5, 3, 3]}  # samples of each rank's batches


class Sharded(TextNet):
    """Each rank has its own batches, of different sizes."""

    def __init__(self, per: str, sharded: bool) -> None:
        super().__init__(per)
        self.sharded = sharded

    def configure_model(self) -> None:
        if self.sharded:
            shard(self, self.layers[0], self.layers[2])

    def train_dataloader(self) -> Any:
        data, batches, begin = Texts(26), [], 13 * self.global_rank
        for size in BATCHES[self.global_rank]:
            ids = list(range(begin, begin + size))
            batches.append(
                {"id": torch.tensor(ids), **{k: v[ids] for k, v in data.fields().items()}}
            )
            begin += size
        return DataLoader(batches, batch_size=None)


def train(strategy: str, per: str, batches: int) -> tuple[dict[str, Tensor], Any, int]:
    reductions: list[int] = []
    totals = set[float]()
    sharded = strategy == "fsdp2"
    model, windows = Sharded(per, sharded), Windows()
    count = count_tokens if per == "tokens" else None
    accumulation = lo.Accumulation(batches, normalize=per, count=count)
    # Several ranks save neither the gradients of an open window nor their weight.
    saved = LambdaCallback(
        on_train_batch_end=lambda *_: totals.add(accumulation.state_dict()["total"])
    )
    trainer = quiet_trainer(
        devices=2,
        strategy=ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)
        if sharded
        else counting_ddp(reductions),
        callbacks=[accumulation, windows, saved],
        max_epochs=2,
    )
    trainer.fit(model)
    assert totals == {0.0}
    return weights_of(model), windows.steps, len(reductions)


def train_all(strategy: str) -> list[Any]:
    cases = [("samples", 1), ("samples", 3), ("tokens", 1), ("tokens", 3)]
    return [(case, train(strategy, *case)) for case in cases]


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_gradient_equals_the_window_over_all_ranks_in_float64(strategy):
    first, second = launch(train_all, strategy)
    for (case, (weights, steps, reductions)), (_, (same, others, _)) in zip(
        first, second, strict=True
    ):
        per, batches = case
        torch.testing.assert_close(weights, same, rtol=0.0, atol=0.0)
        whole = [[*own, *other] for own, other in zip(steps, others, strict=True)]
        expected = reference(TextNet(per), Texts(26), whole)
        torch.testing.assert_close(weights, expected, rtol=0.0, atol=1e-6, check_dtype=False)
        if strategy == "ddp":
            assert reductions == len(steps)  # once per window, by no_sync
        assert len(steps) == 2 * (4 if batches == 1 else 2)


def resume_a_pending_sum() -> Tensor:
    """Each rank has a summand of the gradient; the accumulator is replaced after each batch."""
    dist.init_process_group("gloo", rank=int(os.environ["RANK"]), world_size=2)
    mesh, module = init_device_mesh("cpu", (2,)), nn.Module()
    module.weight = nn.Parameter(distribute_tensor(torch.zeros(3), mesh, [Replicate()]))
    accumulator = lo.GradientAccumulator(module)
    for number in (1.0, 2.0):
        local = module.weight.to_local(grad_placements=[Partial()])
        accumulator.backward((local * number * (1 + dist.get_rank())).sum())
        state = accumulator.state_dict()
        module.zero_grad()
        accumulator = lo.GradientAccumulator(module)
        accumulator.load_state_dict(state)
    accumulator.average()
    return module.weight.grad.full_tensor()


def test_accumulator_resumes_a_sum_that_was_pending():
    for gradient in launch(resume_a_pending_sum):
        assert gradient.tolist() == [4.5] * 3  # (1 + 2) * (1 + 2) over two batches


def average_under_ddp(dtype: torch.dtype) -> list[list[Tensor]]:
    """Average batches of different sizes, and return the whole batch's gradients too."""
    dist.init_process_group("gloo", rank=int(os.environ["RANK"]), world_size=2)
    torch.manual_seed(0)
    rank, data = dist.get_rank(), torch.randn(9, 4)
    module = nn.Linear(4, 3)
    whole = copy.deepcopy(module).to(dtype).double()
    whole(data.to(dtype).double()).square().mean().backward()
    module = module.to(dtype)
    wrapped, accumulator = (
        nn.parallel.DistributedDataParallel(module),
        lo.GradientAccumulator(module),
    )
    for number, batch in enumerate([data[:2], data[2:7]] if rank == 0 else [data[7:8], data[8:]]):
        # Low-precision gradients are moved away after each batch, so DDP reduces every batch.
        once = number == 0 and dtype is torch.float32
        with wrapped.no_sync() if once else torch.enable_grad():
            loss = wrapped(batch.to(dtype)).float().square().mean()
            accumulator.backward(loss, weight=len(batch))
    assert accumulator.average() == 9.0
    gradients = [[p.grad.float() for p in each.parameters()] for each in (module, whole)]
    # The batch of a rank may count nothing.
    wrapped.zero_grad()
    loss = wrapped(data[:2].to(dtype)).float().square().mean()
    accumulator.backward(loss, weight=2 * (1 - rank))
    assert accumulator.average() == 2.0
    # A rank may have no batch.
    if rank == 0:
        accumulator.backward(module(data[:2].to(dtype)).float().square().mean(), weight=2)
    assert accumulator.average() == 2.0
    with pytest.raises(RuntimeError, match="nothing to average"):
        accumulator.average()
    return gradients


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_accumulator_weights_are_correct_across_ranks(dtype):
    for found, expected in launch(average_under_ddp, dtype):
        tolerance = 1e-6 if dtype is torch.float32 else 0.02
        torch.testing.assert_close(found, expected, rtol=0.0, atol=tolerance)
