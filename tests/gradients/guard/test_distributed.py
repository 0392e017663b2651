"""All ranks respond to a fault of one rank: real processes over gloo, launched once."""

from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from torch import Tensor

import lightning_opt as lo
from lightning_opt.gradients.guard import events as events_module
from lightning_opt.gradients.guard.detector import Detector
from tests.gradients.faulty import FaultyNet
from tests.helpers.models import assert_same_weights, shard, weights_of
from tests.helpers.processes import launch
from tests.helpers.syncs import take_device_path
from tests.helpers.trainers import quiet_trainer

pytestmark = pytest.mark.distributed


class ShardedNet(FaultyNet):
    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.norm = torch.nn.Identity()  # type: ignore[assignment]

    def configure_model(self) -> None:
        if self.device_mesh is not None and not hasattr(self.head, "set_reshard_after_backward"):
            shard(self, self.encoder, self.head)


def train(
    strategy: str,
    faults: dict[int, str],
    *callbacks: Callback,
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
        callbacks=list(callbacks),
        accumulate_grad_batches=window,
    )
    with pytest.MonkeyPatch.context() as patch:
        if device_path:
            take_device_path(patch)
        trainer.fit(model)
    return weights_of(model)


class Case(NamedTuple):
    """A guarded run with faults on rank 1, and a run without the batches ``lost`` to them."""

    strategy: str
    faults: dict[int, str]
    lost: Any
    guard: dict[str, Any]
    device_path: bool = False
    window: int = 1

    def run(self) -> Any:
        """Return the weights of both runs, the guard's events and its counts."""
        guard, settings = lo.NonFiniteGuard(**self.guard), self._asdict()
        settings = {key: settings[key] for key in ("device_path", "window")}
        guarded = train(self.strategy, self.faults, guard, **settings)
        clean = train(self.strategy, {}, leave_out=self.lost, **settings)
        return guarded, clean, guard.events, guard.report().notes[-1]


FAULTS = {0: "nan", 5: "log", 6: "inf", 12: "root", 15: "constant"}
ROLLBACK = {"policy": "rollback", "lr_backoff": 1.0}
IN_A_ROW = dict.fromkeys(range(10, 16), "nan")
CASES = {
    **{
        f"skip-{strategy}-{path}": Case(strategy, FAULTS, tuple(FAULTS), {}, path == "device")
        for strategy in ("ddp", "ddp_view", "fsdp2")
        for path in ("host", "device")
    },
    **{
        f"rollback-{strategy}-{path}": Case(
            strategy, IN_A_ROW, range(10, end), {**ROLLBACK, "snapshot_every_n_steps": 5}, end == 18
        )
        for strategy in ("ddp", "fsdp2")
        for path, end in (("host", 16), ("device", 18))
    },
    "weight": Case("ddp", {10: "weight"}, (8, 9, 10), {**ROLLBACK, "snapshot_every_n_steps": 4}),
    **{
        f"spike-{path}": Case("ddp", {21: "spike"}, (21,), {"spike": 5.0}, path == "device")
        for path in ("host", "device")
    },
    "micro-batches": Case("ddp", {10: "nan"}, (9, 10, 11), {}, window=3),
}


def named(kind: str) -> Any:
    return pytest.mark.parametrize("name", [name for name in CASES if name.startswith(kind)])


RANKS = [
    # (loss, norm) of rank 0, of rank 1, and the code of both
    ((1.0, 1.0), (3.0, 5.0), 0),
    ((1.0, 5.0), (float("nan"), 1.0), 5),
    ((1.0, 1.0), (1.0, float("inf")), 4),
    ((1.0, 2e19), (1.0, 1.0), 4),
]


def detect_on_host_and_device() -> list[tuple[float, float, int]]:
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


def stop(strategy: str, rank: int | None) -> tuple[str, list[str]]:
    """Return the error and the warnings before it."""
    faults, guard = dict.fromkeys(range(4, 24), "nan"), lo.NonFiniteGuard(max_consecutive=3)
    with mock.patch.object(events_module._logger, "warning") as warning:
        try:
            train(strategy, faults, guard, rank=rank)
        except FloatingPointError as error:
            return str(error), [call.args[1] for call in warning.call_args_list]
    return "", []


class OnRank1(Callback):
    """Reads the guard's state or removes the gradients, on one rank only."""

    def __init__(self, what: str, guard: lo.NonFiniteGuard) -> None:
        self.what, self.guard = what, guard

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        if self.what == "gradients" and trainer.global_rank == 1 and trainer.global_step > 8:
            optimizer.zero_grad()

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if self.what == "state" and trainer.global_rank == 1:
            self.guard.state_dict()


def alone(what: str) -> Any:
    guard = lo.NonFiniteGuard(**ROLLBACK, snapshot_every_n_steps=5)
    train("ddp", IN_A_ROW, OnRank1(what, guard), guard, device_path=True, rank=None)
    return guard.events, guard.report().notes[-1]


def run_all() -> dict[str, Any]:
    runs = {name: case.run() for name, case in CASES.items()}
    return {
        **runs,
        "alone": [alone(what) for what in ("state", "gradients")],
        "detections": detect_on_host_and_device(),
        "stop-ddp": stop("ddp", None),
        "stop-fsdp2": stop("fsdp2", 1),
    }


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return launch(run_all)


def test_ranks_share_the_mean_loss_and_the_largest_norm(ranks: Any) -> None:
    first, second = (rank["detections"] for rank in ranks)
    assert repr(first) == repr(second)
    assert first[0] == (2.0, 5.0, 0)
    assert [code for *_, code in first] == [code for *_, code in RANKS] * 2
    assert repr(first[:4]) == repr(first[4:])


@pytest.mark.parametrize("name", CASES)
def test_fault_of_one_rank_leaves_no_trace(name: str, ranks: Any) -> None:
    for rank in ranks:
        weights, clean, *_ = rank[name]
        assert_same_weights(weights, clean)
    assert repr(ranks[0][name][2]) == repr(ranks[1][name][2])


@named("skip")
def test_all_ranks_skip_the_fault_of_one_rank(name: str, ranks: Any) -> None:
    events = ranks[0][name][2]
    assert [event["batch_idx"] for event in events] == sorted(FAULTS)
    assert [event["ranks"] for event in events] == [[1], [1], [1], [], [1]]


@named("rollback")
def test_all_ranks_roll_back(name: str, ranks: Any) -> None:
    assert all("rollbacks 1" in rank[name][3] for rank in ranks)


def test_ranks_respond_at_the_same_step_whatever_one_of_them_does(ranks: Any) -> None:
    for first, second in zip(*(rank["alone"] for rank in ranks), strict=True):
        assert "rollbacks 1" in first[1]
        assert first[1] == second[1]
        assert [e["step"] for e in first[0]] == [e["step"] for e in second[0]]


def test_all_ranks_roll_back_a_nan_weight_of_one_rank(ranks: Any) -> None:
    event = ranks[0]["weight"][2][-1]
    assert (event["kind"], event["parameters"]) == ("nonfinite_weight", ["head.weight"])


@named("spike")
def test_all_ranks_skip_the_spike_of_one_rank(name: str, ranks: Any) -> None:
    events = ranks[0][name][2]
    assert [(event["batch_idx"], event["kind"]) for event in events] == [(21, "loss_spike")]


def test_every_micro_batch_of_every_rank_counts(ranks: Any) -> None:
    assert [event["batch_idx"] for event in ranks[0]["micro-batches"][2]] == [10]


@pytest.mark.parametrize(("strategy", "named"), [("ddp", "rank 0, 1"), ("fsdp2", "rank 1")])
def test_all_ranks_stop_with_the_same_error(strategy: str, named: str, ranks: Any) -> None:
    (first, warnings), (second, others) = (rank[f"stop-{strategy}"] for rank in ranks)
    assert first == second
    assert f"batch 6, {named}" in first
    assert len(warnings) == 2
    assert not others
