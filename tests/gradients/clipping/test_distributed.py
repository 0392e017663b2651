"""AdaptiveClipping on two processes gives the same numbers as on one.

Each rank trains on half of each batch.
"""

import math
import os
from collections.abc import Callable
from itertools import product
from typing import Any, TypeAlias

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.strategies import ModelParallelStrategy, Strategy
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.distributed.tensor.placement_types import _StridedShard

import lightning_opt as lo
from lightning_opt.core.modules.sharding import flat_parameter_groups, summed_part
from lightning_opt.core.numerics.norms import collect_gradients, measure_norms, parameters_of
from lightning_opt.gradients.clipping.gradient_clipper import GradientClipper
from tests.helpers.models import SmallNet, assert_same_weights, loader_of, whole
from tests.helpers.processes import launch
from tests.helpers.syncs import take_device_path
from tests.helpers.trainers import FSDPOnCPU, MemoryLogger, quiet_trainer

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

STEPS = 8
RULES: dict[str, Callable[[], lo.ClippingRule]] = {
    "mean_std": lambda: lo.MeanStd(k=0.1, window=100, warmup=2),
    "fixed_value": lambda: lo.FixedValue(0.3),
    "per_parameter": lambda: lo.PerParameter(warmup=2),
    "unit_wise": lambda: lo.UnitWise(clip_factor=0.1),
}

Run: TypeAlias = dict[str, Any]
"""``logged`` values by key, ``weights``, callback ``state`` and ``clipped_norms``."""


PLANS: dict[str, dict[str, ParallelStyle]] = {
    "tensor": {"0": ColwiseParallel(), "2": RowwiseParallel()},
    # The gradients of the LayerNorm are Partial.
    "sequence": {
        "0": ColwiseParallel(),
        "2": RowwiseParallel(output_layouts=Shard(0)),
        "4": SequenceParallel(sequence_dim=0),
        "5": PrepareModuleInput(
            input_layouts=Shard(0), desired_input_layouts=Replicate(), use_local_output=True
        ),
    },
}


class ShardedNet(SmallNet):
    """Layers of 4, 3 and 1 rows: even, uneven and empty shards on two ranks.

    Args:
        shard: Which layers are sharded: ``"all"``, ``"part"``, one of :data:`PLANS`, or none.
    """

    def __init__(self, shard: str = "", **settings: Any) -> None:
        super().__init__(widths=(4, 3), lr=0.05, **settings)
        self.layer.insert(4, nn.LayerNorm(3))
        self.shard = shard

    def configure_model(self) -> None:
        if not self.shard or isinstance(self.layer[0].weight, DTensor):
            return
        if self.shard in PLANS:
            plan = PLANS[self.shard]
            parallelize_module(self.layer, self.device_mesh["tensor_parallel"], plan)
            return
        mesh = self.device_mesh["data_parallel"]
        if self.shard == "part":
            fully_shard(self.layer[0], mesh=mesh)
            return
        for child in self.layer:
            if isinstance(child, (nn.Linear, nn.LayerNorm)):
                fully_shard(child, mesh=mesh)
        fully_shard(self.layer, mesh=mesh)

    def step(self, batch: Any) -> Tensor:
        if self.shard in ("part", *PLANS):
            # Replicated parameters are not reduced here, so all ranks need the same data.
            return self.loss(self(batch[0]), batch[1])
        return super().step(batch)


class FullTensors(Callback):
    """Gathers full gradients and weights; ``norms`` are after clipping."""

    def __init__(self) -> None:
        self.norms: list[float] = []

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        gradients = (p.grad for p in parameters_of(optimizer) if p.grad is not None)
        flat = [whole(gradient).double().flatten() for gradient in gradients]
        self.norms.append(torch.cat(flat).norm().item())

    def on_train_end(self, trainer, pl_module):
        with FullyShardedDataParallel.summon_full_params(trainer.model, writeback=False):
            self.weights = {
                name.replace("_fsdp_wrapped_module.", ""): whole(parameter.detach()).clone()
                for name, parameter in pl_module.named_parameters()
            }


def train(model: SmallNet, rule: lo.ClippingRule, strategy: str | Strategy = "auto") -> Run:
    logger, clipping = MemoryLogger(), lo.AdaptiveClipping(rule, every_n_steps=1)
    full = FullTensors()
    trainer = quiet_trainer(
        strategy=strategy,
        devices=1 if strategy == "auto" else 2,
        logger=logger,
        callbacks=[clipping, full],
        limit_val_batches=0,
    )
    trainer.fit(model, loader_of(STEPS))
    assert {key for _, metrics in logger.records for key in metrics} <= {
        *trainer.callback_metrics,
        "epoch",
    }
    return {
        "logged": {
            key: torch.tensor(logger.series(key), dtype=torch.float64)
            for key in dict.fromkeys(key for _, metrics in logger.records for key in metrics)
            if key.startswith("clip/")
        },
        "weights": full.weights,
        "state": clipping.state_dict(),
        "clipped_norms": full.norms,
    }


def assert_equal_runs(ranks: list[Run], expected: Run, *, local: tuple[str, ...] = ()) -> None:
    """Compare with a single process, and the ranks with each other.

    Args:
        local: Logged keys that depend on this rank's shards.
    """
    first, second = ranks
    for key, values in expected["logged"].items():
        if key in local:
            continue
        torch.testing.assert_close(first["logged"][key], values, rtol=1e-5, atol=1e-6)
        assert torch.equal(first["logged"][key], second["logged"][key]), key
    assert first["logged"].keys() == expected["logged"].keys()
    for run in ranks:
        assert_same_weights(run["weights"], expected["weights"], rtol=1e-4, atol=1e-6)


@pytest.fixture(scope="module")
def single() -> dict[str, Run]:
    return {name: train(ShardedNet(), rule()) for name, rule in RULES.items()}


# --- two processes --------------------------------------------------------------------------------


def data_parallel() -> ModelParallelStrategy:
    return ModelParallelStrategy(
        data_parallel_size=2, tensor_parallel_size=1, save_distributed_checkpoint=True
    )


KINDS: dict[str, Callable[[], tuple[ShardedNet, str | Strategy]]] = {
    "ddp": lambda: (ShardedNet(), "ddp"),
    "fsdp2": lambda: (ShardedNet("all"), data_parallel()),
    "part": lambda: (ShardedNet("part"), data_parallel()),
    "tensor": lambda: (ShardedNet("tensor"), ModelParallelStrategy(1, 2)),
    "sequence": lambda: (ShardedNet("sequence"), ModelParallelStrategy(1, 2)),
}
FLAT_RULES = [rule for rule in RULES if rule != "unit_wise"]
FLAT_KINDS = [(True, "units"), (False, "root")]


def run_all() -> dict[Any, Run]:
    runs: dict[Any, Run] = {}
    for kind, rule in product(KINDS, RULES):
        model, strategy = KINDS[kind]()
        runs[kind, rule] = train(model, RULES[rule](), strategy)
    for (use_orig, units), rule in product(FLAT_KINDS, FLAT_RULES):
        policy = {nn.Linear} if units == "units" else None
        strategy = FSDPOnCPU(use_orig_params=use_orig, auto_wrap_policy=policy)
        runs[use_orig, units, rule] = train(ShardedNet(), RULES[rule](), strategy)
    return runs


@pytest.fixture(scope="module")
def ranks() -> list[dict[Any, Run]]:
    return launch(run_all)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("kind", KINDS)
def test_plain_and_sharded_parameters_equal_one_process(kind, rule, ranks, single):
    # These values cover only this rank's shards.
    is_local = kind != "ddp" and rule in ("fixed_value", "unit_wise")
    local = ("clip/fraction", "clip/coefficient") if is_local else ()
    runs = [runs[kind, rule] for runs in ranks]
    assert_equal_runs(runs, single[rule], local=local)
    for run in runs:
        assert run["clipped_norms"] == pytest.approx(single[rule]["clipped_norms"], rel=1e-5)
    assert kind != "ddp" or str(runs[0]["state"]) == str(runs[1]["state"])


@pytest.mark.parametrize(("use_orig", "units"), FLAT_KINDS)
@pytest.mark.parametrize("rule", FLAT_RULES)
def test_fsdp1_equals_one_process(rule, use_orig, units, ranks, single):
    runs = [runs[use_orig, units, rule] for runs in ranks]
    if rule == "per_parameter" and not use_orig:
        # A flat parameter joins several tensors, so norms agree only until the warm-up ends.
        for run in runs:
            expected = single[rule]["logged"]["clip/norm"][:3]
            torch.testing.assert_close(run["logged"]["clip/norm"][:3], expected, rtol=1e-5, atol=0)
        assert str(runs[0]["logged"]) == str(runs[1]["logged"])
        return
    assert_equal_runs(runs, single[rule], local=("clip/fraction",) if rule == "fixed_value" else ())


# --- four processes -------------------------------------------------------------------------------


def measure_meshes() -> tuple[list[float], float]:
    """Measure parameters on two equal 1-D meshes and one 2-D mesh, of four processes."""
    meshes = init_device_mesh("cpu", (4,)), init_device_mesh("cpu", (4,))
    mesh_2d = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    placed = [
        (meshes[0], [Shard(0)]),
        (meshes[1], [Shard(1)]),
        (meshes[0], [Replicate()]),
        (mesh_2d, [Replicate(), Shard(0)]),
        (mesh_2d, [Shard(0), Shard(1)]),
    ]
    parameters = []
    for seed, (mesh, placements) in enumerate(placed):
        whole = torch.full((3, 2), 1.0 + seed)
        parameter = nn.Parameter(distribute_tensor(whole, mesh, placements))
        parameter.grad = distribute_tensor(whole, mesh, placements)
        parameters.append(parameter)
    # As FSDP2 shards a parameter that tensor parallelism has sharded.
    strided = [_StridedShard(0, split_factor=2), Shard(0)]
    parameters.append(nn.Parameter(DTensor.from_local(torch.ones(1, 2), mesh_2d, strided)))
    parameters[-1].grad = DTensor.from_local(torch.full((1, 2), 6.0), mesh_2d, strided)
    plain = nn.Parameter(torch.ones(2))
    plain.grad = torch.full((2,), 10.0)
    partial = nn.Parameter(distribute_tensor(torch.ones(2), meshes[0], [Replicate()]))
    partial.grad = DTensor.from_local(torch.full((2,), 5.0), meshes[0], [Partial()])
    gradients = collect_gradients([*parameters, plain, partial])
    norms = measure_norms(gradients)
    with pytest.MonkeyPatch.context() as patch:
        take_device_path(patch)
        assert measure_norms(gradients).per_tensor.tolist() == pytest.approx(norms.per_tensor)
    assert torch.equal(summed_part(partial.grad), torch.full((2,), 20.0))
    assert torch.equal(partial.grad.to_local(), torch.full((2,), 5.0))
    partial.grad = DTensor.from_local(torch.ones(2), meshes[0], [Partial("max")])
    with pytest.raises(RuntimeError, match=r"only Partial\('sum'\) can be measured"):
        collect_gradients([partial])
    return norms.per_tensor, norms.total


def measure_no_shard() -> tuple[float, list[float], int, float]:
    """Wrap an unsharded unit and one with two replicas. Lightning has one setting for all units."""
    model = SmallNet(widths=(3,)).layer
    strategies = torch.distributed.fsdp.ShardingStrategy
    world = torch.distributed.group.WORLD
    shards, _ = torch.distributed.new_subgroups(2)
    replicas, _ = torch.distributed.new_subgroups_by_enumeration([[0, 2], [1, 3]])
    for index, strategy, group in (
        (0, strategies.NO_SHARD, world),
        (2, strategies.HYBRID_SHARD, (shards, replicas)),
    ):
        model[index] = FullyShardedDataParallel(
            model[index], group, sharding_strategy=strategy, device_id=torch.device("cpu")
        )
    inputs, targets = next(iter(loader_of(1)))
    nn.functional.mse_loss(model(inputs), targets).backward()
    flat = flat_parameter_groups(model)
    norms = measure_norms(collect_gradients(model.parameters(), flat))
    with pytest.raises(ValueError, match="UnitWise cannot clip FSDP1's"):
        GradientClipper(model, "unit_wise")
    in_a_loop = float(GradientClipper(model, "fixed_norm").clip()["norm"])
    return norms.total, norms.per_tensor, len(flat), in_a_loop


def measure_on_four_ranks() -> tuple[Any, Any]:
    torch.distributed.init_process_group("gloo", rank=int(os.environ["RANK"]), world_size=4)
    return measure_meshes(), measure_no_shard()


@pytest.mark.filterwarnings("ignore:The `NO_SHARD` sharding strategy is deprecated")  # on all ranks
def test_norms_are_exact_on_several_meshes_and_in_unsharded_fsdp1_units():
    expected = [math.sqrt(6) * value for value in (1.0, 2.0, 3.0, 4.0, 5.0)]
    expected += [math.sqrt(8) * 6, math.sqrt(200), math.sqrt(800)]
    plain = SmallNet(widths=(3,)).layer
    inputs, targets = next(iter(loader_of(1)))
    nn.functional.mse_loss(plain(inputs), targets).backward()
    squares = [
        sum(p.grad.double().square().sum().item() for p in plain[index].parameters())
        for index in (0, 2)
    ]
    for on_meshes, (total, per_tensor, sharded, in_a_loop) in launch(
        measure_on_four_ranks, processes=4
    ):
        assert on_meshes[0] == pytest.approx(expected, rel=1e-6)
        assert on_meshes[1] == pytest.approx(math.hypot(*expected), rel=1e-6)
        assert in_a_loop == total
        assert per_tensor == pytest.approx([math.sqrt(square) for square in squares], rel=1e-5)
        assert total == pytest.approx(math.sqrt(sum(squares)), rel=1e-5)
        assert sharded > 0
