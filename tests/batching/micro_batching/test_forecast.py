"""Sizes that are planned where out-of-memory cannot be taken back."""

import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.utils.data import DataLoader

import lightning_opt as lo
from lightning_opt.batching import peaks
from lightning_opt.core.malloc import malloc_trim
from lightning_opt.core.memory import MB, Usage, process_memory, resident_memory
from tests.helpers.processes import launch
from tests.helpers.trainers import quiet_trainer

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.filterwarnings("ignore:Trying to infer the `batch_size`"),
]

WIDTH = 64


class Wide(LightningModule):
    """Activations of 1 MB for each row of a sample are nearly all of what a step takes.

    Args:
        counts: Samples and rows of each batch, the same on all ranks.
        sharded: Whether the parameters are, in the manner of FSDP2.
        failing: The batch, if any, in which rank 1 runs out of memory.
    """

    def __init__(
        self, counts: list[tuple[int, int]], sharded: bool = False, failing: int = -1
    ) -> None:
        super().__init__()
        self.counts, self.sharded, self.failing = counts, sharded, failing
        state = torch.get_rng_state()
        torch.manual_seed(1)
        self.layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1))
        torch.set_rng_state(state)
        self.ran: list[tuple[int, int]] = []  # flat: a trial of the first split takes back its own

    def configure_model(self) -> None:
        if self.sharded:
            from torch.distributed.fsdp import fully_shard

            for part in self.layers:
                fully_shard(part, mesh=self.device_mesh["data_parallel"])
            fully_shard(self, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.ran.append((batch_idx, len(batch)))
        hidden = self.layers[0](batch.flatten(0, 1))
        if batch_idx == self.failing and self.global_rank == 1:
            raise torch.OutOfMemoryError("planted")
        hidden = hidden.repeat(1, MB // (4 * WIDTH)).tanh()
        hidden = hidden.reshape(len(batch), -1, WIDTH).mean(dim=1)
        return self.layers[1](hidden).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)

    def train_dataloader(self) -> Any:
        generator = torch.Generator().manual_seed(self.global_rank)
        batches = [torch.randn(*count, WIDTH, generator=generator) for count in self.counts]
        return DataLoader(batches, batch_size=None)


def weights_of(model: LightningModule) -> dict[str, Tensor]:
    return {
        name: (value.full_tensor() if hasattr(value, "full_tensor") else value).detach().clone()
        for name, value in model.state_dict().items()
    }


def train(counts: list[tuple[int, int]], micro: Callback | None, sharded: bool) -> dict[str, Any]:
    """Train and return weights, sizes, and how much the process grew by meanwhile."""
    model = Wide(counts, sharded)
    settings: dict[str, Any] = {}
    if sharded:
        settings = {"devices": 2, "strategy": ModelParallelStrategy(2, 1)}
    trainer = quiet_trainer(callbacks=[] if micro is None else [micro], **settings)
    malloc_trim()
    before = resident_memory()
    Path("/proc/self/clear_refs").write_text("5")
    trainer.fit(model)
    peak = process_memory().peak or 0
    ran = [[size for idx, size in model.ran if idx == batch] for batch in range(len(counts))]
    return {"weights": weights_of(model), "ran": ran, "more": (peak - before) / MB}


def train_planned() -> list[Any]:
    counts = [(16, 3)] * 6
    whole = train(counts, None, True)
    malloc_trim()
    room = 0.75 * whole["more"]
    micro = lo.MicroBatching(budget_mb=resident_memory() / MB + room)
    run = train(counts, micro, True)
    again = lo.MicroBatching()
    again.load_state_dict(micro.state_dict())
    return [whole, run, room, train(counts[:1], again, True)["ran"], micro.events]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs /proc/self/clear_refs")
def test_sizes_grow_under_fsdp2_as_far_as_the_budget_lets_them():
    ranks = launch(train_planned)
    for whole, run, room, again, events in ranks:
        torch.testing.assert_close(run["weights"], whole["weights"], rtol=0.0, atol=1e-6)
        sizes = [max(batch) for batch in run["ran"]]
        assert [sum(batch) for batch in run["ran"]] == [16] * 6
        assert sizes[0] == 1
        assert 4 <= max(sizes) < 16
        assert run["more"] < room < whole["more"]
        assert max(again[0]) == max(sizes)  # what has passed is where the next run begins
        assert [event["size"] for event in events] == sorted({event["size"] for event in events})
    assert ranks[0][1]["ran"] == ranks[1][1]["ran"]


class Group:
    """A control group's limit, which this process alone counts against.

    Args:
        total: In bytes.
    """

    total = 0

    def __init__(self, device: torch.device, host: bool = True) -> None:
        pass

    def read(self) -> list[Usage]:
        return [Usage("cgroup", resident_memory(), Group.total), Usage("address space", 9, 10)]


def train_beside_a_limit(counts: list[tuple[int, int]]) -> list[Any]:
    whole = train(counts, None, False)
    malloc_trim()
    room = 0.8 * whole["more"]
    peaks.MemoryLimits = Group  # type: ignore[misc,assignment]
    Group.total = resident_memory() + int(room * MB)
    micro = lo.MicroBatching()
    run = train(counts, micro, False)
    return [whole, run, room, micro.state_dict()]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs /proc/self/clear_refs")
@pytest.mark.parametrize(
    "counts",
    [
        [(8, 2), (8, 2), (64, 2), (8, 2)],  # more samples than before
        [(8, 2), (8, 2), (8, 16), (8, 16), (8, 2)],  # longer ones
    ],
)
def test_batches_that_would_be_killed_are_split_before(counts):
    [(whole, run, room, state)] = launch(train_beside_a_limit, counts, processes=1)
    torch.testing.assert_close(run["weights"], whole["weights"], rtol=0.0, atol=1e-6)
    assert state["retries"] == 0
    assert [sum(batch) for batch in run["ran"]] == [samples for samples, _ in counts]
    for batch, (samples, rows) in zip(run["ran"], counts, strict=True):
        assert (len(batch) > 1) == (samples * rows > 16), run["ran"]
    assert run["more"] < room < whole["more"]


class Fewer(Wide):
    """Batches of rank 1 have fewer samples."""

    def train_dataloader(self) -> Any:
        self.counts = [(samples - 3 * self.global_rank, rows) for samples, rows in self.counts]
        return super().train_dataloader()


def train_in_windows() -> list[Any]:
    found = []
    for callbacks in ([], [lo.MicroBatching()]):
        model = Fewer([(8, 1)] * 6, sharded=True)
        strategy = ModelParallelStrategy(2, 1)
        quiet_trainer(
            devices=2, strategy=strategy, callbacks=callbacks, accumulate_grad_batches=3
        ).fit(model)
        found += [weights_of(model), [batch for batch, _ in model.ran]]
    return found


def test_ranks_under_fsdp2_take_as_many_micro_batches_while_they_accumulate():
    ranks = launch(train_in_windows)
    for expected, _, weights, _ in ranks:
        torch.testing.assert_close(weights, expected, rtol=0.0, atol=1e-6)
    assert ranks[0][3] == ranks[1][3]
    assert [ranks[0][3].count(batch) for batch in range(4)] == [5, 5, 5, 5]  # no state yet
    assert ranks[0][3].count(5) < 5


def run_out() -> tuple[str, float]:
    model = Wide([(4, 1)] * 4, sharded=True, failing=2)
    micro = lo.MicroBatching()
    trainer = quiet_trainer(devices=2, strategy=ModelParallelStrategy(2, 1), callbacks=[micro])
    start = time.monotonic()
    try:
        trainer.fit(model)
    except (MemoryError, RuntimeError) as error:
        end = f"{type(error).__name__}: {error}"
    else:
        end = "completed"
    seconds = time.monotonic() - start
    dist.destroy_process_group()  # as at the end of a process
    return end, seconds


def test_a_rank_that_runs_out_under_fsdp2_ends_all_with_one_error():
    for end, seconds in launch(run_out):
        assert end.startswith("MemoryError: Out of memory on a rank in the middle of a batch")
        assert "Rank 1: OutOfMemoryError: planted" in end
        assert seconds < 60
