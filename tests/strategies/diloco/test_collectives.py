"""Between synchronizations no replica waits for another, with any callbacks."""

import os
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist
from lightning.pytorch import Callback
from lightning.pytorch import callbacks as lightnings

import lightning_opt as lo
from tests.helpers.processes import launch
from tests.strategies.diloco.test_replicas import STEPS, Net
from tests.strategies.runs import fit, same_on_all_ranks

pytestmark = pytest.mark.distributed

WINDOW = 4


class Collectives(Callback):
    """Counts, per step, the collectives of groups that reach beyond this machine.

    Each process group counts its own collectives, including those of DDP's C++ reducer. The first
    replica begins when the second is about to synchronize.
    """

    def __init__(self, processes: int = 1) -> None:
        self.processes = processes
        self.counts: list[int] = []
        self.start = 0

    def now(self) -> int:
        groups = dist.distributed_c10d._world.pg_map
        machines = [{r // self.processes for r in dist.get_process_group_ranks(g)} for g in groups]
        numbers = [group._get_sequence_number_for_group() for group in groups]
        return sum(n for n, of in zip(numbers, machines, strict=True) if len(of) > 1)

    def on_train_batch_start(self, *_: Any) -> None:
        if not self.counts:
            self.start = self.now()
            if dist.get_rank() < self.processes:
                store_of_all().wait(["ahead"], timedelta(days=1))

    def on_train_batch_end(self, *_: Any) -> None:
        self.counts.append(self.now() - self.start - sum(self.counts))
        if len(self.counts) == WINDOW - 1 and dist.get_rank() >= self.processes:
            store_of_all().set("ahead", "")


def store_of_all() -> dist.Store:
    return dist.distributed_c10d._get_default_store()


def usual_callbacks() -> list[Callback]:
    """Return callbacks that act at every step, or often, and communicate under DDP."""
    return [
        lo.NonFiniteGuard("rollback", snapshot_every_n_steps=3, every_n_steps=2),
        lo.AdaptiveClipping(),
        lo.GradientHealth(every_n_steps=2),
        lo.MemoryCleanup(every_n_steps=1),
        lo.Accumulation(normalize="samples"),
        lo.CurvatureMonitor(every_n_steps=3, max_iterations=2, n_samples=2),
        lo.MicroBatching(size="auto"),
        lo.PerformanceMonitor(),
        lo.DataMonitor(),
        lightnings.EMAWeightAveraging(),
    ]


def _count(processes: int) -> list[int]:
    if processes > 1:
        rank = int(os.environ["RANK"])
        os.environ.update(
            NODE_RANK=str(rank // processes),
            LOCAL_RANK=str(rank % processes),
            LOCAL_WORLD_SIZE=str(processes),
        )
    counts, model = Collectives(processes), Net(optimizer="AdamW")
    fit(
        model,
        lo.DiLoCoStrategy(WINDOW),
        callbacks=[counts, *usual_callbacks()],
        num_nodes=2 if processes > 1 else 1,
        log_every_n_steps=1,
    )
    assert same_on_all_ranks(model)
    return counts.counts


@pytest.mark.parametrize("processes", [1, 2])
def test_only_synchronizations_launch_collectives(processes):
    counts = launch(_count, processes, processes=2 * processes)
    assert counts[0] == [0, 0, 0, 4] * (STEPS // WINDOW)  # two stages, each sends and receives
    # The first process of a machine sends for all.
    assert counts[1] == (counts[0] if processes == 1 else [0] * STEPS)
