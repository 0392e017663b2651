"""A skipped step leaves no trace, and its fault is recorded."""

import math
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from torch import Tensor

import lightning_opt as lo
from tests.gradients.faulty import FaultyNet, all_finite, fit, optimizer_state
from tests.helpers.models import (
    AdversarialNet,
    assert_same_state,
    assert_same_weights,
    load_changed_state,
)
from tests.helpers.trainers import (
    GradientSpy,
    MemoryLogger,
    SaveAt,
    loss_scaling,
    quiet_trainer,
)

FUSED: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "sgd": (torch.optim.SGD, {"lr": 0.02}),
    "momentum": (
        torch.optim.SGD,
        {"lr": 0.02, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
    ),
    "adam": (torch.optim.Adam, {"amsgrad": True, "lr": 0.02}),
    "adamw": (torch.optim.AdamW, {"lr": 0.02, "weight_decay": 0.1}),
    "adagrad": (torch.optim.Adagrad, {"lr": 0.02, "lr_decay": 0.1}),
}
OPTIMIZERS = {
    "rmsprop": (torch.optim.RMSprop, {"lr": 0.02, "momentum": 0.9, "centered": True}),
    **{name: (kind, {**settings, "fused": True}) for name, (kind, settings) in FUSED.items()},
}
BAD = {0: "nan", 3: "log", 4: "inf", 7: "constant", 8: "root"}


@cache
def train_without_bad_windows(name: str, window: int) -> FaultyNet:
    bad = {number // window for number in BAD}
    lost = [number for number in range(18) if number // window in bad]
    net = FaultyNet({}, *OPTIMIZERS[name], batches=18, leave_out=lost)
    return fit(net, accumulate_grad_batches=window)  # type: ignore[no-any-return]


@pytest.mark.parametrize(("window", "first_bad"), [(1, [0, 3, 4, 7, 8]), (3, [0, 3, 7])])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_skipped_step_changes_nothing(
    name: str, window: int, first_bad: list[int], device_path: bool
) -> None:
    """The guarded run is bit-identical to a run without the windows of bad batches."""
    guard, settings = lo.NonFiniteGuard(lr_backoff=1.0), {"accumulate_grad_batches": window}
    guarded = fit(FaultyNet(BAD, *OPTIMIZERS[name], batches=18), guard, **settings)
    clean = train_without_bad_windows(name, window)
    assert_same_weights(guarded, clean)
    torch.testing.assert_close(
        optimizer_state(guarded), optimizer_state(clean), rtol=0, atol=0, equal_nan=False
    )
    assert [event["batch_idx"] for event in guard.events] == first_bad


def test_skipped_first_step_of_a_layer_leaves_no_momentum(
    device_path: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The encoder trains first, then the head, which has no momentum at the skipped step."""

    class Switching(FaultyNet):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            trains_head = int(batch[0]) >= 3
            self.head.requires_grad_(trains_head)
            self.encoder.requires_grad_(not trains_head)
            self.norm.requires_grad_(not trains_head)
            return super().training_step(batch, batch_idx)

    monkeypatch.setattr(torch, "empty_like", lambda like: torch.full_like(like, 1e3))
    settings = (torch.optim.SGD, {"lr": 0.02, "momentum": 0.9, "fused": True})
    guarded = fit(Switching({3: "nan"}, *settings), lo.NonFiniteGuard())
    assert_same_weights(guarded, fit(Switching({}, *settings, leave_out=[3])))


class Recorder(FaultyNet):
    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.losses: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.losses.append(loss.item())
        return loss


def test_event_loss_is_the_mean_over_the_accumulation_window() -> None:
    guard = lo.NonFiniteGuard(max_consecutive=100)
    model = Recorder(dict.fromkeys(range(12), "root"))  # finite losses, bad gradients
    fit(model, guard, accumulate_grad_batches=5)
    expected = [sum(losses) / len(losses) for losses in
                (model.losses[:5], model.losses[5:10], model.losses[10:])]  # fmt: skip
    assert [event["loss"] for event in guard.events] == pytest.approx(expected)


# --- fp16 with a loss scaler, on a CPU ----------------------------------------------------------
@pytest.mark.parametrize("fused", [False, True])
def test_overflow_is_not_a_fault(fused: bool, device_path: bool) -> None:
    settings = {"lr": 0.01, "fused": fused}
    guard = lo.NonFiniteGuard()
    plugins = loss_scaling(2.0**32)
    model = fit(FaultyNet({}, torch.optim.AdamW, settings, batches=40), guard, plugins=plugins)
    unguarded = fit(
        FaultyNet({}, torch.optim.AdamW, settings, batches=40), plugins=loss_scaling(2.0**32)
    )
    assert not guard.events
    assert guard.report().notes[0].split("overflows ")[1][0] != "0"
    assert_same_weights(model, unguarded)
    assert plugins.scaler is not None
    assert plugins.scaler.get_scale() < 2.0**32


@pytest.mark.parametrize("fused", [False, True])
def test_nonfinite_loss_is_a_fault(fused: bool, device_path: bool) -> None:
    guard = lo.NonFiniteGuard()
    faults = {3: "nan", 6: "inf"}
    model = FaultyNet(faults, torch.optim.AdamW, {"lr": 0.01, "fused": fused})
    fit(model, guard, plugins=loss_scaling(64.0))
    found = [(event["batch_idx"], event["kind"]) for event in guard.events]
    assert found == [(3, "nonfinite_loss"), (6, "nonfinite_loss")]
    assert all_finite(model)


def test_overflow_at_a_scale_below_one_is_a_fault() -> None:
    guard = lo.NonFiniteGuard()
    fit(FaultyNet({3: "root"}), guard, plugins=loss_scaling(0.5))
    assert [event["kind"] for event in guard.events] == ["nonfinite_gradient"]


@pytest.mark.parametrize("fused", [False, True])
def test_skipped_spike_does_not_change_the_loss_scale(fused: bool, device_path: bool) -> None:
    settings = {"lr": 1e-3, "fused": fused}
    plugins, clean_plugins = loss_scaling(8.0), loss_scaling(8.0)
    assert plugins.scaler is not None
    assert clean_plugins.scaler is not None
    guard = lo.NonFiniteGuard(spike=6.0)
    guarded = Recorder({30: "spike"}, torch.optim.AdamW, settings, batches=40)
    fit(guarded, guard, plugins=plugins)
    clean = FaultyNet({}, torch.optim.AdamW, settings, batches=40, leave_out=[30])
    fit(clean, plugins=clean_plugins)
    (event,) = guard.events
    assert (event["batch_idx"], event["kind"]) == (30, "loss_spike")
    assert event["loss"] == pytest.approx(guarded.losses[30])
    assert plugins.scaler.get_scale() == 8.0
    assert_same_weights(guarded, clean)


@pytest.mark.parametrize("policy", ["skip", "rollback"])
def test_lasting_shift_is_accepted(policy: Any) -> None:
    guard = lo.NonFiniteGuard(policy=policy, spike=6.0)
    shifted = dict.fromkeys(range(40, 120), "spike")
    settings = {"lr": 1e-9}  # the model stays as it is
    fit(FaultyNet(shifted, settings=settings, batches=120), guard)
    skipped = [event["batch_idx"] for event in guard.events]
    assert skipped == list(range(40, 40 + len(skipped)))
    assert 3 <= len(skipped) < 10
    assert f"rollbacks {int(policy == 'rollback')}" in guard.report().notes[-1]


@pytest.mark.parametrize("change", [lambda buffer: buffer.repeat(2), lambda buffer: None])
def test_buffer_of_another_shape_after_a_fault_is_restored(change: Any, device_path: bool) -> None:
    class Growing(FaultyNet):
        def __init__(self, *args: Any, **settings: Any) -> None:
            super().__init__(*args, **settings)
            self.register_buffer("seen", torch.zeros(2))

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = super().training_step(batch, batch_idx)
            grows = int(batch[0]) in (3, 5)
            self.seen = change(self.seen + loss.detach()) if grows else self.seen
            return loss

    settings = OPTIMIZERS["adamw"]
    guarded = fit(Growing({3: "nan"}, *settings), lo.NonFiniteGuard())
    clean = fit(Growing({}, *settings, leave_out=[3]))
    assert_same_weights(guarded, clean)
    assert (guarded.seen is None) == (clean.seen is None)


def test_faults_in_a_row_are_counted_per_optimizer() -> None:
    class Faulty(AdversarialNet):
        def generator_loss(self, batch: Any) -> Tensor:
            return super().generator_loss(batch) * float("nan")

    guard = lo.NonFiniteGuard(max_consecutive=4)
    with pytest.raises(FloatingPointError, match="Faults in a row: 4"):
        fit(Faulty(), guard)
    load_changed_state(guard)


def test_events_name_step_batch_loss_and_parameters() -> None:
    guard = lo.NonFiniteGuard()
    fit(FaultyNet({2: "nan", 5: "root"}, batches=8), guard, max_epochs=2)
    first, second, *_ = guard.events
    assert (first["step"], first["epoch"], first["batch_idx"]) == (2, 0, 2)
    assert math.isnan(first["loss"])
    assert first["ranks"] == [0]
    assert first["parameters_total"] == 6
    assert (second["kind"], second["parameters"]) == ("nonfinite_gradient", ["head.bias"])
    assert math.isfinite(second["loss"])
    assert [event["step"] for event in guard.events] == [2, 5, 10, 13]


def test_values_are_logged_at_faults_and_on_schedule() -> None:
    logger = MemoryLogger()
    guard = lo.NonFiniteGuard(every_n_steps=5)
    fit(FaultyNet({3: "nan", 4: "nan", 7: "nan"}), guard, logger=logger)
    assert logger.series("guard/skipped") == [1, 2, 3, 3]
    assert logger.series("guard/consecutive") == [1, 2, 1, 0]
    assert set(logger.records[0][1]) == {
        "guard/skipped",
        "guard/consecutive",
        "guard/overflows",
        "guard/lr_scale",
        "guard/rollbacks",
    }


def test_number_of_events_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_opt.gradients.guard.non_finite_guard.MAX_EVENTS", 3)
    guard = lo.NonFiniteGuard(max_consecutive=100)
    fit(FaultyNet(dict.fromkeys(range(2, 9), "nan")), guard)
    assert [event["step"] for event in guard.events] == [6, 7, 8]


@pytest.mark.parametrize("between", [[], [Callback()]])
def test_clipping_does_not_count_skipped_steps(between: list[Callback]) -> None:
    clipping = lo.AdaptiveClipping(lo.FixedNorm(1e9))
    fit(FaultyNet(BAD), lo.NonFiniteGuard(), *between, clipping)
    assert clipping.report().rows[0]["steps"] == 12 - len(BAD)


def test_gradients_of_a_skipped_step_stay_readable(device_path: bool) -> None:
    """Later callbacks and the module's hooks can read them until the batch ends."""
    norms: list[float] = []

    class Reads(FaultyNet):
        def on_before_optimizer_step(self, optimizer: Any) -> None:
            norms.append(float(self.head.weight.grad.norm()))

        def on_train_batch_end(self, *arguments: Any) -> None:
            norms.append(float(self.head.weight.grad.norm()))

    spy = GradientSpy()
    settings = {"lr": 0.01, "fused": device_path}
    model = fit(Reads(BAD, torch.optim.AdamW, settings), lo.NonFiniteGuard(), spy)
    assert len(spy.norms[0]) == 12
    assert norms[::2] == pytest.approx(norms[1::2], nan_ok=True)
    assert all_finite(model)


@pytest.mark.parametrize("callback", [lo.AdaptiveClipping, lo.CurvaturePreconditioner])
def test_guard_after_a_callback_that_changes_gradients_raises(callback: type[Callback]) -> None:
    with pytest.raises(RuntimeError, match=f"before {callback.__name__}"):
        fit(FaultyNet(), callback(), lo.NonFiniteGuard())


def test_bad_steps_are_skipped_with_gradient_clip_val() -> None:
    settings = {"gradient_clip_val": 0.1}
    guarded = fit(FaultyNet(BAD), lo.NonFiniteGuard(), **settings)
    assert_same_weights(guarded, fit(FaultyNet({}, leave_out=BAD), **settings))


def test_resumed_run_is_bit_exact(device_path: bool, tmp_path: Path) -> None:
    """The checkpoint is of the last of four faults in a row. A spike follows eight steps later."""

    def run(guard: lo.NonFiniteGuard, path: Path | None = None) -> FaultyNet:
        faults = {8: "spike", **dict.fromkeys((4, 20, 21, 22, 23), "nan")}
        model = FaultyNet(faults, torch.optim.AdamW, {"lr": 0.01, "fused": True}, batches=24)
        save = SaveAt(tmp_path / "a.ckpt", 24)
        trainer = quiet_trainer(callbacks=[guard, save], max_epochs=2)
        trainer.fit(model, ckpt_path=path, weights_only=True if path else None)
        return model

    whole, resumed = (lo.NonFiniteGuard(spike=6.0) for _ in range(2))
    assert_same_weights(run(whole), run(resumed, tmp_path / "a.ckpt"))
    saved = torch.load(tmp_path / "a.ckpt", weights_only=True)  # plain types only
    (state,) = (value for key, value in saved["callbacks"].items() if "Guard" in key)
    assert state["escalation"]["optimizers"][0]["consecutive"] == 4
    assert "lr_scale 1," not in resumed.report().notes[-1]
    states = [own.state_dict() for own in (resumed, whole)]
    if device_path:  # the events of the last two steps come later than the checkpoint
        states = [state["escalation"] for state in states]
    assert_same_state(*states)
    assert 32 in [event["step"] for event in resumed.events]
    load_changed_state(resumed)


@pytest.mark.filterwarnings("ignore:.*returned `None`:UserWarning")
def test_step_without_a_loss_is_not_counted() -> None:
    class NoLoss(FaultyNet):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return None if batch_idx in (4, 5) else super().training_step(batch, batch_idx)

    guard = lo.NonFiniteGuard()
    fit(NoLoss({3: "nan", 6: "nan"}), guard)
    assert [event["batch_idx"] for event in guard.events] == [3, 6]
    assert "After 10 steps" in guard.report().notes[-1]
    assert "consecutive 0" in guard.report().notes[-1]


def test_gradient_whose_square_overflows_is_a_fault() -> None:
    class Huge(FaultyNet):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            return loss + 1e20 * self.head.bias.sum() if batch_idx == 3 else loss

    guard = lo.NonFiniteGuard()
    fit(Huge(optimizer=torch.optim.Adam), guard)
    assert [event["kind"] for event in guard.events] == ["nonfinite_gradient"]
