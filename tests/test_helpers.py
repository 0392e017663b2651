"""The helpers themselves: a counter that misses a sync hides one, a launcher may hang."""

import os
import time

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.helpers.processes import launch
from tests.helpers.syncs import SyncCounter


@pytest.mark.parametrize(
    "read",
    [
        lambda t: t.sum().item(),
        lambda t: float(t[0]),
        lambda t: int(t[0]),
        lambda t: bool(t.any()),
        lambda t: t.tolist(),
        lambda t: t.numpy(),
        lambda t: np.asarray(t),
        lambda t: t.cpu(),
        lambda t: torch.equal(t, t),
        lambda t: t.nonzero(),
        lambda t: t[t > 0],
        lambda t: t.masked_select(t > 0),
        lambda t: max(t),
    ],
)
def test_reads_are_counted(read):
    with SyncCounter() as syncs:
        read(torch.ones(2))
    assert syncs.total == 1
    assert __file__ in next(iter(syncs.where))


def test_arithmetic_is_not_counted():
    tensor = torch.ones(3, requires_grad=True)
    with SyncCounter() as syncs:
        total = torch.where(tensor > 0, tensor / tensor.sum(), 0.0).square().sum()
        total.backward()
        torch._foreach_mul_([tensor.grad], torch.full((), 2.0))
        tensor.grad[:2].sort().values[torch.zeros(1, dtype=torch.long)]
    assert syncs.total == 0


def rank_sum(start: float) -> tuple[int, Tensor]:
    dist.init_process_group("gloo", rank=int(os.environ["RANK"]), world_size=2)
    total = torch.full((), start + dist.get_rank())
    dist.all_reduce(total)
    return dist.get_rank(), total


def fail_on_one_rank(how: str) -> None:
    rank_sum(0.0)
    if dist.get_rank() == 1:
        if how == "raise":
            raise ArithmeticError("planted")
        if how == "die":
            os._exit(7)
        time.sleep(1000)
    dist.barrier()


@pytest.mark.distributed
def test_launch_returns_the_results_by_rank():
    first, second = launch(rank_sum, 5.0)
    assert first == (0, torch.tensor(11.0))
    assert second == (1, torch.tensor(11.0))


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("how", "timeout", "message"),
    [
        ("raise", 60, r"rank 1 ended with 1:(.|\n)*ArithmeticError: planted"),
        ("die", 60, r"rank 1 ended with 7"),
        ("hang", 5, r"rank 1 did not end within 5 s:(.|\n)*in fail_on_one_rank"),
    ],
)
def test_a_failure_of_one_rank_ends_all(how, timeout, message):
    launch(rank_sum, 0.0)  # the fork server has started, so that the time is that of the failure
    with pytest.raises(AssertionError, match=message):
        launch(fail_on_one_rank, how, timeout=timeout)
