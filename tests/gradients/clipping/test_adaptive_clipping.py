"""AdaptiveClipping in a Trainer on one process, against plain torch loops."""

from itertools import islice
from typing import Any

import numpy as np
import pytest
from lightning.pytorch import Callback
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
    train_with_loss_scale,
    weights_of,
)
from tests.helpers.trainers import LossScales, MemoryLogger, loss_scaling, quiet_trainer

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


def train_plainly(accumulate: int, steps: int) -> tuple[list[float], dict[str, Tensor]]:
    model, found = SmallNet(), []
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


@pytest.mark.parametrize(("accumulate", "steps"), [(1, STEPS), (3, 11)])
def test_clipping_and_its_report_equal_a_plain_torch_loop(accumulate, steps):
    expected_norms, expected = train_plainly(accumulate, steps)
    model = SmallNet()
    logger, clipping = fit(
        model,
        lo.FixedNorm(MAX_NORM),
        data=loader_of(steps),
        accumulate_grad_batches=accumulate,
    )
    assert logger.series("clip/norm") == pytest.approx(expected_norms, rel=1e-6)
    assert_same_weights(model, expected, rtol=1e-5, atol=1e-7)
    assert max(expected_norms) > MAX_NORM
    report = clipping.report()
    (row,) = report.rows
    assert row["steps"] == len(expected_norms)
    assert row["norm"] == pytest.approx(expected_norms[-1], rel=1e-6)
    assert row["fraction"] == pytest.approx(np.mean(np.asarray(expected_norms) > MAX_NORM))
    assert "FixedNorm(max_norm=1.5)" in report.to_text()


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


@pytest.mark.parametrize("fused", [False, True], ids=["unfused", "fused"])
def test_fp16_clips_unscaled_gradients(fused):
    expected, scale = SmallNet("Adam"), 2.0**17  # it overflows from time to time on this data
    expected_norms, expected_scales = train_with_loss_scale(expected, scale, MAX_NORM)
    model, scales = SmallNet("Adam", fused=fused), LossScales()
    plugins = [loss_scaling(scale, growth_interval=4)]
    logger, _ = fit(model, lo.FixedNorm(MAX_NORM), scales, plugins=plugins)

    assert scales.seen == expected_scales
    overflow = ~np.isfinite(expected_norms)
    assert np.isfinite(logger.series("clip/norm")).tolist() == (~overflow).tolist()
    assert 0 < overflow.sum() < STEPS
    assert np.asarray(logger.series("clip/norm"))[~overflow] == pytest.approx(
        np.asarray(expected_norms)[~overflow], rel=1e-5
    )
    assert logger.series("clip/nonfinite")[-1] == overflow.sum()
    assert_same_weights(model, expected, rtol=1e-4, atol=1e-6)


# --- errors in setup ------------------------------------------------------------------------------


def test_gradient_clip_val_raises_in_training_only():
    trainer = quiet_trainer(callbacks=[lo.AdaptiveClipping()], gradient_clip_val=0.5)
    trainer.validate(SmallNet("LBFGS"), verbose=False)
    with pytest.raises(ValueError, match=r"gradient_clip_val=0\.5\) would clip twice.*FixedNorm"):
        trainer.fit(SmallNet())


def test_only_unit_wise_raises_under_fsdp1():
    trainer = quiet_trainer()
    trainer._accelerator_connector.strategy = object.__new__(FSDPStrategy)
    with pytest.raises(ValueError, match=r"UnitWise needs each gradient in its own shape.*FSDP2"):
        lo.AdaptiveClipping("unit_wise").setup(trainer, SmallNet(), "fit")
    for rule in RULES.keys() - {"unit_wise"}:
        lo.AdaptiveClipping(rule).setup(trainer, SmallNet(), "fit")


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
