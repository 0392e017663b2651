"""One bucket in two stages, without a model around it."""

import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_opt.strategies.compressors import Quantize, TopK
from lightning_opt.strategies.two_stage import TwoStageChannel
from tests.helpers.processes import launch
from tests.strategies.runs import dist_world

NUMEL = 4000


def _infinity_in(compressor: Any, place: int) -> None:
    """An infinity in whichever shard leaves nothing of the step, also of shards done before."""
    rank, world = int(os.environ["RANK"]), dist_world()
    dist.init_process_group("gloo", rank=rank, world_size=world)
    with ThreadPoolExecutor(1) as worker:
        generator = torch.Generator().manual_seed(rank)
        residual = torch.randn(NUMEL, generator=generator)
        before = residual.clone()
        channel = TwoStageChannel(compressor, residual, dist.group.WORLD, worker)
        gradient = torch.randn(NUMEL, generator=generator) * 10
        if rank == 1:
            gradient[place] = torch.inf
        mean = channel.start(gradient.clone()).wait()
        assert channel.flagged
        assert mean.isnan().all()
        torch.testing.assert_close(residual, before, rtol=0, atol=1e-4)

        # The next step is sound again, and what is sent and what is left are all of it.
        gradient[place] = 0.0
        mean = channel.start(gradient.clone()).wait()
        assert not channel.flagged
        channel.fold()
        total = before + gradient
        dist.all_reduce(total)
        left = residual.clone()
        dist.all_reduce(left)
        torch.testing.assert_close(mean * world + left, total, rtol=0, atol=1e-3)
        assert mean.abs().max() > 1


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("compressor", "place"), [(Quantize(8, block=128), NUMEL - 1), (TopK(0.1), 2000)]
)
def test_an_infinity_in_a_later_shard_leaves_no_trace(compressor, place):
    launch(_infinity_in, compressor, place, processes=3)
