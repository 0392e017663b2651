"""All ranks respond to a fault of one rank: real processes over gloo."""

import os
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from torch import Tensor

import lightning_opt as lo
from lightning_opt.gradients.guard import events as events_module
from lightning_opt.gradients.guard.detector import Detector
from tests.gradients.faulty import FaultyNet
from tests.helpers.models import assert_same_weights, weights_of
from tests.helpers.processes import launch
from tests.helpers.syncs import take_device_path
from tests.helpers.trainers import quiet_trainer

pytestmark = pytest.mark.distributed

Result = tuple[dict[str, Tensor], dict[str, Tensor], list[dict[str, Any]], str]
"""The weights with a guard, those of a run without the faulty batches, events and counts."""


class ShardedNet(FaultyNet):
    """Sharded with FSDP2."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.norm = torch.nn.Identity()  # type: ignore[assignment]

    def configure_model(self) -> None:
        from torch.distributed.fsdp import fully_shard

        if self.device_mesh is not None and not hasattr(self.head, "set_reshard_after_backward"):
            for part in (self.encoder, self.head):
                fully_shard(part, mesh=self.device_mesh["data_parallel"])
            fully_shard(self, mesh=self.device_mesh["data_parallel"])


def train(
    strategy: str,
    faults: dict[int, str],
    guard: lo.NonFiniteGuard | None,
    leave_out: Any = (),
    device_path: bool = False,
    window: int = 1,
    rank: int | None = 1,
) -> dict[str, Tensor]:
    """Train with faults on one rank, or on all, and return the weights."""
    settings = {"lr": 0.01, "fused": True} if device_path else {"lr": 0.01}
    kinds: dict[str, Any] = {
        "ddp": lambda: DDPStrategy(),
        "ddp_view": lambda: DDPStrategy(gradient_as_bucket_view=True),
        "fsdp2": lambda: ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1),
    }
    net = FaultyNet if strategy.startswith("ddp") else ShardedNet
    model = net(faults, torch.optim.AdamW, settings, rank=rank, batches=24, leave_out=leave_out)
    trainer = quiet_trainer(
        devices=2,
        strategy=kinds[strategy](),
        callbacks=[] if guard is None else [guard],
        accumulate_grad_batches=window,
    )
    with pytest.MonkeyPatch.context() as patch:
        if device_path:
            take_device_path(patch)
        trainer.fit(model)
    return weights_of(model)


def guarded_and_clean(
    strategy: str,
    faults: dict[int, str],
    leave_out: Any,
    settings: dict[str, Any],
    device_path: bool = False,
    window: int = 1,
) -> Result:
    guard = lo.NonFiniteGuard(**settings)
    guarded = train(strategy, faults, guard, (), device_path, window)
    clean = train(strategy, {}, None, leave_out, device_path, window)
    return guarded, clean, guard.events, guard.report().notes[-1]


RANKS = [
    # (loss, norm) of rank 0, of rank 1, and the code of both
    ((1.0, 1.0), (3.0, 5.0), 0),
    ((1.0, 5.0), (float("nan"), 1.0), 5),
    ((1.0, 1.0), (1.0, float("inf")), 4),
    ((1.0, 2e19), (1.0, 1.0), 4),
]


def detect_on_host_and_device() -> list[tuple[float, float, int]]:
    dist.init_process_group("gloo", rank=int(os.environ["LOCAL_RANK"]), world_size=2)
    found = []
    for make in (float, lambda value: torch.tensor(value, dtype=torch.float64)):
        for *values, _ in RANKS:
            loss, norm = map(make, values[dist.get_rank()])
            device, groups = torch.device("cpu"), (dist.group.WORLD,)
            detection = Detector(None, 3).detect(
                loss, norm, {}, loss_scale=None, reduce_on=device, groups=groups
            )
            found.append((float(detection.loss), float(detection.norm), int(detection.code)))
    return found


def test_ranks_share_the_mean_loss_and_the_largest_norm() -> None:
    first, second = launch(detect_on_host_and_device)
    assert repr(first) == repr(second)
    assert first[0] == (2.0, 5.0, 0)
    assert [code for *_, code in first] == [code for *_, code in RANKS] * 2
    assert repr(first[:4]) == repr(first[4:])


FAULTS = {0: "nan", 5: "log", 6: "inf", 12: "root", 15: "constant"}


@pytest.mark.parametrize("device_path", [False, True])
@pytest.mark.parametrize("strategy", ["ddp", "ddp_view", "fsdp2"])
def test_all_ranks_skip_the_fault_of_one_rank(strategy: str, device_path: bool) -> None:
    results = launch(guarded_and_clean, strategy, FAULTS, tuple(FAULTS), {}, device_path)
    for weights, clean, events, _ in results:
        assert_same_weights(weights, clean)
        assert [event["batch_idx"] for event in events] == sorted(FAULTS)
        assert [event["ranks"] for event in events] == [[1], [1], [1], [], [1]]
    assert repr(results[0][2]) == repr(results[1][2])


@pytest.mark.parametrize("device_path", [False, True])
@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_all_ranks_roll_back(strategy: str, device_path: bool) -> None:
    settings = {"policy": "rollback", "snapshot_every_n_steps": 5, "lr_backoff": 1.0}
    faults = dict.fromkeys(range(10, 16), "nan")
    lost = tuple(range(10, 18 if device_path else 16))
    for weights, clean, _, counts in launch(
        guarded_and_clean, strategy, faults, lost, settings, device_path
    ):
        assert_same_weights(weights, clean)
        assert "rollbacks 1" in counts


def test_all_ranks_roll_back_a_nan_weight_of_one_rank() -> None:
    settings = {"policy": "rollback", "snapshot_every_n_steps": 4, "lr_backoff": 1.0}
    for weights, clean, events, _ in launch(
        guarded_and_clean, "ddp", {10: "weight"}, (8, 9, 10), settings
    ):
        assert_same_weights(weights, clean)
        assert events[-1]["kind"] == "nonfinite_weight"
        assert events[-1]["parameters"] == ["head.weight"]


def stop(strategy: str, rank: int | None) -> tuple[str, list[str]]:
    """Return the error and the warnings before it."""
    faults, guard = dict.fromkeys(range(4, 24), "nan"), lo.NonFiniteGuard(max_consecutive=3)
    with mock.patch.object(events_module._logger, "warning") as warning:
        try:
            train(strategy, faults, guard, rank=rank)
        except FloatingPointError as error:
            return str(error), [call.args[1] for call in warning.call_args_list]
    return "", []


@pytest.mark.parametrize(
    ("strategy", "rank", "named"), [("ddp", None, "rank 0, 1"), ("fsdp2", 1, "rank 1")]
)
def test_all_ranks_stop_with_the_same_error(strategy: str, rank: int | None, named: str) -> None:
    (first, warnings), (second, others) = launch(stop, strategy, rank)
    assert first == second
    assert f"batch 6, {named}" in first
    assert len(warnings) == 2
    assert not others


@pytest.mark.parametrize("device_path", [False, True])
def test_all_ranks_skip_the_spike_of_one_rank(device_path: bool) -> None:
    for weights, clean, events, _ in launch(
        guarded_and_clean, "ddp", {21: "spike"}, (21,), {"spike": 5.0}, device_path
    ):
        assert [event["batch_idx"] for event in events] == [21]
        assert_same_weights(weights, clean)


def test_every_micro_batch_of_every_rank_counts() -> None:
    for weights, clean, events, _ in launch(
        guarded_and_clean, "ddp", {10: "nan"}, (9, 10, 11), {}, False, 3
    ):
        assert_same_weights(weights, clean)
        assert [event["batch_idx"] for event in events] == [10]
