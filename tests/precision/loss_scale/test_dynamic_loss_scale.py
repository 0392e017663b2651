"""DynamicLossScale compared with a manual loop in plain torch."""

import math
import pickle
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Subset, TensorDataset

import lightning_opt as lo
from tests.helpers.footprint import model_footprint, trainer_footprint
from tests.helpers.models import (
    ResumableLoader,
    SmallNet,
    assert_same_state,
    assert_same_weights,
    load_changed_state,
)
from tests.helpers.processes import launch
from tests.helpers.syncs import take_device_path
from tests.helpers.trainers import (
    LossScales,
    MemoryLogger,
    SaveAt,
    loss_scaling,
    quiet_trainer,
)

WIDTH, BATCH = 8, 4
SHARE = 0.02  # of the loss, so that only scales above 65536 overflow without planted factors


class Net(LightningModule):
    """Linear, LayerNorm, linear; the loss of some batches is multiplied by planted factors.

    Args:
        steps: Batches per epoch.
        planted: Factors by batch index; 1e30 overflows, with a finite loss.
        fused: Whether AdamW is fused.
        warmup: Whether the learning rate grows by 0.01 per scheduler step.
        rank: The only rank with planted factors; None: all.
    """

    def __init__(
        self,
        steps: int = 20,
        planted: dict[int, float] | None = None,
        fused: bool = False,
        warmup: bool = False,
        rank: int | None = None,
    ) -> None:
        super().__init__()
        state = torch.get_rng_state()
        torch.manual_seed(1)
        self.layers = nn.Sequential(
            nn.Linear(WIDTH, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 1)
        )
        torch.set_rng_state(state)
        self.steps, self.planted, self.fused = steps, planted or {}, fused
        self.warmup, self.rank = warmup, rank
        self.rates: list[float] = []

    def loss(self, inputs: Tensor, targets: Tensor, factor: float) -> Tensor:
        return SHARE * factor * functional.mse_loss(self.layers(inputs), targets)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.rates.append(self.trainer.optimizers[0].param_groups[0]["lr"])
        planted = self.rank in (None, self.global_rank)
        factor = self.planted.get(batch_idx, 1.0) if planted else 1.0
        inputs, targets = (rows[self.global_rank :: self.trainer.world_size] for rows in batch)
        return self.loss(inputs, targets, factor)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2, fused=self.fused)
        if not self.warmup:
            return optimizer
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 + step)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
        }

    def train_dataloader(self) -> DataLoader[Any]:
        return ResumableLoader(data(self.steps), batch_size=BATCH)


def data(steps: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(2)
    inputs = torch.randn(steps * BATCH, WIDTH, generator=generator)
    return TensorDataset(inputs, inputs.square().mean(-1, keepdim=True))


def fit(net: Net, plugin: Any, *callbacks: Callback, **settings: Any) -> list[float]:
    """Train, and return the scale after each step."""
    scales = LossScales()
    trainer = quiet_trainer(plugins=[plugin], callbacks=[*callbacks, scales], **settings)
    trainer.fit(net)
    return scales.seen


class Reference:
    """Mixed precision in plain torch, with the scales and the skipped steps."""

    def __init__(self, net: Net, scale: float, interval: int, floor: float) -> None:
        optimizer = net.configure_optimizers()
        self.scales: list[float] = []
        self.skipped, clean = [], 0
        loader = DataLoader(data(net.steps), batch_size=BATCH)
        first, norm, act, last = net.layers
        for index, (inputs, targets) in enumerate(loader):
            with torch.autocast("cpu", torch.float16):
                hidden = norm(first(inputs))
                output = last(act(hidden))
            factor = net.planted.get(index, 1.0)
            loss = SHARE * factor * functional.mse_loss(output.float(), targets)
            gradients = torch.autograd.grad(loss * scale, list(net.parameters()))
            finite = all(gradient.isfinite().all() for gradient in gradients)
            if finite:
                for parameter, gradient in zip(net.parameters(), gradients, strict=True):
                    parameter.grad = gradient / scale
                optimizer.step()
                clean += 1
                if clean == interval:
                    scale, clean = 2 * scale, 0
            else:
                scale, clean = max(scale / 2, floor), 0
                self.skipped.append(index)
            self.scales.append(scale)


OVERFLOWS = dict.fromkeys((0, 3, 4, 40, 41, 42, 43, 60, 77, 78), 1e30)


@pytest.mark.filterwarnings("ignore:`training_step` returned `None`")
@pytest.mark.parametrize("fused", [False, True], ids=["", "fused"])
def test_windows_that_end_without_a_loss_change_nothing(fused):
    class WithoutLoss(Net):
        def training_step(self, batch, batch_idx):
            return super().training_step(batch, batch_idx) if batch_idx in self.kept else None

    # Windows of three batches: without a loss, with an update, ending without a loss, an update.
    # Clipping unscales the gradients of a fused optimizer.
    settings = {"accumulate_grad_batches": 3, "gradient_clip_val": 0.1}
    nets = [WithoutLoss(12, fused=fused) for _ in range(2)]
    for net, more in zip(nets, ([], [6]), strict=True):
        net.kept = [3, 4, 5, 9, 10, 11, *more]
        fit(net, lo.DynamicLossScale(), **settings)
    assert_same_weights(*nets)
    expected = Net(12, fused=fused)
    rows = [4 * batch + row for batch in (3, 4, 5, 9, 10, 11) for row in range(4)]
    expected.train_dataloader = lambda: DataLoader(Subset(data(12), rows), batch_size=BATCH)
    fit(expected, lo.DynamicLossScale(), **settings)
    assert_same_weights(nets[0], expected)


@pytest.mark.parametrize("fused", [False, True], ids=["", "fused"])
def test_scale_matches_a_manual_loop(fused, path):
    """100 steps with planted overflows, and natural ones due to a short growth interval."""
    logger, plugin = MemoryLogger(), lo.DynamicLossScale(growth_interval=5, every_n_steps=1)
    net = Net(100, OVERFLOWS, fused)
    scales = fit(net, plugin, logger=logger)
    expected = Net(100, OVERFLOWS, fused)
    reference = Reference(expected, 65536.0, interval=5, floor=1.0)
    assert scales == reference.scales
    assert logger.series("loss_scale/scale") == reference.scales
    assert len(reference.skipped) > len(OVERFLOWS)  # natural ones too
    counts = [sum(i <= step for i in reference.skipped) for step in range(100)]
    assert logger.series("loss_scale/skipped") == counts
    assert logger.series("loss_scale/overflows") == counts
    # A fused optimizer divides by the scale in its kernel.
    assert_same_weights(net, expected, rtol=0, atol=1e-6 if fused else 0.0)


def test_scale_has_a_floor():
    planted = dict.fromkeys((*range(6), 10, 12, 14, 16), 1e30)
    net, expected = Net(20, planted), Net(20, planted)
    # Separate overflows at the floor are no collapse.
    plugin = lo.DynamicLossScale(64.0, growth_interval=3, min_scale=16.0, patience=5)
    scales = fit(net, plugin)
    reference = Reference(expected, 64.0, interval=3, floor=16.0)
    assert scales == reference.scales
    assert scales[:6] == [32.0] + [16.0] * 5
    assert_same_weights(net, expected)


@pytest.mark.parametrize("factor", [1e30, math.nan], ids=["overflow", "nan"])
def test_collapse_at_the_floor_raises(factor, path):
    net = Net(20, dict.fromkeys(range(4, 20), factor))
    logger, scales = MemoryLogger(), LossScales()
    plugin = lo.DynamicLossScale(8.0, patience=5, every_n_steps=3)
    trainer = quiet_trainer(plugins=[plugin], callbacks=[scales], logger=logger)
    with pytest.raises(FloatingPointError, match=r"collapsed.* min_scale=1") as error:
        trainer.fit(net)
    # 4 updates, 3 skipped ones until the floor, 5 at the floor.
    assert len(scales.seen) + 1 == 12
    bad = 8 if math.isnan(factor) else 0
    assert f"Of 8 updates skipped in all, {bad} had a loss of NaN" in str(error.value)
    good = Net(4)
    fit(good, lo.DynamicLossScale(8.0))
    assert_same_weights(net, good)


def test_counts_are_logged_on_schedule():
    logger = MemoryLogger()
    net = Net(20, {2: 1e30, 3: math.inf, 9: 1e30})
    plugin = lo.DynamicLossScale(every_n_steps=4)
    trainer = quiet_trainer(plugins=[plugin], logger=logger)
    trainer.fit(net)
    records = [(s, m) for s, m in logger.records if "loss_scale/scale" in m]
    assert [step for step, _ in records] == [3, 7, 11, 15, 19]
    assert records[0][1] == {
        "loss_scale/scale": 16384.0,
        "loss_scale/skipped": 2.0,
        "loss_scale/overflows": 1.0,
    }
    assert trainer.callback_metrics["loss_scale/skipped"] == 3
    assert trainer.callback_metrics["loss_scale/overflows"] == 2
    # Batches 2 and 3 are one window.
    trainer = quiet_trainer(plugins=[lo.DynamicLossScale()], accumulate_grad_batches=2)
    trainer.fit(Net(6, {2: math.inf}))
    scaler = trainer.precision_plugin.scaler
    assert (scaler.skipped, scaler.overflows) == (1, 0)


# --- learning-rate schedulers -------------------------------------------------------------------

# Planted batches, accumulated batches, and the expected rates in units of 0.01.
SCHEDULES = {
    "host": ((0, 1, 5), 1, (1, 1, 1, 2, 3, 4, 4, 5, 6)),
    "device": ((2, 6), 1, (1, 2, 3, 4, 5, 5, 6, 7, 8, 8, 9, 10)),  # two steps later
    "host, accumulation": ((3,), 2, (1, 1, 2, 2, 2, 2, 3, 3, 4, 4)),
}


@pytest.mark.parametrize("case", SCHEDULES)
def test_schedulers_wait_for_updates(case, monkeypatch):
    if case == "device":
        take_device_path(monkeypatch)
    planted, accumulate, rates = SCHEDULES[case]
    net = Net(len(rates), dict.fromkeys(planted, 1e30), warmup=True)
    trainer = quiet_trainer(plugins=[lo.DynamicLossScale()], accumulate_grad_batches=accumulate)
    trainer.fit(net)
    assert net.rates == pytest.approx([0.01 * rate for rate in rates])
    assert trainer.global_step == len(rates) // accumulate
    (config,) = trainer.lr_scheduler_configs
    assert config.scheduler.last_epoch == trainer.global_step - len(planted)


def test_state_dict_of_one_rank_does_not_move_its_scheduler(monkeypatch):
    """A checkpoint callback may ask one rank alone; ranks with other rates would drift apart."""
    take_device_path(monkeypatch)

    class Reads(Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            trainer.precision_plugin.state_dict()

    nets = [Net(12, {4: 1e30, 8: 1e30}, warmup=True) for _ in range(2)]
    for net, callbacks in zip(nets, ([], [Reads()]), strict=True):
        fit(net, lo.DynamicLossScale(), *callbacks)
    assert nets[0].rates == nets[1].rates
    assert_same_weights(*nets)


# --- resume -------------------------------------------------------------------------------------


class SaveOnce(SaveAt):
    """Saves at the end of the step, not in the next window of batches."""

    def on_train_batch_end(self, trainer, *_):
        if not self.file.exists():
            super().on_train_batch_end(trainer)


@pytest.mark.parametrize(
    ("planted", "accumulate"),
    [({5: 1e30, 7: math.nan, 14: 1e30}, 1), ({9: 1e30}, 1), ({19: 1e30}, 2)],
)
def test_resume_is_bit_exact(planted, accumulate, path, tmp_path):
    """The checkpoint lies within a growth interval, or just after a skipped update."""
    file, settings = tmp_path / "stopped.ckpt", {"accumulate_grad_batches": accumulate}
    whole, resumed = (lo.DynamicLossScale(growth_interval=3) for _ in range(2))
    net, again = (Net(20 * accumulate, planted, warmup=True) for _ in range(2))
    scales = fit(net, whole, SaveOnce(file, 10), **settings)
    trainer = quiet_trainer(plugins=[resumed], callbacks=[later := LossScales()], **settings)
    trainer.fit(again, ckpt_path=file, weights_only=True)
    assert later.seen == scales[10 * accumulate :]
    assert_same_weights(again, net)
    state = resumed.state_dict()
    assert_same_state(state, whole.state_dict())
    assert again.rates == net.rates[10 * accumulate :]
    (config,) = trainer.lr_scheduler_configs
    assert config.scheduler.last_epoch == 20 - state["skipped"] + state["skips_to_hold"]
    load_changed_state(resumed)


def test_new_settings_replace_those_of_the_checkpoint(tmp_path):
    file = tmp_path / "end.ckpt"
    fit(Net(4), lo.DynamicLossScale(1024.0), SaveAt(file, 4))
    plugin = lo.DynamicLossScale(growth_interval=200, min_scale=4096.0)
    trainer = quiet_trainer(plugins=[plugin], callbacks=[scales := LossScales()], max_epochs=2)
    trainer.fit(Net(4), ckpt_path=file, weights_only=True)
    assert plugin.scaler.get_growth_interval() == 200
    assert [scales.start, *scales.seen] == [4096.0] * 5


def test_checkpoints_are_compatible_with_the_plugin_of_lightning(tmp_path):
    theirs, ours = tmp_path / "theirs.ckpt", tmp_path / "ours.ckpt"
    fit(Net(4), loss_scaling(512.0), SaveAt(theirs, 4))
    plugin = lo.DynamicLossScale()
    quiet_trainer(plugins=[plugin], callbacks=[SaveAt(ours, 8)], max_epochs=2).fit(
        net := Net(4), ckpt_path=theirs, weights_only=True
    )
    assert plugin.scaler.get_scale() == 512.0
    other = Net(4)
    other.load_state_dict(torch.load(ours, weights_only=True)["state_dict"])
    assert_same_weights(other, net)
    quiet_trainer(max_epochs=3).fit(other, ckpt_path=ours, weights_only=True)


# --- with other callbacks -----------------------------------------------------------------------


@pytest.mark.parametrize("fused", [False, True], ids=["", "fused"])
def test_clipping_and_the_guard_get_unscaled_gradients(fused):
    """The updates of the overflow and of the NaN are skipped; only the guard records the NaN."""
    planted = {4: 1e30, 7: math.nan, 9: 50.0}
    guard, logger = lo.NonFiniteGuard(every_n_steps=1), MemoryLogger()
    net = Net(30, planted, fused)
    plugin = lo.DynamicLossScale(every_n_steps=1)
    scales = fit(net, plugin, guard, lo.AdaptiveClipping(lo.FixedNorm(0.1)), logger=logger)
    assert logger.series("guard/overflows")[-1] == 1
    assert [event["step"] for event in guard.events] == [7]
    assert logger.series("loss_scale/overflows")[-1] == 1
    assert logger.series("loss_scale/skipped")[-1] == 2
    assert scales[-1] == 16384.0
    clipped = Net(30, planted, fused)
    fit(clipped, lo.DynamicLossScale(), gradient_clip_val=0.1)
    assert_same_weights(net, clipped, rtol=0, atol=1e-5)


# --- life cycle and errors ----------------------------------------------------------------------


@pytest.mark.parametrize("fails", [False, True])
def test_model_and_trainer_are_restored(fails):
    class Failing(Net):
        def on_before_zero_grad(self, optimizer: Any) -> None:
            if fails:
                raise ArithmeticError("planted")

    def run(plugin: Any) -> Any:
        net = Failing(3)
        trainer = quiet_trainer(plugins=[plugin])
        try:
            trainer.fit(net)
        except ArithmeticError:
            assert fails
        found = trainer_footprint(trainer)
        del found["precision"], found["strategy"]
        return model_footprint(net), found

    assert run(lo.DynamicLossScale()) == run(loss_scaling(2.0**16))


def test_plugin_can_be_pickled_before_and_after_a_run():
    plugin = lo.DynamicLossScale(growth_interval=7)
    for _ in range(2):
        twin = pickle.loads(pickle.dumps(plugin))
        assert twin.state_dict() == plugin.state_dict()
        fit(Net(3, {1: 1e30}), plugin)
    assert fit(Net(3), twin) == [32768.0] * 3


def test_another_model_resets_the_scale():
    plugin, net = lo.DynamicLossScale(), Net(3, {1: 1e30})
    assert fit(net, plugin)[-1] == 32768.0
    assert fit(net, plugin)[-1] == 16384.0
    assert fit(Net(3), plugin)[-1] == 65536.0


def test_invalid_argument_raises():
    with pytest.raises(ValueError, match=r"min_scale must be at most init_scale=2\.0, got"):
        lo.DynamicLossScale(init_scale=2.0, min_scale=4.0)


def test_half_weights_and_lbfgs_raise_before_the_first_step():
    with pytest.raises(ValueError, match="needs weights in float32"):
        fit(Net().half(), lo.DynamicLossScale())
    with pytest.raises(ValueError, match=r"does not work with torch\.optim"):
        fit(SmallNet("LBFGS"), lo.DynamicLossScale())


# --- several processes, and a GPU ---------------------------------------------------------------


def _fit_on_a_rank() -> Any:
    net = Net(12, {4: 1e30, 8: 1e30}, warmup=True, rank=1)
    plugin = lo.DynamicLossScale(growth_interval=3)
    scales = fit(net, plugin, strategy="ddp", devices=2)
    return scales, net.rates, dict(net.state_dict())


@pytest.mark.distributed
def test_overflow_on_one_rank_skips_the_update_on_all():
    first, second = launch(_fit_on_a_rank)
    assert first[0] == second[0]
    assert first[1] == second[1]
    assert_same_weights(first[2], second[2])
    net = Net(12, {4: 1e30, 8: 1e30}, warmup=True)
    assert fit(net, lo.DynamicLossScale(growth_interval=3)) == first[0]
    assert net.rates == first[1]
    assert_same_weights(first[2], net, rtol=0, atol=2e-3)  # halves of a batch round differently


@pytest.mark.gpu
@pytest.mark.parametrize("fused", [False, True], ids=["", "fused"])
def test_overflows_are_skipped_on_gpu(fused):
    net, logger = Net(40, {3: 1e30, 20: 1e30, 21: math.nan}, fused), MemoryLogger()
    plugin = lo.DynamicLossScale(growth_interval=5, every_n_steps=40)
    fit(net, plugin, accelerator="gpu", logger=logger)
    assert logger.series("loss_scale/skipped")[-1] >= 3
    assert logger.series("loss_scale/skipped")[-1] == logger.series("loss_scale/overflows")[-1] + 1
    assert all(value.isfinite().all() for value in net.state_dict().values())
