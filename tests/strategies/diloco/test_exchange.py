"""The exchange between replicas, in real processes."""

import os
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_opt.strategies.diloco.exchange import (
    CODECS,
    Replicas,
    _send_to_replica,
    checksums,
    exchange,
    make_groups,
)
from tests.helpers.processes import launch
from tests.strategies.runs import of_all_ranks

pytestmark = pytest.mark.distributed

TIMES = 40


def pseudo_gradient_of(rank: int) -> Tensor:
    """Return a replica's pseudo-gradient: a few large numbers and many small ones."""
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(5000, generator=generator) ** 3


@pytest.mark.parametrize("shape", [(5000,), (3, 2048), (1024, 1024), (2, 3, 5)])
def test_checksums_notice_moved_values_and_changes_beside_nan(shape: tuple[int, ...]) -> None:
    def checksum(tensor: Tensor) -> float:
        return checksums({("buffer", shape): tensor})["buffer", shape]

    values = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    flat, rows = values.flatten(), 1024 if values.numel() > 1024 else values.shape[-1]
    moved = [
        flat.roll(1),
        flat.roll(rows),
        flat.flip(0),
        torch.cat([flat[1:2], flat[:1], flat[2:]]),
    ]
    if shape == (1024, 1024):
        moved.append(values.mT.flatten())
    found = [checksum(one.view(shape).contiguous()) for one in (flat, *moved)]
    assert len(set(found)) == len(found)
    assert checksum(values.clone()) == found[0]
    for odd in (torch.nan, torch.inf, -torch.inf):
        spoiled = values.clone()
        spoiled.view(-1)[3] = odd
        before = checksum(spoiled)
        assert checksum(spoiled.clone()) == before != found[0]
        spoiled.view(-1)[7] += 1
        assert checksum(spoiled) != before
    assert bool(spoiled.view(-1)[3] == -torch.inf)  # unchanged


def test_leader_sends_with_the_arguments_of_torch_2_5(monkeypatch: pytest.MonkeyPatch) -> None:
    sources: list[int] = []

    def broadcast(tensor: Tensor, src: int, group: object = None, async_op: bool = False) -> None:
        sources.append(src)

    monkeypatch.setattr(dist, "broadcast", broadcast)
    monkeypatch.setattr(dist, "get_global_rank", lambda group, rank: 4 + rank)
    group: Any = object()
    _send_to_replica(torch.ones(1), Replicas(2, 1, group, True, group))
    assert sources == [4]


def replicas(processes: int = 1) -> Replicas:
    if not dist.is_initialized():
        world = int(os.environ["LOCAL_WORLD_SIZE"])
        dist.init_process_group("gloo", rank=int(os.environ["RANK"]), world_size=world)
    return make_groups(processes, timedelta(seconds=60))[0]


def _repeated() -> None:
    among = replicas()
    own, exact = (
        pseudo_gradient_of(among.index),
        torch.stack(list(map(pseudo_gradient_of, range(among.count)))).mean(0),
    )
    for compression in CODECS:
        residual, total, errors = torch.zeros_like(own), torch.zeros_like(own), []
        for time in range(1, TIMES + 1):
            mean, finite, sent = exchange(own, residual, among, compression)
            assert finite
            assert mean is not None
            total += mean
            errors.append(float((total / time - exact).abs().max()))
        if compression == "float32":
            assert errors[0] < 1e-5
        else:  # the rest of one message comes with a later one
            assert errors[0] > 1e-2
            assert errors[-1] < 2 * errors[0] / TIMES
            width = {"int8": 1.0, "int4": 0.5}[compression]
            dense = 2 * (among.count - 1) * own.numel() / among.count
            assert width * dense < sent < width * dense + 3000
        assert all(torch.equal(total, other) for other in of_all_ranks(total))


def _non_finite() -> None:
    """All replicas skip one that is not finite, and it keeps its residual."""
    among = replicas()
    for compression, compressor in CODECS.items():
        block = compressor.block if compressor else 1
        for bad in ([1], list(range(among.count))):
            own, residual = pseudo_gradient_of(among.index), torch.zeros(5000)
            exchange(own, residual, among, compression)
            if among.index in bad:
                own[3] = torch.nan
                residual += 100.0
            before = residual.clone()
            mean, finite, _ = exchange(own, residual, among, compression)
            assert finite == (among.index not in bad)
            if not finite:
                size = -(-5000 // (block * among.count)) * block
                own_shard = slice(among.index * size, (among.index + 1) * size)
                before[own_shard] = residual[own_shard]  # the rest of the mean's message
                assert torch.equal(residual, before)
            if len(bad) == among.count:
                assert mean is None
            else:
                good = [pseudo_gradient_of(rank) for rank in range(among.count) if rank not in bad]
                assert mean is not None
                # The second message includes the error of the first.
                scale = {"int8": 0.02, "int4": 0.4, "float32": 1e-6}[compression]
                largest = max(float(moved.abs().max()) for moved in good)
                assert float((mean - torch.stack(good).mean(0)).abs().max()) < scale * largest


def _all() -> None:
    _repeated()
    _non_finite()


@pytest.mark.parametrize("processes", [2, 3])
def test_exchange_loses_nothing_and_skips_replicas_that_are_not_finite(processes):
    launch(_all, processes=processes)


def _two_machines() -> None:
    """Of the first replica's two processes, only the second has a NaN."""
    among = replicas(processes=2)
    for compression in CODECS:
        own, residual = pseudo_gradient_of(among.index), torch.zeros(5000)
        if dist.get_rank() == 1:
            own[3] = torch.nan
        mean, finite, _ = exchange(own, residual, among, compression)
        assert finite == (among.index == 1)
        assert mean is not None
        scale = {"int8": 0.01, "int4": 0.2, "float32": 1e-6}[compression]
        exact = pseudo_gradient_of(1)
        assert float((mean - exact).abs().max()) < scale * float(exact.abs().max())


def test_replica_with_one_non_finite_process_is_skipped():
    launch(_two_machines, processes=4)
