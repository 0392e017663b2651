"""The exchanges of one bucket, without a model."""

import itertools
import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_opt.strategies.compression import exchange as exchange_module
from lightning_opt.strategies.compression.exchange import (
    Exchange,
    GatherExchange,
    Residual,
    TwoStageExchange,
)
from lightning_opt.strategies.compressors import Quantize
from tests.helpers.processes import launch
from tests.strategies.runs import KeptResiduals, Ledger, dist_world, fit


def _make(compressor: Any, residual: Residual, worker: ThreadPoolExecutor) -> Exchange:
    """Return the exchange of this compressor at this number of ranks."""
    if dist_world() == 2:
        return GatherExchange(compressor, residual)
    return TwoStageExchange(compressor, residual, dist.group.WORLD, worker)


def _exchange_steps(compressor: Any, numel: int, worker: ThreadPoolExecutor) -> None:
    """Exchange five steps, one with a NaN on a rank and one not applied."""
    residual = Residual(torch.zeros(numel))
    exchange = _make(compressor, residual, worker)
    account = torch.zeros(numel, dtype=torch.float64)
    for step in range(5):
        generator = torch.Generator().manual_seed(7 * dist.get_rank() + step)
        gradient = torch.randn(numel, generator=generator)
        is_bad = step == 2 and numel > 0
        if is_bad and dist.get_rank() == 1:
            gradient[-1] = torch.nan
        torch.add(residual.committed, gradient, alpha=0.5, out=residual.pending)
        mean = exchange.start(gradient.clone(), 2.0).wait()
        assert exchange.skipped == is_bad
        assert exchange.selected == (0 if is_bad and dist.get_rank() == 1 else numel)
        assert not is_bad or mean.isnan().all()
        if not is_bad and step != 3:  # that one is not applied
            account += (gradient.double() - mean.double()) / 2.0
            exchange.commit()
    exchange.fold()
    # The applied means and the residuals of all ranks add up to the gradients.
    left = residual.committed.double()
    dist.all_reduce(left)
    dist.all_reduce(account)
    torch.testing.assert_close(left, account, rtol=0, atol=1e-4)


def _every_size() -> None:
    dist.init_process_group("gloo", rank=int(os.environ["RANK"]), world_size=dist_world())
    with ThreadPoolExecutor(1) as worker:
        for bits in (8, 4):
            for numel in (0, 1, 34, 35, 2 * 34 + 1, 500):  # of some, shards are empty or short
                _exchange_steps(Quantize(bits, block=34), numel, worker)


@pytest.mark.distributed
@pytest.mark.parametrize("processes", [2, 3])
def test_buckets_of_every_size_lose_nothing(processes):
    launch(_every_size, processes=processes)


def _lose_a_rank() -> None:
    """Rank 1 dies after it has sent some of a step's buckets."""
    sent = itertools.count()
    gather = exchange_module.all_gather

    def all_gather(*arguments: Any, **settings: Any) -> Any:
        if int(os.environ["RANK"]) == 1 and next(sent) == 4:
            os._exit(3)
        return gather(*arguments, **settings)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exchange_module, "all_gather", all_gather)
        fit(Ledger(), KeptResiduals(Quantize(8), warmup_steps=3, bucket_cap_mb=0.004), range(1000))


@pytest.mark.distributed
@pytest.mark.parametrize("processes", [2, 3])
def test_lost_rank_ends_the_others(processes):
    with pytest.raises(AssertionError, match=r"(?s)rank 0 ended with 1.*rank 1 ended with 3"):
        launch(_lose_a_rank, timeout=240, processes=processes)
