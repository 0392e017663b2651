"""DynamicLossScale against a loop in plain torch that scales, looks and unscales by hand."""

import math
import pickle
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import lightning_opt as lo
from tests.helpers.footprint import model_footprint, trainer_footprint
from tests.helpers.models import ResumableLoader, assert_same_state, assert_same_weights
from tests.helpers.processes import launch
from tests.helpers.syncs import take_device_path
from tests.helpers.trainers import MemoryLogger, quiet_trainer

WIDTH, BATCH = 8, 4
SHARE = 0.02  # of the loss, so that it takes a scale above 65536 to overflow by itself


class Net(LightningModule):
    """Linear, LayerNorm, linear; the loss of some steps is multiplied with what is planted.

    Args:
        steps: Batches of an epoch.
        planted: Factors by the batch's index; 1e30 overflows for sure, with a finite loss.
        fused: Whether AdamW is.
        warmup: Steps of a schedule whose learning rate is their number.
        rank: The only rank where factors are planted; None: all.
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


class Scales(Callback):
    """Records the scale after each step."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.seen.append(trainer.precision_plugin.scaler.get_scale())


def fit(net: Net, plugin: Any, *callbacks: Callback, **settings: Any) -> list[float]:
    """Train, and return the scale after each step."""
    scales = Scales()
    trainer = quiet_trainer(plugins=[plugin], callbacks=[*callbacks, scales], **settings)
    trainer.fit(net)
    return scales.seen


class Reference:
    """Mixed precision written out: what is scaled, when it is skipped, how the scale moves."""

    def __init__(self, net: Net, scale: float, interval: int, floor: float, ceil: float) -> None:
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
                    scale, clean = min(2 * scale, ceil), 0
            else:
                scale, clean = max(scale / 2, floor), 0
                self.skipped.append(index)
            self.scales.append(scale)


OVERFLOWS = dict.fromkeys((0, 3, 4, 40, 41, 42, 43, 60, 77, 78, 120, 121, 190), 1e30)


@pytest.mark.parametrize("path", ["host", "device"])
@pytest.mark.parametrize("fused", [False, True], ids=["", "fused"])
def test_scale_follows_a_reference(fused, path, monkeypatch):
    """200 steps with planted overflows and a growth interval that runs into natural ones."""
    if path == "device":
        take_device_path(monkeypatch)
    logger, plugin = MemoryLogger(), lo.DynamicLossScale(growth_interval=5, every_n_steps=1)
    net = Net(200, OVERFLOWS, fused)
    scales = fit(net, plugin, logger=logger)
    expected = Net(200, OVERFLOWS, fused)
    reference = Reference(expected, 65536.0, interval=5, floor=1.0, ceil=math.inf)
    assert scales == reference.scales
    assert logger.series("loss_scale/scale") == reference.scales
    assert len(reference.skipped) > len(OVERFLOWS)  # natural ones too
    counts = [sum(i <= step for i in reference.skipped) for step in range(200)]
    assert logger.series("loss_scale/skipped") == counts
    assert logger.series("loss_scale/overflows") == counts
    # A fused optimizer divides by the scale within its kernel, in float32 too.
    assert_same_weights(net, expected, rtol=0, atol=1e-6 if fused else 0.0)


def test_defaults_are_those_promised():
    plugin = lo.DynamicLossScale()
    assert fit(Net(3), plugin) == [65536.0] * 3
    scaler = plugin.scaler
    assert (scaler.get_backoff_factor(), scaler.get_growth_factor()) == (0.5, 2.0)
    assert scaler.get_growth_interval() == 1000


def test_scale_has_a_floor():
    planted = dict.fromkeys(range(6), 1e30)
    net, expected = Net(20, planted), Net(20, planted)
    scales = fit(net, lo.DynamicLossScale(64.0, growth_interval=3, min_scale=16.0))
    reference = Reference(expected, 64.0, interval=3, floor=16.0, ceil=math.inf)
    assert scales == reference.scales
    assert scales[:6] == [32.0] + [16.0] * 5
    assert_same_weights(net, expected)


@pytest.mark.parametrize("path", ["host", "device"])
@pytest.mark.parametrize("factor", [1e30, math.nan], ids=["overflow", "nan"])
def test_collapse_stops_the_run(factor, path, monkeypatch):
    if path == "device":
        take_device_path(monkeypatch)
    net = Net(20, dict.fromkeys(range(4, 20), factor))
    before = {name: value.clone() for name, value in net.state_dict().items()}
    logger, scales = MemoryLogger(), Scales()
    plugin = lo.DynamicLossScale(8.0, patience=5, every_n_steps=3)
    trainer = quiet_trainer(plugins=[plugin], callbacks=[scales], logger=logger)
    with pytest.raises(FloatingPointError, match=r"collapsed.* min_scale=1") as error:
        trainer.fit(net)
    # 4 good steps, 3 to the floor, then 5 at it; on a device the next report tells.
    assert len(scales.seen) + 1 == 12
    bad = 8 if math.isnan(factor) else 0
    assert f"Of 8 updates left out in all, {bad} had a loss of NaN" in str(error.value)
    assert logger.series("loss_scale/overflows")[-1] == 8 - bad if path == "device" else True
    assert model_footprint(net) == model_footprint(Net(20, net.planted)) | {
        "modules": model_footprint(net)["modules"]
    }
    good = Net(4)
    fit(good, lo.DynamicLossScale(8.0))
    assert_same_weights(net, good)
    assert not all(torch.equal(value, before[name]) for name, value in net.state_dict().items())


def test_an_overflow_now_and_then_at_the_floor_is_no_collapse():
    planted = dict.fromkeys(range(0, 40, 2), 1e30)
    plugin = lo.DynamicLossScale(1.0, patience=2)
    assert fit(Net(40, planted), plugin) == [1.0] * 40


def test_logs_on_its_schedule():
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


# --- learning-rate schedulers -------------------------------------------------------------------

PLANTED = {0: 1e30, 1: 1e30, 5: 1e30}


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
def test_schedulers_of_lightning_run_ahead():
    """What is documented: a step that is left out moves the schedule and global_step."""
    net = Net(9, PLANTED, warmup=True)
    fit(net, MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu")))
    assert net.rates == pytest.approx([0.01 * k for k in (1, 2, 3, 4, 5, 6, 7, 8, 9)])


def test_schedulers_wait_for_updates():
    net = Net(9, PLANTED, warmup=True)
    trainer = quiet_trainer(plugins=[lo.DynamicLossScale()])
    trainer.fit(net)
    assert net.rates == pytest.approx([0.01 * k for k in (1, 1, 1, 2, 3, 4, 4, 5, 6)])
    assert trainer.global_step == 9
    (scheduler,) = (config.scheduler for config in trainer.lr_scheduler_configs)
    assert scheduler.state_dict()["last_epoch"] == 6  # as many as updates


def test_schedulers_wait_two_steps_later_on_a_device(monkeypatch):
    take_device_path(monkeypatch)
    net = Net(12, {2: 1e30, 6: 1e30}, warmup=True)
    fit(net, lo.DynamicLossScale())
    assert net.rates == pytest.approx([0.01 * k for k in (1, 2, 3, 4, 5, 5, 6, 7, 8, 8, 9, 10)])


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
def test_schedulers_run_ahead_if_asked_to():
    net = Net(9, PLANTED, warmup=True)
    fit(net, lo.DynamicLossScale(hold_schedulers=False))
    assert net.rates == pytest.approx([0.01 * k for k in (1, 2, 3, 4, 5, 6, 7, 8, 9)])


def test_schedulers_under_accumulation():
    """The window of batches 2 and 3 overflows; the schedule moves once a window."""
    net = Net(10, {3: 1e30}, warmup=True)
    fit(net, lo.DynamicLossScale(), accumulate_grad_batches=2)
    assert net.rates == pytest.approx([0.01 * k for k in (1, 1, 2, 2, 2, 2, 3, 3, 4, 4)])


# --- resume -------------------------------------------------------------------------------------


class Save(Callback):
    def __init__(self, step: int, file: Any) -> None:
        self.step, self.file = step, file

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if trainer.global_step == self.step:
            trainer.save_checkpoint(self.file)


@pytest.mark.parametrize("path", ["host", "device"])
def test_resumes_bit_exactly(path, tmp_path, monkeypatch):
    if path == "device":
        take_device_path(monkeypatch)
    file, planted = tmp_path / "stopped.ckpt", {5: 1e30, 8: 1e30, 9: math.nan, 14: 1e30}
    whole, resumed = (lo.DynamicLossScale(growth_interval=3) for _ in range(2))
    net, again = Net(20, planted, warmup=True), Net(20, planted, warmup=True)
    scales = fit(net, whole, Save(10, file))
    trainer = quiet_trainer(plugins=[resumed], callbacks=[later := Scales()])
    trainer.fit(again, ckpt_path=file, weights_only=True)
    assert later.seen == scales[10:]
    assert_same_weights(again, net)
    assert_same_state(resumed.state_dict(), whole.state_dict())
    assert again.rates == net.rates[10:]


def test_settings_given_anew_win_over_those_of_the_checkpoint(tmp_path):
    file = tmp_path / "end.ckpt"
    fit(Net(4), lo.DynamicLossScale(1024.0), Save(4, file))
    plugin = lo.DynamicLossScale(growth_interval=2)
    trainer = quiet_trainer(plugins=[plugin], callbacks=[scales := Scales()], max_epochs=2)
    trainer.fit(Net(4), ckpt_path=file, weights_only=True)
    # Four clean updates are more than two already.
    assert plugin.scaler.get_growth_interval() == 2
    assert scales.seen[0] in (1024.0, 2048.0)


def test_goes_on_from_lightnings_own_and_back(tmp_path):
    theirs, ours = tmp_path / "theirs.ckpt", tmp_path / "ours.ckpt"
    plain = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=512.0))
    fit(Net(4), plain, Save(4, theirs))
    plugin = lo.DynamicLossScale()
    quiet_trainer(plugins=[plugin], callbacks=[Save(8, ours)], max_epochs=2).fit(
        net := Net(4), ckpt_path=theirs, weights_only=True
    )
    assert plugin.scaler.get_scale() == 512.0
    other = Net(4)
    other.load_state_dict(torch.load(ours, weights_only=True)["state_dict"])
    assert_same_weights(other, net)
    quiet_trainer(max_epochs=3).fit(other, ckpt_path=ours, weights_only=True)


# --- with other parts ---------------------------------------------------------------------------


@pytest.mark.parametrize("fused", [False, True], ids=["", "fused"])
def test_adaptive_clipping_sees_true_gradients(fused):
    net = Net(30, {4: 1e30, 9: 50.0}, fused)
    fit(net, lo.DynamicLossScale(), lo.AdaptiveClipping(lo.FixedNorm(0.1)))
    expected = Net(30, {4: 1e30, 9: 50.0})
    fit(expected, lo.DynamicLossScale(), gradient_clip_val=0.1)
    assert_same_weights(net, expected, rtol=0, atol=1e-5)


def test_fused_optimizer_and_clipping():
    """The callback makes the optimizer fused; gradients are true for the clipping all the same."""
    net, expected = Net(30, {4: 1e30, 9: 50.0}), Net(30, {4: 1e30, 9: 50.0})
    callbacks = lo.FusedOptimizer(), lo.AdaptiveClipping(lo.FixedNorm(0.1))
    scales = fit(net, lo.DynamicLossScale(), *callbacks)
    assert fit(expected, lo.DynamicLossScale(), gradient_clip_val=0.1) == scales
    assert_same_weights(net, expected, rtol=0, atol=1e-5)


def test_gradient_clip_val_works_with_fused_optimizers():
    """Lightning's own plugin refuses that."""
    net, expected = Net(30, {4: 1e30}, fused=True), Net(30, {4: 1e30})
    scales = fit(net, lo.DynamicLossScale(), gradient_clip_val=0.1)
    assert fit(expected, lo.DynamicLossScale(), gradient_clip_val=0.1) == scales
    assert_same_weights(net, expected, rtol=0, atol=1e-6)
    unclipped = Net(30, {4: 1e30})
    fit(unclipped, lo.DynamicLossScale())
    assert not torch.allclose(unclipped.layers[0].weight, net.layers[0].weight, atol=1e-3)


@pytest.mark.parametrize("fused", [False, True], ids=["", "fused"])
def test_guard_tells_overflows_from_faults(fused):
    """Both are left out; an overflow is the scaler's business, a NaN the guard's."""
    guard = lo.NonFiniteGuard(every_n_steps=1)
    logger = MemoryLogger()
    net = Net(12, {4: 1e30, 7: math.nan}, fused)
    plugin = lo.DynamicLossScale(every_n_steps=1)
    scales = fit(net, plugin, guard, logger=logger)
    assert logger.series("guard/overflows")[-1] == 1
    assert [event["step"] for event in guard.events] == [7]
    assert logger.series("loss_scale/overflows")[-1] == 1
    assert logger.series("loss_scale/skipped")[-1] == 2
    assert scales[-1] == 16384.0
    expected = Net(12, {4: 1e30, 7: math.nan}, fused)
    fit(expected, lo.DynamicLossScale())
    assert_same_weights(net, expected)


def test_manual_optimisation():
    class Manual(Net):
        def __init__(self) -> None:
            super().__init__(10, {3: 1e30})
            self.automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(super().training_step(batch, batch_idx))
            optimizer.step()

    net, expected = Manual(), Net(10, {3: 1e30})
    assert fit(net, lo.DynamicLossScale()) == fit(expected, lo.DynamicLossScale())
    assert_same_weights(net, expected)


# --- what it leaves behind, and what it refuses ---------------------------------------------------


@pytest.mark.parametrize("fails", [False, True])
def test_leaves_model_and_trainer_as_found(fails):
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

    plain = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu"))
    assert run(lo.DynamicLossScale()) == run(plain)


def test_validate_and_predict():
    class Evaluated(Net):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.found = self.layers(batch[0]).dtype, self.layers[:2](batch[0]).dtype

        def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
            self.validation_step(batch, batch_idx)
            return batch[0]

    net = Evaluated(2)
    trainer = quiet_trainer(plugins=[lo.DynamicLossScale()])
    for stage in ("validate", "predict"):
        getattr(trainer, stage)(net, net.train_dataloader())
        assert net.found == (torch.float16, torch.float16)


def test_pickles_before_and_after_a_run():
    plugin = lo.DynamicLossScale(growth_interval=7)
    for _ in range(2):
        twin = pickle.loads(pickle.dumps(plugin))
        assert twin.state_dict() == plugin.state_dict()
        fit(Net(3, {1: 1e30}), plugin)
    assert fit(Net(3), twin) == [32768.0] * 3


def test_another_model_starts_anew():
    plugin, net = lo.DynamicLossScale(), Net(3, {1: 1e30})
    assert fit(net, plugin)[-1] == 32768.0
    assert fit(net, plugin)[-1] == 16384.0
    assert fit(Net(3), plugin)[-1] == 65536.0


def test_lightning_cli_round_trip(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["fit"])
    monkeypatch.setenv("JSONARGPARSE_DEPRECATION_WARNINGS", "off")
    written = tmp_path / "written.yaml"
    written.write_text(
        """
trainer:
  accelerator: cpu
  devices: 1
  max_epochs: 1
  logger: false
  enable_checkpointing: false
  enable_progress_bar: false
  enable_model_summary: false
  plugins:
    - class_path: lightning_opt.DynamicLossScale
      init_args: {init_scale: 256.0, growth_interval: 4, hold_schedulers: false}
"""
    )

    def cli(config: Any, *more: str) -> LightningCLI:
        arguments = ["fit", "--config", str(config), *more]
        return LightningCLI(
            Net, args=arguments, save_config_callback=None, seed_everything_default=False
        )

    with pytest.raises(SystemExit):
        cli(written, "--print_config")
    printed = tmp_path / "printed.yaml"
    printed.write_text(capsys.readouterr().out)
    found = cli(printed)
    plugin = found.trainer.precision_plugin
    assert type(plugin) is lo.DynamicLossScale
    assert (plugin.hold_schedulers, plugin.scaler.get_scale()) == (False, 256.0 * 2**5)


def test_settings_are_checked():
    for settings, message in (
        ({"growth_factor": 1.0}, "growth_factor must be above 1"),
        ({"backoff_factor": 1.0}, "backoff_factor must be below 1"),
        ({"min_scale": 4.0, "init_scale": 2.0}, "min_scale must be at most init_scale, 2.0"),
        ({"growth_interval": 0}, "growth_interval must be"),
        ({"patience": 0}, "patience must be"),
    ):
        with pytest.raises(ValueError, match=message):
            lo.DynamicLossScale(**settings)


def test_refusals():
    class Half(Net):
        def __init__(self) -> None:
            super().__init__()
            self.half()

    class Lbfgs(Net):
        def configure_optimizers(self) -> Any:
            return torch.optim.LBFGS(self.parameters())

    with pytest.raises(ValueError, match="needs weights in float32"):
        fit(Half(), lo.DynamicLossScale())
    with pytest.raises(ValueError, match=r"does not work with torch\.optim"):
        fit(Lbfgs(), lo.DynamicLossScale())


# --- several processes, and a GPU ---------------------------------------------------------------


def _fit_on_a_rank() -> Any:
    net = Net(12, {4: 1e30, 8: 1e30}, warmup=True, rank=1)
    plugin = lo.DynamicLossScale(growth_interval=3)
    scales = fit(net, plugin, strategy="ddp", devices=2)
    return scales, net.rates, dict(net.state_dict())


@pytest.mark.distributed
def test_ranks_skip_together():
    """What overflows on one rank only does so on all, and weights are those of a single process."""
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
def test_on_a_gpu(fused):
    net, logger = Net(40, {3: 1e30, 20: 1e30, 21: math.nan}, fused), MemoryLogger()
    plugin = lo.DynamicLossScale(growth_interval=5, every_n_steps=40)
    fit(net, plugin, accelerator="gpu", logger=logger)
    assert logger.series("loss_scale/skipped")[-1] >= 3
    assert logger.series("loss_scale/skipped")[-1] == logger.series("loss_scale/overflows")[-1] + 1
    assert all(value.isfinite().all() for value in net.state_dict().values())
