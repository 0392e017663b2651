"""Reductions over ranks."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_opt.core.modules.sharding import combine_shards, reduce_over
from tests.helpers.fake_cuda import fake_cuda


@pytest.mark.parametrize("backends", ["cuda:nccl", "cpu:gloo,cuda:nccl", "cpu:gloo,cuda:gloo"])
@pytest.mark.parametrize("where", ["cpu", "cuda"])
def test_values_are_reduced_on_a_device_of_the_groups_backend(monkeypatch, backends, where):
    """FSDP(cpu_offload=True) keeps gradients on the host, which NCCL cannot reduce."""
    reduced: list[str] = []

    def all_reduce(values: Tensor, **_: object) -> None:
        if f"{values.device.type}:" not in backends:
            raise RuntimeError(f"No backend type associated with device type {values.device}")
        reduced.append(values.device.type)

    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    monkeypatch.setattr(dist, "get_backend_config", lambda group=None: backends)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda group=None: 2)
    with fake_cuda():
        values = torch.empty(4, device=where)
        for summed in (
            combine_shards(values, [("a",)] * 4),
            combine_shards(values, [("a",), ("b",), (), ("a",)]),
            reduce_over(values, ("a",)),
        ):
            assert summed.device.type == where
    assert reduced == ["cuda" if backends == "cuda:nccl" else where] * 4
