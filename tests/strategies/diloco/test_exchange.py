"""One exchange between replicas, in real processes."""

import os
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_opt.strategies.diloco import exchange as module
from lightning_opt.strategies.diloco.exchange import CODECS, Replicas, exchange, make_groups
from tests.helpers.processes import launch

pytestmark = pytest.mark.distributed

TIMES = 40


def moved_by(rank: int) -> Tensor:
    """What a replica moves in every window: a few large numbers, and small ones beside them."""
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(5000, generator=generator) ** 3


def replicas() -> Replicas:
    if not dist.is_initialized():
        world = int(os.environ["LOCAL_WORLD_SIZE"])
        dist.init_process_group("gloo", rank=int(os.environ["RANK"]), world_size=world)
    return make_groups(1, timedelta(seconds=60))[0]


def _again_and_again() -> None:
    among = replicas()
    own, exact = moved_by(among.index), torch.stack(list(map(moved_by, range(among.count)))).mean(0)
    for compression in CODECS:
        owed, total, errors = torch.zeros_like(own), torch.zeros_like(own), []
        for time in range(1, TIMES + 1):
            mean, sound, sent = exchange(own, owed, among, compression)
            assert sound
            assert mean is not None
            total += mean
            errors.append(float((total / time - exact).abs().max()))
        if compression == "float32":
            assert errors[0] < 1e-5
        else:  # what a message fails to carry comes with a later one
            assert errors[0] > 1e-2
            assert errors[-1] < 2 * errors[0] / TIMES
            width = {"int8": 1.0, "int4": 0.5}[compression]
            dense = 2 * (among.count - 1) * own.numel() / among.count
            assert width * dense < sent < width * dense + 3000
        everywhere = [torch.empty_like(total) for _ in range(among.count)]
        dist.all_gather(everywhere, total)
        assert all(torch.equal(total, other) for other in everywhere)


def _unsound() -> None:
    """What is not finite counts for nobody; what that replica owed it still owes."""
    among = replicas()
    for compression in CODECS:
        for bad in ([1], list(range(among.count))):
            own, owed = moved_by(among.index), torch.zeros(5000)
            exchange(own, owed, among, compression)
            before = owed.clone()
            if among.index in bad:
                own[3] = torch.nan
            mean, sound, _ = exchange(own, owed, among, compression)
            assert sound == (among.index not in bad)
            if not sound:
                size = -(-5000 // (1024 * among.count)) * 1024
                own_shard = slice(among.index * size, (among.index + 1) * size)
                before[own_shard] = owed[own_shard]  # what it fails to tell of the mean
                assert torch.equal(owed, before)
            if len(bad) == among.count:
                assert mean is None
            else:
                good = [moved_by(rank) for rank in range(among.count) if rank not in bad]
                assert mean is not None
                # An error of the first message may come with the second.
                scale = {"int8": 0.02, "int4": 0.4, "float32": 1e-6}[compression]
                largest = max(float(moved.abs().max()) for moved in good)
                assert float((mean - torch.stack(good).mean(0)).abs().max()) < scale * largest


def _in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """A large message travels in pieces, so that both directions of a link are used at once."""
    among, sizes, means = replicas(), [], []
    plain = dist.all_to_all_single

    def counted(into: Tensor, piece: Tensor, **more: Any) -> Any:
        sizes.append(piece.shape[1])
        return plain(into, piece, **more)

    monkeypatch.setattr(dist, "all_to_all_single", counted)
    for piece in (10**9, 1000):
        monkeypatch.setattr(module, "PIECE", piece)
        owed = torch.zeros(5000)
        mean, _, sent = exchange(moved_by(among.index), owed, among, "int8")
        assert mean is not None
        means.append((mean, owed, sent))
    whole = sizes[0]
    assert len(sizes) == 2 + 2 * (whole // 1000)
    assert max(sizes[2:]) < 2000 < whole
    assert torch.equal(means[0][0], means[1][0])
    assert torch.equal(means[0][1], means[1][1])


def _all() -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        _in_pieces(monkeypatch)
    _again_and_again()
    _unsound()


@pytest.mark.parametrize("processes", [2, 3])
def test_nothing_is_lost_but_what_is_not_finite(processes):
    launch(_all, processes=processes)
