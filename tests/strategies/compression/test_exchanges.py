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


def _average(exchange: Exchange, gradient: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
    """Exchange one step, without committing it."""
    residual = exchange.residual
    torch.add(residual.committed, gradient, alpha=1.0 / scale, out=residual.pending)
    return exchange.start(gradient.clone(), scale).wait()


def _make(compressor: Any, residual: Residual, worker: ThreadPoolExecutor) -> Exchange:
    """Return the exchange of this compressor at this number of ranks."""
    if dist_world() == 2:
        return GatherExchange(compressor, residual)
    return TwoStageExchange(compressor, residual, dist.group.WORLD, worker)


def _pieces_and_whole(compressor: Any, numel: int, worker: ThreadPoolExecutor) -> None:
    """Five steps, one with a NaN on a rank and one not applied: pieces give the same bits."""
    rank, world = dist.get_rank(), dist_world()
    block = compressor.block
    exchanges, residuals = [], [Residual(torch.zeros(numel)), Residual(torch.zeros(numel))]
    for one, size in zip(residuals, (10**9, 3 * block), strict=True):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(exchange_module, "PIECE_SIZE", size)
            patch.setattr(exchange_module, "MIN_PIECE_SIZE", size)
            exchanges.append(_make(compressor, one, worker))
    shard = numel if world == 2 else -(-numel // (world * block)) * block
    pieces = max(-(-shard // (3 * block)), 1)
    account = torch.zeros(numel, dtype=torch.float64)
    for step in range(5):
        generator = torch.Generator().manual_seed(7 * rank + step)
        gradient = torch.randn(numel, generator=generator)
        is_bad = step == 2 and numel > 0
        if is_bad and rank == 1:
            gradient[-1] = torch.nan
        means = [_average(exchange, gradient, 2.0) for exchange in exchanges]
        for exchange in exchanges:
            assert exchange.non_finite == is_bad
            assert exchange.selected == (0 if is_bad and rank == 1 else numel)
        if is_bad:
            assert all(mean.isnan().all() for mean in means)
        else:
            assert torch.equal(*means)
        if not is_bad and step != 3:  # that one is not applied
            account += (gradient.double() - means[1].double()) / 2.0
            for exchange in exchanges:
                exchange.commit(exchange.non_finite)
        assert torch.equal(*(one.committed for one in residuals))
    for exchange in exchanges:
        exchange.fold()
    assert torch.equal(*(one.committed for one in residuals))
    # The applied means and the residuals of all ranks add up to the gradients.
    left = residuals[1].committed.double()
    dist.all_reduce(left)
    dist.all_reduce(account)
    torch.testing.assert_close(left, account, rtol=0, atol=1e-4)
    # A message in pieces has only more headers and padding.
    extra = 2 * world * (pieces + 1) * (16 + 8)
    assert exchanges[0].sent_bytes <= exchanges[1].sent_bytes + 8 * world
    assert exchanges[1].sent_bytes <= exchanges[0].sent_bytes + extra + 2 * world * 4 * block
    if pieces > 2:
        assert exchanges[1].sent_bytes > exchanges[0].sent_bytes


def _every_size() -> None:
    dist.init_process_group("gloo", rank=int(os.environ["RANK"]), world_size=dist_world())
    with ThreadPoolExecutor(1) as worker:
        for bits in (8, 4):
            for numel in (0, 1, 33, 34, 35, 3 * 34, 3 * 34 + 1, 500, 34 * 12, 34 * 12 + 5, 2000):
                _pieces_and_whole(Quantize(bits, block=34), numel, worker)


@pytest.mark.distributed
@pytest.mark.parametrize("processes", [2, 3])
def test_pieces_have_the_same_bits_as_whole_buckets(processes):
    launch(_every_size, processes=processes)


def _lose_a_rank_between_pieces() -> None:
    """Rank 1 dies after it has sent some pieces of a bucket."""
    sent = itertools.count()
    gather = exchange_module.all_gather

    def all_gather(*arguments: Any, **settings: Any) -> Any:
        if int(os.environ["RANK"]) == 1 and next(sent) == 20:
            os._exit(3)
        return gather(*arguments, **settings)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exchange_module, "PIECE_SIZE", 340)
        patch.setattr(exchange_module, "MIN_PIECE_SIZE", 136)
        patch.setattr(exchange_module, "all_gather", all_gather)
        strategy = KeptResiduals(Quantize(8, block=34), warmup_steps=3)
        fit(Ledger(), strategy, range(1000))


@pytest.mark.distributed
@pytest.mark.parametrize("processes", [2, 3])
def test_rank_lost_between_pieces_ends_the_others(processes):
    with pytest.raises(AssertionError, match=r"(?s)rank 0 ended with 1.*rank 1 ended with 3"):
        launch(_lose_a_rank_between_pieces, timeout=240, processes=processes)
