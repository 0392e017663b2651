"""Responses to faults in a row: reduced learning rate, rollback, stop."""

from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from torch import Tensor, nn
from torch.optim.lr_scheduler import ExponentialLR

import lightning_opt as lo
from lightning_opt.gradients.guard import escalation as escalation_module
from lightning_opt.gradients.guard.escalation import Escalation
from tests.gradients.faulty import FaultyNet, all_finite, fit, optimizer_state
from tests.helpers.models import assert_same_state, assert_same_weights
from tests.helpers.trainers import loss_scaling


class Remembering(ExponentialLR):
    """Its state has a list that grows."""

    def step(self, *args: Any) -> None:
        super().step(*args)
        self.__dict__.setdefault("rates", []).extend(self.get_last_lr())


class Scheduled(FaultyNet):
    """AdamW with a learning rate that falls at every step."""

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        scheduler = Remembering(optimizer, 0.97)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


def scheduled(faults: Any, *, leave_out: Any = (), batches: int = 40, fused: bool = False) -> Any:
    settings = {"lr": 0.02, "fused": fused}
    return Scheduled(faults, torch.optim.AdamW, settings, batches=batches, leave_out=leave_out)


def in_a_row(start: int, stop: int, kind: str = "nan") -> dict[int, str]:
    return dict.fromkeys(range(start, stop), kind)


def test_responses_to_faults_in_a_row() -> None:
    def responses(policy: Any, faults: int, kind: Any = "nonfinite_loss", **settings: Any) -> Any:
        escalation, actions = Escalation(policy, **settings), []
        for _ in range(faults):
            actions.append(escalation.record(0, kind))
            if actions[-1] == "rollback":
                escalation.record_rollback()
        return actions

    skip = ["skip", "skip", "backoff", *["skip"] * 6, "raise"]
    assert responses("skip", 10) == skip
    rollback = ["skip", "skip", "backoff", "skip", "skip", "rollback", *["skip"] * 3, "raise"]
    assert responses("rollback", 10) == rollback
    assert responses("raise", 1) == ["raise"]
    assert responses("skip", 4, lr_backoff=1.0) == ["skip"] * 4
    assert responses("skip", 2, max_consecutive=2) == ["skip", "raise"]
    for spike in ("loss_spike", "gradient_spike"):
        assert "raise" not in responses("skip", 30, spike, max_consecutive=2)


class Rates(torch.optim.SGD):
    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.used: list[float] = []

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        result = super().step(closure)
        self.used.append(float(self.param_groups[0]["lr"]))
        return result


@pytest.mark.parametrize("tensor", [False, True])
@pytest.mark.parametrize("scaler", [False, True])
def test_scale_multiplies_the_schedule(
    scaler: bool, tensor: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(escalation_module, "RECOVERY_STEPS", 4)
    seen: list[float] = []

    class Net(FaultyNet):
        def configure_optimizers(self) -> Any:
            lr: Any = torch.tensor(0.01) if tensor else 0.01
            self.rates = Rates(self.parameters(), lr=lr, foreach=False)
            schedule = ExponentialLR(self.rates, 0.9)
            return [self.rates], [{"scheduler": schedule, "interval": "step"}]

    class Reader(Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            seen.append(float(trainer.optimizers[0].param_groups[0]["lr"]))

    plugins = loss_scaling(2.0) if scaler else None
    guard = lo.NonFiniteGuard()
    model = Net(in_a_row(5, 8), batches=16)
    fit(model, guard, Reader(), plugins=plugins)
    assert seen == pytest.approx([0.01 * 0.9 ** (step + 1) for step in range(16)], rel=1e-5)
    scales = [1.0] * 8 + [0.5 ** (1 - step / 4) for step in (1, 2, 3, 4)] + [1.0] * 4
    # The scale of a step includes the response to its own fault.
    expected = [0.01 * 0.9**step * scale for step, scale in enumerate(scales)]
    # A skipped step does not reach the end of `step`, where the rate is recorded.
    assert model.rates.used == pytest.approx(expected[:5] + expected[8:], rel=1e-5)


def test_learning_rate_set_by_the_model_is_kept() -> None:
    class Net(FaultyNet):
        def on_before_optimizer_step(self, optimizer: Any) -> None:
            optimizer.param_groups[0]["lr"] = 0.001 * (self.trainer.global_step + 1)

    model = fit(Net(in_a_row(2, 5)), lo.NonFiniteGuard())
    assert model.trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.012)


class TwoOptimizers(FaultyNet):
    """Manual optimization, with an optimizer for each layer and a group for each parameter."""

    automatic_optimization = False
    gradients_left: tuple[int, ...] = ()

    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        loss = super().training_step(batch, batch_idx)
        self.zero_grad()
        self.manual_backward(loss)
        for optimizer in self.optimizers():
            optimizer.step()
            for group in optimizer.param_groups:
                group["lr"] *= 1.0 if self.fault_of(int(batch[0])) else 0.97

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.head.weight.grad is not None:
            self.gradients_left += (batch_idx,)

    def configure_optimizers(self) -> Any:
        layers = (self.encoder, self.norm, self.head)
        groups = [[{"params": [p]} for p in layer.parameters()] for layer in layers]
        return [self.optimizer(own, **self.settings) for own in groups]


# --- rollback ---------------------------------------------------------------------------------
# Bit-identical to a run without the batches between snapshot and rollback.
def test_run_continues_from_the_snapshot_with_later_data(device_path: bool) -> None:
    """The second rollback is to the same snapshot, because only 8 good steps precede it."""
    delay = 2 if device_path else 0  # steps until the result arrives
    faults = in_a_row(15, 21) | in_a_row(29, 35, "root")
    guard = lo.NonFiniteGuard("rollback", snapshot_every_n_steps=10, lr_backoff=1.0)
    rolled = fit(scheduled(faults, fused=device_path), guard)
    clean = fit(scheduled({}, leave_out=range(10, 35 + delay), fused=device_path))
    assert_same_weights(rolled, clean)
    torch.testing.assert_close(optimizer_state(rolled), optimizer_state(clean), rtol=0, atol=0)
    schedules = [m.lr_schedulers().state_dict() for m in (rolled, clean)]
    assert schedules[0] == schedules[1]
    assert "rollbacks 2" in guard.report().notes[-1]
    assert [event["batch_idx"] for event in guard.events][:6] == list(range(15, 21))
    assert [event["action"] for event in guard.events][:6] == ["skip"] * 5 + ["rollback"]


@pytest.mark.parametrize("start", [3, 15])
def test_all_optimizers_are_restored(start: int) -> None:
    """To the state after batch 9, or to no state before the first. One more fault follows."""
    settings = (torch.optim.AdamW, {"lr": 0.02})
    guard = lo.NonFiniteGuard("rollback", snapshot_every_n_steps=10, lr_backoff=1.0)
    rolled = fit(TwoOptimizers(in_a_row(start, start + 7), *settings, batches=30), guard)
    left_out = range(start // 10 * 10, start + 7)
    clean = fit(TwoOptimizers({}, *settings, batches=30, leave_out=left_out))
    assert guard.escalation.rollbacks == 1
    assert set(range(30)) - set(rolled.gradients_left) == {start + 5}
    assert_same_weights(rolled, clean)
    torch.testing.assert_close(optimizer_state(rolled), optimizer_state(clean), rtol=0, atol=0)


def test_restores_are_counted_per_snapshot() -> None:
    faults = {k: v for start in range(4, 50, 12) for k, v in in_a_row(start, start + 6).items()}
    guard = lo.NonFiniteGuard("rollback", snapshot_every_n_steps=5)
    assert all_finite(fit(scheduled(faults, batches=50), guard))
    assert guard.escalation.rollbacks == 4


def test_loss_scaler_is_restored() -> None:
    plugins = loss_scaling(64.0)
    guard = lo.NonFiniteGuard("rollback", snapshot_every_n_steps=10, lr_backoff=1.0)
    fit(FaultyNet(in_a_row(15, 21), batches=30), guard, plugins=plugins)
    scaler = plugins.scaler
    assert scaler is not None
    assert scaler.get_scale() == 64.0  # six faults had halved it six times
    assert scaler._get_growth_tracker() == 10 + 9


def test_same_snapshot_is_restored_at_most_three_times() -> None:
    faults = {k: v for first in (4, 11, 18, 25) for k, v in in_a_row(first, first + 6).items()}
    guard = lo.NonFiniteGuard("rollback")
    with pytest.raises(FloatingPointError, match="rollbacks: 3"):
        fit(scheduled(faults), guard)
    assert "lr_scale 0.0625" in guard.report().notes[-1]  # three backoffs and three rollbacks
    assert guard.events[-1]["batch_idx"] == 30
    assert guard.events[-1]["action"] == "raise"


def test_spike_that_cannot_be_rolled_back_is_skipped() -> None:
    faults: dict[int, str] = {}
    for first in (40, 47, 54, 61):
        faults |= in_a_row(first, first + 6, "spike")
    guard = lo.NonFiniteGuard("rollback", spike=6.0)
    fit(FaultyNet(faults, settings={"lr": 1e-9}, batches=70), guard)
    assert [event["batch_idx"] for event in guard.events] == list(faults)
    assert [event["action"] for event in guard.events][5::6] == ["rollback"] * 3 + ["skip"]


def test_nan_weight_is_rolled_back(device_path: bool) -> None:
    guard = lo.NonFiniteGuard("rollback", snapshot_every_n_steps=10, lr_backoff=1.0)
    rolled = fit(scheduled({15: "weight"}, fused=device_path), guard)
    last = 17 if device_path else 15
    clean = fit(scheduled({}, leave_out=range(10, last + 1), fused=device_path))
    assert_same_weights(rolled, clean)
    event = guard.events[-1]
    assert (event["batch_idx"], event["kind"]) == (15, "nonfinite_weight")
    assert event["parameters"] == ["head.weight"]


def test_nan_weight_without_a_snapshot_stops_the_run() -> None:
    guard = lo.NonFiniteGuard()
    with pytest.raises(FloatingPointError, match=r"batch 5.*head\.weight.*policy='rollback'"):
        fit(FaultyNet({5: "weight"}), guard)
    assert [event["kind"] for event in guard.events] == ["nonfinite_weight"]


def test_unused_nan_weight_is_found_when_a_snapshot_is_due() -> None:
    class Net(FaultyNet):
        def __init__(self, *args: Any, **settings: Any) -> None:
            super().__init__(*args, **settings)
            self.spare = nn.Linear(2, 2)

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            if batch_idx == 5:
                self.spare.weight.data[0, 0] = float("inf")
            return super().training_step(batch, batch_idx)

    guard = lo.NonFiniteGuard("rollback", snapshot_every_n_steps=10)
    assert all_finite(fit(Net(), guard))
    (event,) = guard.events
    assert (event["parameters"], event["batch_idx"]) == (["spare.weight"], None)
    assert "nonfinite_weight" in guard.report().to_text()


def test_nan_in_a_large_buffer_is_rolled_back() -> None:
    class Net(FaultyNet):
        def __init__(self, *args: Any, **settings: Any) -> None:
            super().__init__(*args, **settings)
            self.register_buffer("queue", torch.zeros(2**16 + 1))

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = super().training_step(batch, batch_idx) + self.queue.sum()
            self.queue[0] = loss.detach() * 0
            return loss

    guard = lo.NonFiniteGuard("rollback", snapshot_every_n_steps=3, lr_backoff=1.0)
    model = fit(Net({7: "nan"}), guard)
    assert all_finite(model)
    assert guard.events[-1]["parameters"] == ["queue"]
    assert_same_weights(model, fit(Net({}, leave_out=(6, 7))))


@pytest.mark.parametrize("at", [5, 11])
def test_policy_raise_stops_at_the_first_fault(at: int, device_path: bool) -> None:
    settings = torch.optim.AdamW, {"lr": 0.01, "fused": device_path}
    model, guard = FaultyNet({at: "log"}, *settings), lo.NonFiniteGuard("raise")
    with pytest.raises(FloatingPointError, match=rf"at step {at} \(epoch 0, batch {at}, rank 0\)"):
        fit(model, guard)
    late = 0 if at == 11 or not device_path else 2  # steps until the result arrives
    left_out = {at, *range(at + late + 1, 12)}
    assert_same_weights(model, fit(FaultyNet({}, *settings, leave_out=left_out)))


def test_run_stops_after_max_consecutive_faults() -> None:
    model, guard = FaultyNet(in_a_row(3, 12)), lo.NonFiniteGuard(max_consecutive=5)
    with pytest.raises(FloatingPointError, match="Faults in a row: 5") as stopped:
        fit(model, guard)
    message = str(stopped.value)
    for part in (
        "policy='skip'",
        "batch 7",
        "encoder.weight",
        "skipped: 5 of 8",
        "wrong labels",
    ):
        assert part in message
    assert_same_weights(model, fit(FaultyNet({}, leave_out=range(3, 12))))


def test_run_of_another_model_starts_anew() -> None:
    guard, fresh = (lo.NonFiniteGuard("rollback") for _ in range(2))
    fit(FaultyNet(in_a_row(9, 12)), guard)
    fit(FaultyNet({}), guard)
    fit(FaultyNet({}), fresh)
    assert_same_state(guard.state_dict(), fresh.state_dict())
    broken = FaultyNet({})
    with torch.no_grad():
        broken.head.weight.fill_(float("nan"))
    with pytest.raises(FloatingPointError, match=r"head\.weight"):
        fit(broken, guard)  # no snapshot of the model before
