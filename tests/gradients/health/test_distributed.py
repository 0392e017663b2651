"""GradientHealth in two processes: every rank measures the same as a single process."""

import math
from typing import Any

import pytest
import torch
from lightning.pytorch.strategies import ModelParallelStrategy, Strategy
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import lightning_opt as lo
from lightning_opt.gradients.health.measures import ActivationWatch
from tests.gradients.clipping.test_distributed import ShardedNet, data_parallel
from tests.helpers.models import loader_of
from tests.helpers.processes import launch
from tests.helpers.trainers import FSDPOnCPU, MemoryLogger, logged_warnings, quiet_trainer

pytestmark = [pytest.mark.distributed, pytest.mark.slow]


class WithUnused(ShardedNet):
    """A net with an unused layer, and a NaN in one step of one rank."""

    def __init__(self, shard: str = "", bad_step: int | None = None, **settings: Any) -> None:
        super().__init__(shard, **settings)
        self.unused = nn.Linear(3, 2)
        self.bad_step = bad_step

    def configure_model(self) -> None:
        super().configure_model()
        if self.shard == "all":
            fully_shard(self.unused, mesh=self.device_mesh["data_parallel"])

    def loss(self, preds: Tensor, labels: Tensor | None = None) -> Tensor:
        loss = super().loss(preds, labels)
        bad = self.global_step == self.bad_step and self.global_rank == self.trainer.world_size - 1
        return loss * float("nan") if bad else loss


def train(model: ShardedNet, strategy: str | Strategy = "auto") -> dict[str, Any]:
    logger, health = MemoryLogger(), lo.GradientHealth(every_n_steps=4)
    trainer = quiet_trainer(
        strategy=strategy,
        devices=1 if strategy == "auto" else 2,
        logger=logger,
        callbacks=[health],
        limit_val_batches=0,
    )
    with logged_warnings() as warnings:
        trainer.fit(model, loader_of(8))
    state = health.state_dict()["0"]
    return {
        "parameters": {
            p.name: {
                key: getattr(p, key)
                for key in ("numel", "status", "max", "zeros", "mean", "variance", "update")
            }
            for layer in health.layers
            for p in layer.parameters
        },
        "order": [layer.name for layer in health.layers],
        "logged": dict(logger.records[-1][1]),
        "issues": [str(issue) for issue in health.issues],
        "state": str(health.state_dict()),
        "nonfinite": state["nonfinite"],
        "warnings": warnings,
    }


BY_SHAPE = ("health/update", "health/smallest_rms", "health/largest_rms")
"""Computed from weight matrices if there are any."""


def check(
    ranks: list[dict[str, Any]], expected: dict[str, Any], without: tuple[str, ...] = ()
) -> None:
    for run in ranks:
        assert run["order"] == expected["order"]
        assert run["parameters"].keys() == expected["parameters"].keys()
        for name, stats in run["parameters"].items():
            for key, value in stats.items():
                reference = expected["parameters"][name][key]
                if isinstance(reference, float):
                    reference = pytest.approx(reference, rel=1e-3, abs=1e-7)
                assert value == reference, (name, key)
        for key in expected["logged"].keys() - set(without):
            assert run["logged"][key] == pytest.approx(expected["logged"][key], rel=1e-3), key
    assert ranks[0]["state"] == ranks[1]["state"]


@pytest.fixture(scope="module")
def single() -> dict[str, Any]:
    return train(WithUnused())


def watch_tensor_parallel() -> list[str]:
    """Watch a tensor-parallel network with one DTensor and one plain output per layer pair."""
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    plan = {"0": ColwiseParallel(use_local_output=False), "1": RowwiseParallel()}
    parallelize_module(net, init_device_mesh("cpu", (2,)), plan)
    watch = ActivationWatch()
    assert watch.watch(net)
    watch.start_batch(0, 7)
    net(torch.full((2, 4), math.nan))
    watch.end_batch()
    return [str(issue) for issue in watch.take(scaled=False)]


def run_all() -> dict[str, Any]:
    ddp, linear = "ddp_find_unused_parameters_true", ModuleWrapPolicy({nn.Linear})
    fsdp1 = FSDPOnCPU(auto_wrap_policy=linear, use_orig_params=True)
    return {
        "ddp": train(WithUnused(), ddp),
        "fsdp1": train(WithUnused(), fsdp1),
        "fsdp2": train(WithUnused("all"), data_parallel()),
        "sequence": train(WithUnused("sequence"), ModelParallelStrategy(1, 2)),
        "nan ddp": train(WithUnused(bad_step=5), ddp),
        "nan fsdp2": train(WithUnused("all", bad_step=5), data_parallel()),
        "watched": watch_tensor_parallel(),
    }


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return launch(run_all)


# Shards of FSDP1 are flat, so matrices are unknown; all other values match.
@pytest.mark.parametrize(
    ("kind", "without"), [("ddp", ()), ("fsdp1", BY_SHAPE), ("fsdp2", ()), ("sequence", ())]
)
def test_every_rank_measures_the_same_as_one_process(kind, without, ranks, single):
    check([runs[kind] for runs in ranks], single, without)


@pytest.mark.parametrize("kind", ["nan ddp", "nan fsdp2"])
def test_nan_on_one_rank_is_reported_on_all(kind, ranks):
    for rank, runs in enumerate(ranks):
        run = runs[kind]
        assert run["nonfinite"] == 3  # from step 6 to the end, weights are NaN
        assert any(issue.startswith("[critical] nan") for issue in run["issues"])
        assert any("[critical] nan" in text for text in run["warnings"]) == (rank == 0)


def test_activations_of_tensor_parallel_layers_are_watched(ranks):
    for runs in ranks:
        (issue,) = runs["watched"]
        assert issue.startswith("[critical] nan at 0: ")
