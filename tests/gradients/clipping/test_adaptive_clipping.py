"""AdaptiveClipping in a Trainer on one process, against plain torch loops."""

from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.strategies import FSDPStrategy
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

import lightning_opt as lo
from lightning_opt.gradients.clipping.gradient_clipper import RULES
from tests.helpers.models import (
    AdversarialNet,
    SmallNet,
    assert_same_weights,
    loader_of,
    weights_of,
)
from tests.helpers.trainers import MemoryLogger, quiet_trainer

MAX_NORM = 1.5
STEPS = 12


def fit(
    model: Any,
    rule: str | lo.ClippingRule,
    *callbacks: Callback,
    every_n_steps: int = 1,
    **settings: Any,
) -> tuple[MemoryLogger, lo.AdaptiveClipping]:
    """Train with the rule before other callbacks; return the logger and the callback."""
    logger, clipping = MemoryLogger(), lo.AdaptiveClipping(rule, every_n_steps)
    data = settings.pop("data", None)
    trainer = quiet_trainer(**{"logger": logger, **settings}, callbacks=[clipping, *callbacks])
    trainer.fit(model, data)
    return logger, clipping


# --- the clip itself ------------------------------------------------------------------------------


def train_plainly(
    optimizer_name: str = "SGD", accumulate: int = 1, steps: int = STEPS
) -> tuple[list[float], dict[str, Tensor]]:
    """Train with ``clip_grad_norm_`` and return norms and weights."""
    model, found = SmallNet(optimizer_name), []
    optimizer = model.configure_optimizers()
    loader = iter(loader_of(steps))
    while window := list(islice(loader, accumulate)):
        optimizer.zero_grad()
        for inputs, targets in window:
            # Lightning divides by the length of a full window, also in a short last one.
            (nn.functional.mse_loss(model.layer(inputs), targets) / accumulate).backward()
        found.append(clip_grad_norm_(model.parameters(), MAX_NORM).item())
        optimizer.step()
    return found, weights_of(model)


@pytest.mark.parametrize("optimizer", ["SGD", "Adam"])
@pytest.mark.parametrize(("accumulate", "steps"), [(1, STEPS), (3, STEPS), (3, 11)])
def test_clipping_equals_a_plain_torch_loop(optimizer, accumulate, steps):
    expected_norms, expected = train_plainly(optimizer, accumulate, steps)
    model = SmallNet(optimizer)
    logger, _ = fit(
        model,
        lo.FixedNorm(MAX_NORM),
        data=loader_of(steps),
        accumulate_grad_batches=accumulate,
    )
    assert logger.series("clip/norm") == pytest.approx(expected_norms, rel=1e-6)
    assert_same_weights(model, expected, rtol=1e-5, atol=1e-7)
    assert max(expected_norms) > MAX_NORM


@pytest.mark.filterwarnings("ignore:`training_step` returned `None`")
def test_step_without_a_loss_is_not_counted():
    class Skipping(SmallNet):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return None if batch_idx % 3 == 1 else super().training_step(batch, batch_idx)

    logger, clipping = fit(Skipping(), "mean_std")
    (row,) = clipping.report().rows
    assert row["steps"] == len(logger.records) == 8
    assert clipping.state_dict()[0]["rule"]["count"] == 8


def test_callback_after_clipping_sees_clipped_norms():
    tighter = lo.AdaptiveClipping(lo.FixedNorm(0.1), every_n_steps=1)
    logger, _ = fit(SmallNet(), lo.FixedNorm(MAX_NORM), tighter)
    logged = logger.series("clip/norm")
    assert logged[1::2] == pytest.approx(np.minimum(logged[::2], MAX_NORM), rel=1e-5)
    assert min(logged[::2]) < MAX_NORM < max(logged[::2])


# --- several optimizers ---------------------------------------------------------------------------


def test_adversarial_training_equals_a_plain_loop():
    model, plain = AdversarialNet(generator_every=2), AdversarialNet(generator_every=2)
    logger, _ = fit(model, lo.FixedNorm(MAX_NORM))

    generator, discriminator = plain.configure_optimizers()
    expected: dict[str, list[float]] = {"0": [], "1": []}
    for index, batch in enumerate(loader_of(STEPS)):
        discriminator.zero_grad()
        plain.discriminator_loss(batch).backward()
        own = plain.discriminator.parameters()
        expected["1"].append(clip_grad_norm_(own, MAX_NORM).item())
        discriminator.step()
        if index % 2 == 0:
            generator.zero_grad()
            plain.generator_loss(batch).backward()
            own = plain.generator.parameters()
            expected["0"].append(clip_grad_norm_(own, MAX_NORM).item())
            generator.step()
    for index, trace in expected.items():
        assert logger.series(f"clip/{index}/norm") == pytest.approx(trace, rel=1e-6)
        assert min(trace) < MAX_NORM < max(trace)
    assert_same_weights(model, plain, rtol=1e-5, atol=1e-7)


# --- precision ------------------------------------------------------------------------------------


class ScaleSpy(Callback):
    """Records the loss scale after each step; it falls after an overflow."""

    def __init__(self) -> None:
        self.scales: list[float] = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.scales.append(trainer.precision_plugin.scaler.get_scale())


def half_trainer(init_scale: float) -> tuple[MixedPrecision, ScaleSpy]:
    scaler = torch.amp.GradScaler("cpu", init_scale=init_scale, growth_interval=4)
    return MixedPrecision("16-mixed", "cpu", scaler), ScaleSpy()


def train_plainly_scaled(
    optimizer_name: str, init_scale: float
) -> tuple[list[float], list[float], dict[str, Tensor]]:
    """Norms, loss scales and weights of torch's recipe for clipping under a loss scaler."""
    model, found, scales = SmallNet(optimizer_name), [], []
    optimizer = model.configure_optimizers()
    scaler = torch.amp.GradScaler("cpu", init_scale=init_scale, growth_interval=4)
    for inputs, targets in loader_of(STEPS):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = nn.functional.mse_loss(model.layer(inputs), targets)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        found.append(clip_grad_norm_(model.parameters(), MAX_NORM).item())
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return found, scales, weights_of(model)


# On a batch of this data the first scale overflows from time to time, the second never.
@pytest.mark.parametrize("init_scale", [2.0**17, 2.0**8])
@pytest.mark.parametrize("fused", [False, True], ids=["unfused", "fused"])
def test_fp16_clips_unscaled_gradients(fused, init_scale):
    expected_norms, expected_scales, expected = train_plainly_scaled("Adam", init_scale)
    plugin, spy = half_trainer(init_scale)
    model = SmallNet("Adam", fused=fused)
    logger, _ = fit(model, lo.FixedNorm(MAX_NORM), spy, plugins=[plugin])

    assert spy.scales == expected_scales
    overflow = ~np.isfinite(expected_norms)
    assert np.isfinite(logger.series("clip/norm")).tolist() == (~overflow).tolist()
    assert overflow.any() == (init_scale == 2.0**17)
    assert np.asarray(logger.series("clip/norm"))[~overflow] == pytest.approx(
        np.asarray(expected_norms)[~overflow], rel=1e-5
    )
    assert logger.series("clip/nonfinite")[-1] == overflow.sum()
    assert_same_weights(model, expected, rtol=1e-4, atol=1e-6)


# --- errors in setup ------------------------------------------------------------------------------


def test_gradient_clip_val_raises():
    with pytest.raises(ValueError, match=r"gradient_clip_val=0\.5\) would clip twice.*FixedNorm"):
        fit(SmallNet(), "robust", gradient_clip_val=0.5)


def under(strategy: type) -> Any:
    """A Trainer with an uninitialised strategy of this class."""
    trainer = quiet_trainer()
    trainer._accelerator_connector.strategy = object.__new__(strategy)
    return trainer


def test_only_unit_wise_raises_under_fsdp1():
    with pytest.raises(ValueError, match=r"UnitWise needs each gradient in its own shape.*FSDP2"):
        lo.AdaptiveClipping("unit_wise").setup(under(FSDPStrategy), SmallNet(), "fit")
    for rule in RULES.keys() - {"unit_wise"}:
        lo.AdaptiveClipping(rule).setup(under(FSDPStrategy), SmallNet(), "fit")


def test_validation_alone_raises_nothing():
    callback = lo.AdaptiveClipping()
    trainer = quiet_trainer(callbacks=[callback], gradient_clip_val=0.5)
    trainer.validate(SmallNet("LBFGS"), verbose=False)


# --- logging --------------------------------------------------------------------------------------


EXPECTED_KEYS = {
    "fixed_norm": {"norm", "threshold", "coefficient", "fraction", "nonfinite"},
    "unit_wise": {"norm", "coefficient", "fraction", "nonfinite"},
    "fixed_value": {"norm", "fraction", "nonfinite"},
}


@pytest.mark.parametrize("rule", EXPECTED_KEYS)
def test_logged_keys_and_steps(rule):
    logger, _ = fit(SmallNet(), rule, every_n_steps=5, max_epochs=2)
    ours = [(step, keys) for step, keys in logger.records if "clip/norm" in keys]
    assert [step for step, _ in ours] == [4, 9, 14, 19]
    assert ours[-1][1].keys() == {f"clip/{key}" for key in EXPECTED_KEYS[rule]}


def test_other_callbacks_can_monitor_the_norm(tmp_path):
    stop = EarlyStopping("clip/norm", mode="min", stopping_threshold=1e9)
    keep = ModelCheckpoint(tmp_path, monitor="clip/norm", mode="min")
    logger, _ = fit(SmallNet(), "robust", stop, keep, max_epochs=3, enable_checkpointing=True)
    assert stop.stopped_epoch == 0
    assert len(logger.series("clip/norm")) == STEPS
    assert keep.best_model_score.item() == pytest.approx(logger.series("clip/norm")[-1], rel=1e-6)


def test_report_has_steps_norm_and_fraction():
    logger, clipping = fit(SmallNet(), lo.FixedNorm(MAX_NORM), every_n_steps=100)
    report = clipping.report()
    assert logger.records == []
    expected, _ = train_plainly()
    (row,) = report.rows
    assert row["steps"] == STEPS
    assert row["norm"] == pytest.approx(expected[-1], rel=1e-6)
    assert row["fraction"] == pytest.approx(np.mean(np.asarray(expected) > MAX_NORM))
    assert "FixedNorm(max_norm=1.5)" in report.to_text()
    assert lo.AdaptiveClipping().report().rows == []


# --- from run to run ------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")
def test_other_rule_does_not_resume_this_state(tmp_path):
    trainer = quiet_trainer(callbacks=[lo.AdaptiveClipping("robust")])
    trainer.fit(SmallNet())
    trainer.save_checkpoint(tmp_path / "robust.ckpt")
    other = lo.AdaptiveClipping("zclip")
    quiet_trainer(callbacks=[other], max_epochs=2).fit(
        SmallNet(), ckpt_path=tmp_path / "robust.ckpt", weights_only=True
    )
    assert other.report().rows[0]["steps"] == STEPS
