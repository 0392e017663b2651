"""Reductions over ranks."""

import operator
import re
import statistics
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor

import lightning_opt as lo
from lightning_opt.core.modules.sharding import combine_shards, reduce_over
from lightning_opt.data.pipeline import data_monitor
from lightning_opt.profiling.run_report import run_report
from tests.helpers.fake_cuda import fake_cuda
from tests.helpers.models import WholeBatchNet, loader_of
from tests.helpers.processes import launch
from tests.helpers.trainers import MemoryLogger, quiet_trainer


@pytest.mark.skipif(
    torch.backends.cuda.is_built() and not hasattr(torch._inductor, "aoti_load_package"),
    reason="fake CUDA tensors need a GPU in the CUDA build of torch 2.5",
)
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


class AnyStrategyNet(WholeBatchNet):
    def configure_model(self) -> None:
        pass


def _samples(strategy: Any, folder: Path) -> list[Any]:
    """Train at one step per second of a fake clock. Return samples per step, and per batch."""
    logger, report, performance = MemoryLogger(), lo.RunReport(), lo.PerformanceMonitor(1)
    callbacks = [lo.Accumulation(effective_batch=12), lo.DataMonitor(4), performance, report]
    settings = {"strategy": strategy, "logger": logger, "default_root_dir": folder}
    trainer = quiet_trainer(callbacks=callbacks, devices=2, limit_val_batches=0, **settings)
    clock = SimpleNamespace(perf_counter=lambda: float(trainer.global_step))
    with (
        mock.patch.object(run_report, "perf_counter", clock.perf_counter),
        mock.patch.object(data_monitor, "time", clock),
    ):
        trainer.fit(AnyStrategyNet(), loader_of(48, 3))
    (rate,) = re.findall(r"([\d.]+) samples per second", report.sentence) or [12]  # of rank 0
    rates, seconds = map(logger.series, ("perf/samples_per_second", "perf/step_seconds"))
    reported = {row["quantity"]: row["typical"] for row in performance.report().rows}
    mean = reported["samples per second"] * statistics.fmean(seconds)
    per_step = [float(rate), *logger.series("data/samples_per_second")]
    return [per_step, statistics.fmean(map(operator.mul, rates, seconds)), mean]


@pytest.mark.distributed
@pytest.mark.parametrize(("strategy", "ranks"), [("ddp", 2), (ModelParallelStrategy(1, 2), 1)])
def test_only_ranks_with_their_own_data_are_counted(strategy, ranks, tmp_path):
    for per_step, per_batch, reported in launch(_samples, strategy, tmp_path):
        assert per_step == [12] * len(per_step)
        assert per_batch == pytest.approx(3 * ranks, rel=0.05)
        assert reported == pytest.approx(3 * ranks, rel=0.4)  # without the first steps
