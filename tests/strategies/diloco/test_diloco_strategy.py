"""DiLoCo in real processes over gloo, against simulations and against DDP."""

import copy
import os
import tempfile
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import LambdaCallback
from torch import Tensor, nn

import lightning_opt as lo
from tests.helpers.models import (
    SmallNet,
    TwoOptimizersNet,
    WholeBatchNet,
    assert_same_weights,
    batches_of,
    loader_of,
    weights_of,
)
from tests.helpers.processes import launch
from tests.helpers.trainers import MemoryLogger, SaveAt, quiet_trainer
from tests.strategies.diloco.reference import assert_equals_simulation
from tests.strategies.runs import SHORT_WAIT, dist_world, fit, same_on_all_ranks

pytestmark = pytest.mark.distributed

STEPS = 22

WINDOW: dict[str, Any] = {"sync_every": 4, "outer_lr": 0.7, "outer_momentum": 0.8}


class Net(SmallNet):
    """A small net of several parameters that trains for ``STEPS`` batches."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**{"optimizer": "AdamW", "widths": (7, 5, 3), **settings})

    def train_dataloader(self) -> Any:
        return loader_of(STEPS, 12)


def loss_of(model: nn.Module, step: int, replica: int) -> Tensor:
    inputs, targets = batches_of(STEPS, 12).tensors
    rows = slice(12 * step, 12 * (step + 1))
    world = dist_world()
    inputs, targets = inputs[rows][replica::world], targets[rows][replica::world]
    return nn.functional.mse_loss(model.layer(inputs.double()), targets.double())  # type: ignore[operator]


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.02)


NAMES = [f"layer.{place}.{kind}" for place in (0, 2, 4, 6) for kind in ("weight", "bias")]


def _train_and_compare(settings: dict[str, Any], names: Any, nan_at: Any) -> None:
    class PlantNaN(Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
            if nan_at == (trainer.global_step, trainer.global_rank):
                with torch.no_grad():
                    for parameter in module.parameters():
                        parameter.fill_(torch.nan)

    model = Net()
    strategy = lo.DiLoCoStrategy(**settings, compression="float32")
    fit(model, strategy, precision="64-true", callbacks=[PlantNaN()])
    assert same_on_all_ranks(model)
    algorithm = {**settings, "fragments": names, "nan_at": nan_at, "replicas": dist_world()}
    assert_equals_simulation(model, Net(), loss_of, adamw, steps=STEPS, **algorithm)


def _simulations() -> None:
    _train_and_compare(WINDOW, None, None)
    _train_and_compare({"sync_every": 5, "outer_lr": 1.0, "outer_momentum": 0.0}, None, None)
    streaming = {**WINDOW, "sync_every": 6, "fragments": 3}
    # A parameter belongs to the third of the 111 elements that contains its middle.
    names = [NAMES[:1], NAMES[1:3], NAMES[3:]]
    _train_and_compare({**streaming, "delay": 0}, names, None)
    _train_and_compare({**streaming, "delay": 3}, names, None)
    _train_and_compare(WINDOW, None, (9, 1))


@pytest.mark.parametrize("processes", [2, 3])
def test_training_equals_the_published_algorithm(processes):
    launch(_simulations, processes=processes)


# --- resume and features of Lightning ----------------------------------------------------------

STREAMING = {**WINDOW, "sync_every": 6, "fragments": 3, "delay": 3, "compression": "int4"}


def _resume(folder: str) -> None:
    path = f"{folder}/half.ckpt"
    states: list[dict[str, Any]] = []

    def keep(trainer: Any, *_: Any) -> None:
        if not states:
            states.append(trainer.strategy._replica.state_dict())
            states.append(copy.deepcopy(states[0]))

    for precision in ("bf16-true", "32-true"):
        first, second = Net(), Net()
        save, keeps = SaveAt(path, 9), LambdaCallback(on_train_batch_end=keep)
        fit(first, lo.DiLoCoStrategy(**STREAMING), callbacks=[save], precision=precision)
        trainer = fit(
            second,
            lo.DiLoCoStrategy(**STREAMING),
            ckpt_path=path,
            callbacks=[keeps],
            precision=precision,
        )
        assert_same_weights(first, second)
        assert same_on_all_ranks(second)
        torch.testing.assert_close(*states, rtol=0, atol=0)  # in spite of later outer steps
        states.clear()
    trainer.predict(Net(), loader_of(1, 12), ckpt_path=path)  # does not resume the next fit
    trainer.fit_loop.max_epochs += 1
    trainer.fit(Net())
    assert states[0]["step"] == 1


def _resume_with_other_ranks(folder: str) -> Any:
    model = Net()
    at_start: list[dict[str, Tensor]] = []
    start = LambdaCallback(on_train_start=lambda _, module: at_start.append(weights_of(module)))
    trainer = fit(
        model, lo.DiLoCoStrategy(**STREAMING), ckpt_path=f"{folder}/half.ckpt", callbacks=[start]
    )
    assert trainer.global_step == STEPS
    content = torch.load(f"{folder}/half.ckpt", weights_only=True)
    assert_same_weights(at_start[0], content["state_dict"])
    if dist.is_initialized() and dist.get_world_size() > 1:
        assert same_on_all_ranks(model)
    assert all(weight.isfinite().all() for weight in model.parameters())


def test_resume_is_bit_exact_and_works_at_other_numbers_of_ranks(tmp_path):
    launch(_resume, str(tmp_path))
    launch(_resume_with_other_ranks, str(tmp_path), processes=3)
    launch(_resume_with_other_ranks, str(tmp_path), processes=1)


class SameState(Callback):
    """Records whether all ranks have the same weights and buffers."""

    def __init__(self) -> None:
        self.validation: list[bool] = []
        self.training: list[bool] = []

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        self.training.append(same_on_all_ranks(module))

    def on_validation_start(self, trainer: Any, module: Any) -> None:
        self.validation.append(same_on_all_ranks(module))


class UnusualNet(Net):
    """Tied weights, a layer frozen in epoch 0, BatchNorm, a mask, an EMA teacher."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(6)
        self.frozen = nn.Linear(6, 6)
        self.frozen.requires_grad_(False)
        self.tied = nn.Linear(6, 6)
        self.again = nn.Linear(6, 6)
        self.again.weight = self.tied.weight
        self.register_buffer("mask", torch.full((3,), -torch.inf))
        self.register_buffer("thirds", torch.full((3,), 1 / 3))
        self.teacher = nn.Linear(6, 6).requires_grad_(False)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.again(self.tied(self.frozen(self.norm(inputs))))
        return self.layer(hidden + self.teacher(inputs))

    def on_train_epoch_start(self) -> None:
        self.frozen.requires_grad_(self.current_epoch > 0)

    def on_train_batch_end(self, *_: Any) -> None:
        self.teacher.weight.data.lerp_(self.tied.weight.data, 0.1)  # through .data, as is common


def _unusual_net(settings: dict[str, Any]) -> None:
    model, states = UnusualNet(), SameState()
    frozen, teacher = model.frozen.weight.clone(), model.teacher.weight.clone()
    fit(
        model,
        lo.DiLoCoStrategy(**settings),
        callbacks=[states],
        max_epochs=2,
        val_check_interval=9,
        limit_val_batches=1,
    )
    assert states.validation == [True] * 4
    assert same_on_all_ranks(model)
    assert not all(states.training)
    assert model.again.weight is model.tied.weight
    assert not torch.equal(frozen, model.frozen.weight)
    assert not torch.equal(teacher, model.teacher.weight)
    assert model.mask.equal(torch.full((3,), -torch.inf))
    assert model.thirds.equal(torch.full((3,), 1 / 3))
    assert not model.norm.running_mean.equal(torch.zeros(6))


class TwoOptimizers(TwoOptimizersNet, Net):
    pass


class Spoil(Callback):
    """Moments of rank 1 become NaN, and in a later window its weights too."""

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        step, bad = trainer.global_step, trainer.global_rank == 1
        for optimizer in trainer.optimizers if bad and step in (10, 18) else []:
            for state in optimizer.state.values():
                state["momentum_buffer"].fill_(torch.nan)
        if step == 10:
            with tempfile.TemporaryDirectory() as folder:
                trainer.save_checkpoint(path := f"{folder}/now.ckpt")
                if not bad:
                    self.saved = torch.load(path, weights_only=True)["optimizer_states"]
        if step == 18 and bad:
            for parameter in module.parameters():
                parameter.data.fill_(torch.nan)


class WithMomentum(TwoOptimizers):
    def configure_optimizers(self) -> Any:
        optimizers = super().configure_optimizers()
        for optimizer in optimizers:
            optimizer.param_groups[0]["momentum"] = 0.5
        return optimizers


def _nan_in_two_optimizers() -> None:
    spoil = Spoil()
    trainer = fit(WithMomentum(), lo.DiLoCoStrategy(**WINDOW), callbacks=[spoil])
    states = [optimizer.state_dict() for optimizer in trainer.optimizers]
    for state in states + getattr(spoil, "saved", []):
        for own in state["state"].values():
            assert own["momentum_buffer"].isfinite().all()


def _two_optimizers() -> None:
    """With two optimizers, windows count the steps of both, as ``trainer.global_step`` does."""

    def sgd(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.05)

    def alternating(net: nn.Module, step: int, replica: int) -> Tensor:
        for place, parameter in enumerate(net.parameters()):
            parameter.requires_grad_(place % 2 == step % 2)
        return loss_of(net, step // 2, replica)

    model = TwoOptimizers()
    fit(model, lo.DiLoCoStrategy(**WINDOW, compression="float32"), precision="64-true")
    assert_equals_simulation(model, Net(), alternating, sgd, steps=2 * STEPS, **WINDOW)


def _accumulation() -> None:
    """With accumulation, windows count optimizer steps."""

    def mean_of_two(net: nn.Module, step: int, replica: int) -> Tensor:
        return (loss_of(net, 2 * step, replica) + loss_of(net, 2 * step + 1, replica)) / 2

    model, strategy = Net(), lo.DiLoCoStrategy(**WINDOW, compression="float32")
    fit(model, strategy, precision="64-true", accumulate_grad_batches=2)
    assert_equals_simulation(model, Net(), mean_of_two, adamw, steps=STEPS // 2, **WINDOW)


def _precisions() -> None:
    for precision in ("bf16-true", "bf16-mixed"):
        model = Net()
        start = weights_of(model)
        fit(model, lo.DiLoCoStrategy(4, fragments=2, delay=1), precision=precision)
        assert same_on_all_ranks(model)
        assert not torch.equal(start["layer.0.weight"], model.layer[0].weight.float())  # type: ignore[index]
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=7)
    model = Net()
    fit(model, lo.DiLoCoStrategy(4), scaler=scaler)
    assert same_on_all_ranks(model)
    assert all(weight.isfinite().all() for weight in model.parameters())


def _features() -> None:
    _unusual_net({"sync_every": 4})
    _unusual_net(STREAMING)
    _two_optimizers()
    _nan_in_two_optimizers()
    _accumulation()
    _precisions()


def test_frozen_layers_two_optimizers_accumulation_and_precisions_work():
    launch(_features)


def _two_machines() -> None:
    """Two machines of two processes: DDP within a machine, DiLoCo between machines."""
    rank = int(os.environ["RANK"])
    os.environ.update(NODE_RANK=str(rank // 2), LOCAL_RANK=str(rank % 2), LOCAL_WORLD_SIZE="2")

    def machine_loss(net: nn.Module, step: int, replica: int) -> Tensor:
        inputs, targets = (t[12 * step : 12 * (step + 1)] for t in batches_of(STEPS, 12).tensors)
        losses = [
            nn.functional.mse_loss(net.layer(inputs[r::4].double()), targets[r::4].double())  # type: ignore[operator]
            for r in (2 * replica, 2 * replica + 1)
        ]
        return sum(losses) / 2  # type: ignore[return-value]

    for delay in (0, 2):
        model, strategy = Net(), lo.DiLoCoStrategy(**WINDOW, delay=delay, compression="float32")
        fit(model, strategy, precision="64-true", num_nodes=2)
        assert same_on_all_ranks(model)
        assert_equals_simulation(
            model, Net(), machine_loss, adamw, steps=STEPS, delay=delay, **WINDOW
        )


class SameDataNet(WholeBatchNet, Net):
    """All ranks have the same batches, so they train and are measured like one process."""


def _train_on_same_data(**settings: Any) -> tuple[Any, ...]:
    model, curvature = SameDataNet(optimizer="SGD"), lo.CurvatureMonitor(every_n_steps=5)
    losses: list[Tensor] = []
    record = LambdaCallback(on_train_batch_end=lambda *args: losses.append(args[2]["loss"]))
    callbacks = [curvature, lo.Accumulation(normalize="samples"), record]
    quiet_trainer(callbacks=callbacks, limit_val_batches=0, **settings).fit(model)
    return weights_of(model), curvature.history, losses


def _processes_of_two_machines() -> Any:
    _two_machines()
    strategy = lo.DiLoCoStrategy(100)
    return _train_on_same_data(strategy=strategy, num_nodes=2, devices=2)


def test_processes_within_a_machine_train_with_ddp():
    alone = _train_on_same_data()
    for found in launch(_processes_of_two_machines, processes=4):
        torch.testing.assert_close(found, alone)


def _restore_weights() -> None:
    """One rank restores its weights while a fragment is in flight; then a second fit."""

    class RestoreWeights(Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
            if trainer.global_step != 5 or trainer.global_rank != 1:
                return
            for parameter in module.parameters():
                parameter.data.fill_(9.0)
            trainer.strategy.reset_residuals()
            for fragment in trainer.strategy._replica._fragments:
                for parameter, shared in fragment.parts(fragment.outer):
                    assert torch.equal(parameter, shared)
                    assert parameter.abs().max() < 9
                assert fragment.pseudo_gradient is None

    model = Net()
    trainer = fit(model, lo.DiLoCoStrategy(**STREAMING), callbacks=[RestoreWeights()])
    before = weights_of(model)
    trainer.fit_loop.max_epochs += 1
    trainer.fit(model)
    assert same_on_all_ranks(model)
    assert not torch.equal(before["layer.0.weight"], model.layer[0].weight)  # type: ignore[index]
    assert len(trainer.callbacks) == 1  # the strategy's own callback is removed after a fit


def test_ranks_stay_equal_after_restored_weights_and_in_a_second_fit():
    launch(_restore_weights)


def _log(path: str) -> Any:
    """Of a run that is resumed from step 8."""
    fit(Net(widths=(64, 64)), lo.DiLoCoStrategy(4), callbacks=[SaveAt(path, 8)])
    logger = MemoryLogger()
    model = Net(widths=(64, 64))
    fit(model, lo.DiLoCoStrategy(4), logger=logger, log_every_n_steps=4, ckpt_path=path)
    numel = sum(parameter.numel() for parameter in model.parameters())
    return logger.records, numel


def test_traffic_and_drift_are_logged(tmp_path):
    records, numel = launch(_log, str(tmp_path / "8.ckpt"))[0]
    found = [(step, values) for step, values in records if "comm/bytes" in values]
    assert [step for step, _ in found] == [11, 15, 19]
    for _, values in found:
        # A byte per element in a window of four steps, plus headers, scales and padding.
        assert numel / 4 < values["comm/bytes"] < numel / 4 + 600
        assert 0 < values["comm/wait_s"] < 10
        assert values["diloco/drift"] > 0
        assert values["diloco/outer_norm"] > 0


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"sync_every": 0}, "sync_every must"),
        ({"outer_momentum": 1.0}, "outer_momentum must"),
        ({"fragments": 17}, "fragments=17 and delay=0 do not fit into sync_every=16"),
        ({"delay": 16}, "fragments=1 and delay=16 do not fit into sync_every=16"),
        ({"compression": "int2"}, "compression must be one of 'int8', 'int4', 'float32'"),
    ],
)
def test_invalid_arguments_raise(settings, words):
    with pytest.raises(ValueError, match=words):
        lo.DiLoCoStrategy(**settings)


def test_outer_rate_and_momentum_depend_on_the_window():
    for sync_every, expected in ((16, (1.0, 0.0)), (17, (0.7, 0.8))):
        plan = lo.DiLoCoStrategy(sync_every).plan
        assert (plan.outer_lr, plan.outer_momentum) == expected


def _lose_a_replica() -> None:
    """Rank 1 dies within a window, while a fragment is in flight."""

    def die(trainer: Any, *_: Any) -> None:
        if trainer.global_rank == 1 and trainer.global_step == 9:
            os._exit(3)

    strategy = lo.DiLoCoStrategy(**STREAMING, timeout=SHORT_WAIT)
    fit(Net(), strategy, callbacks=[LambdaCallback(on_train_batch_end=die)])


def test_lost_replica_ends_the_other_processes():
    with pytest.raises(AssertionError, match=r"(?s)rank 0 ended with 1.*rank 1 ended with 3"):
        launch(_lose_a_replica)
