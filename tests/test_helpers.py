"""Helpers whose failure would hide a failure: a missed sync, a rank whose error is lost."""

import os
import time

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tests.helpers.processes import launch
from tests.helpers.syncs import SyncCounter

READS = [
    lambda t: t.sum().item(),
    lambda t: float(t[0]),
    lambda t: bool(t.any()),
    lambda t: t.tolist(),
    lambda t: np.asarray(t),
    lambda t: t.cpu(),
    lambda t: torch.equal(t, t),
    lambda t: t.nonzero(),
    lambda t: t[t > 0],
    lambda t: t.masked_select(t > 0),
]


def test_reads_are_counted_and_arithmetic_is_not():
    for read in READS:
        with SyncCounter() as syncs:
            read(torch.ones(2))
        assert syncs.total == 1
        assert __file__ in next(iter(syncs.where))
    tensor = torch.ones(3, requires_grad=True)
    with SyncCounter() as syncs:
        torch.where(tensor > 0, tensor / tensor.sum(), 0.0).square().sum().backward()
        torch._foreach_mul_([tensor.grad], torch.full((), 2.0))
    assert syncs.total == 0


def fail_on_one_rank(how: str) -> None:
    dist.init_process_group("gloo", rank=int(os.environ["RANK"]), world_size=2)
    if dist.get_rank() == 1:
        if how == "raise":
            raise ArithmeticError("planted")
        if how == "die":
            os._exit(7)
        time.sleep(1000)
    dist.barrier()


@pytest.mark.distributed
def test_failure_of_one_rank_is_reported_with_its_output():
    for how, timeout, message in (
        ("raise", 120, r"rank 1 ended with 1:(.|\n)*ArithmeticError: planted"),
        ("die", 120, r"rank 1 ended with 7"),
        ("hang", 20, r"rank 1 had not ended after 20 s:(.|\n)*in fail_on_one_rank"),
    ):
        with pytest.raises(AssertionError, match=message):
            launch(fail_on_one_rank, how, timeout=timeout)
