"""Learned sizes batch by batch, and planned sizes under FSDP2."""

import sys
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
from lightning_opt.batching.micro_batching.sizes import LearnedSizes, MeasuredPeak, PlannedSizes
from lightning_opt.core.measure.exhaustion import recover_memory
from lightning_opt.core.measure.memory import MB, PeakMeter, Usage, malloc_trim, resident_memory
from tests.helpers.models import shard, weights_of
from tests.helpers.processes import launch
from tests.helpers.trainers import quiet_trainer

pytestmark = [
    pytest.mark.filterwarnings("ignore:Trying to infer the `batch_size`"),
    pytest.mark.filterwarnings("ignore:.*. it was not possible to check"),
]

WIDTH = 64


class Wide(LightningModule):
    """Uses 1 MB of activations per row of a sample, and little else.

    Args:
        counts: Samples and rows of each batch, the same on all ranks.
        failing: The batch, if any, in which rank 1 runs out of memory.
    """

    def __init__(self, counts: list[tuple[int, int]], failing: int = -1) -> None:
        super().__init__()
        self.counts, self.failing = counts, failing
        torch.manual_seed(1)
        self.layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1))
        self.ran: list[tuple[int, int]] = []  # batch and samples

    def configure_model(self) -> None:
        shard(self, *self.layers)

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


class Group:
    """A limit against which only this process counts."""

    total = 0

    def __init__(self, device: torch.device, host: bool = True) -> None:
        pass

    def read(self) -> list[Usage]:
        return [Usage("cgroup", resident_memory(), Group.total)]


def train(counts: list[tuple[int, int]], micro: Callback | None) -> dict[str, Any]:
    """Train and return weights, sizes, and the growth of the process in MB."""
    model = Wide(counts)
    trainer = quiet_trainer(
        callbacks=[] if micro is None else [micro],
        devices=2,
        strategy=ModelParallelStrategy(2, 1),
        accumulate_grad_batches=2,
    )
    malloc_trim()
    before, meter = resident_memory(), PeakMeter(torch.device("cpu"))
    trainer.fit(model)
    ran = [[size for idx, size in model.ran if idx == batch] for batch in range(len(counts))]
    return {"weights": weights_of(model), "ran": ran, "more": (meter.read() - before) / MB}


def train_planned() -> dict[str, Any]:
    counts = [(16, 3)] * 8
    recover_memory(torch.device("cpu"))  # blocks apart: peaks are exact, without fragments
    whole = train(counts, None)
    malloc_trim()
    room = 0.75 * whole["more"]
    peaks.MemoryLimits = Group  # type: ignore[misc,assignment]
    Group.total = resident_memory() + int(room * MB)
    micro = lo.MicroBatching()
    return {"whole": whole, "run": train(counts, micro), "room": room, "events": micro.events}


def run_out() -> str:
    model = Wide([(4, 1)] * 4, failing=2)
    micro = lo.MicroBatching()
    trainer = quiet_trainer(devices=2, strategy=ModelParallelStrategy(2, 1), callbacks=[micro])
    try:
        trainer.fit(model)
    except (MemoryError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    finally:
        dist.destroy_process_group()  # as at the end of a process
    return "completed"


def train_all() -> tuple[dict[str, Any], str]:
    return train_planned(), run_out()


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs /proc/self/clear_refs")
def test_planned_sizes_stay_within_the_limit_under_fsdp2():
    ranks = launch(train_all)
    for planned, _ in ranks:
        # Sizes grow up to the limit.
        whole, run = planned["whole"], planned["run"]
        torch.testing.assert_close(run["weights"], whole["weights"], rtol=0.0, atol=1e-6)
        sizes = [max(batch) for batch in run["ran"]]
        assert [sum(batch) for batch in run["ran"]] == [16] * 8
        assert sizes[:3] == [1, 1, 1]  # no optimizer state before the first update
        assert 4 <= max(sizes) < 16
        assert run["more"] < planned["room"] < whole["more"]
        grown = [event["size"] for event in planned["events"]]
        assert grown == sorted(set(grown))
    assert ranks[0][0]["run"]["ran"] == ranks[1][0]["run"]["ran"]
    # A rank that runs out of memory ends the run on all ranks.
    assert "RuntimeError" in ranks[0][1]
    assert ranks[1][1].startswith("MemoryError: Out of memory on a rank in the middle of a batch")
    assert "planted" in ranks[1][1]


@pytest.mark.parametrize(
    ("peak", "elements", "size"),
    [
        (0.2, 10, 8),  # the largest growth at once
        (0.5, 10, 7),
        (0.85, 10, 4),  # room for less than one sample more
        (0.9999, 10, 3),  # beyond the target: it shrinks
        (0.5, 5, 7),  # shorter samples count as much
        (0.5, 20, 1),  # twice as long: four times the memory
        (0.1, 10, 8),  # no memory used
    ],
)
def test_planned_size_follows_the_measured_memory_per_sample(peak, elements, size):
    assert MeasuredPeak("float32[n]", 10, 4, peak, baseline=0.1).largest_size(elements) == size


def test_planned_sizes_begin_with_those_of_a_checkpoint():
    sizes = LearnedSizes(5)
    sizes.record_failure(0, "float32[n]", 10, samples=64, failed=64)
    resumed = LearnedSizes(5)
    resumed.load_state_dict(sizes.state_dict())
    planned = PlannedSizes(resumed, torch.device("cpu"), remeasure_every=50, first_step=0)
    assert planned.size_for("float32[n]", 10) == 32
    assert planned.size_for("int64[n]", 10) == 1
