"""Thresholds on the total norm, against independent references and other packages."""

import math
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
import zclip
from torch import nn

from benchmarks.gradients.clipping_rules import measure
from lightning_opt.gradients.clipping.norm_rules import (
    ClippingRule,
    FixedNorm,
    MeanStd,
    NormRule,
    Percentile,
    Robust,
    ZClip,
)
from lightning_opt.gradients.clipping.tensor_rules import FixedValue, PerParameter, UnitWise
from tests.gradients import references
from tests.gradients.cases import both_paths, thresholds_of
from tests.gradients.references import lognormal_norms

STEPS = 1_000
NAN, INF = math.nan, math.inf

# --- the same thresholds as an independent reference ----------------------------------------------

TRACES: dict[str, tuple[NormRule, Any]] = {
    "fixed": (FixedNorm(0.7), lambda norms: [0.7] * len(norms)),
    "mean_std-raw": (
        MeanStd(k=2.0, window=100),
        lambda norms: references.mean_std(norms, 2.0, 100, "raw", 10),
    ),
    "mean_std-clipped": (
        MeanStd(k=1.5, window=50, history="clipped", warmup=30),
        lambda norms: references.mean_std(norms, 1.5, 50, "clipped", 30),
    ),
    "percentile-window": (
        Percentile(90.0, window=64),
        lambda norms: references.percentile(norms, 90.0, 64),
    ),
    "percentile-all": (Percentile(), lambda norms: references.percentile(norms, 10.0, None)),
    "robust": (Robust(), references.robust),
    "robust-other": (
        Robust(k=1.5, decay=0.9, winsor=1.0, warmup=5, patience=2, min_std=0.3),
        lambda norms: references.robust(norms, 1.5, 0.9, 1.0, 5, 2, 0.3),
    ),
}


@cache
def reference_of(name: str) -> np.ndarray:
    return np.array(TRACES[name][1](lognormal_norms(STEPS)))


@pytest.mark.slow
@both_paths
@pytest.mark.parametrize("name", TRACES)
def test_thresholds_equal_the_reference(name: str, path: str) -> None:
    measured = thresholds_of(TRACES[name][0], lognormal_norms(STEPS), path)
    np.testing.assert_allclose(measured, reference_of(name), rtol=1e-5)


WARMUP = 25
ZCLIP_NORMS = lognormal_norms(STEPS)
ZCLIP_NORMS[WARMUP] *= 50  # the first one after the warm-up is a spike


@cache
def passed_by_zclip(max_norm: float | None) -> tuple[np.ndarray, float, float]:
    """Return the norms after clipping with the package zclip, its mean and its variance."""
    model = nn.Linear(1, 1, bias=False, dtype=torch.float64)
    peer = zclip.ZClip(alpha=0.97, z_thresh=2.5, warmup_steps=WARMUP, max_grad_norm=max_norm)
    passed = []
    for norm in ZCLIP_NORMS:
        model.weight.grad = torch.full((1, 1), norm, dtype=torch.float64)
        peer.step(model)
        passed.append(model.weight.grad.item())
    return np.array(passed), peer.mean, peer.var


@both_paths
@pytest.mark.parametrize("max_norm", [None, 1.0])
def test_zclip_equals_the_package(max_norm: float | None, path: str) -> None:
    rule = ZClip(alpha=0.97, z=2.5, warmup=WARMUP, max_norm=max_norm)
    norms, state = np.array(ZCLIP_NORMS), rule.init()
    limits = np.array(thresholds_of(rule, norms.tolist(), path, state))
    passed, mean, var = passed_by_zclip(max_norm)
    ours = np.where(norms > limits, norms * limits / (norms + 1e-6), norms)
    np.testing.assert_allclose(ours, passed, rtol=1e-5)
    assert (ours < 0.99 * norms).mean() > 0.01, "the trace must show clipping"
    assert list(map(float, state["moments"]))[:2] == pytest.approx([mean, var], rel=1e-9)


# --- behaviour that other packages lack -----------------------------------------------------------


def test_robust_clips_spikes_and_hardly_any_step_of_a_steady_or_drifting_run() -> None:
    measured = measure(Robust, seeds=8)
    found = {name: float(str(value).strip("x%")) for name, value in measured.items()}
    assert max(found["spike"], found["burst"]) <= 2.0  # times the usual norm
    assert max(found["steady"], found["drift"]) <= 1.0  # percent of the steps
    assert 0 < found["shift"] <= 50  # steps until a lasting shift is accepted


def test_without_patience_a_shift_is_not_accepted() -> None:
    norms = [1.0] * 300 + [10.0] * 60
    assert max(thresholds_of(Robust(patience=None), norms)[300:]) < 10.0
    assert min(thresholds_of(Robust(patience=25), norms)[326:]) > 10.0


# --- arguments ------------------------------------------------------------------------------------

WRONG: dict[type[ClippingRule], dict[str, Any]] = {
    FixedNorm: {"max_norm": 0},
    FixedValue: {"max_value": True},
    MeanStd: {"k": NAN, "window": 1, "warmup": 101, "history": "all"},
    Percentile: {"percentile": 100.1, "window": 1},
    ZClip: {"alpha": 1.0, "z": INF, "warmup": 1, "max_norm": "1"},
    Robust: {"k": -1.0, "decay": 1.0, "winsor": 0, "warmup": 1, "patience": 0, "min_std": None},
    PerParameter: {"factor": 0, "decay": -0.1, "warmup": 0, "warmup_norm": NAN},
    UnitWise: {"clip_factor": 0, "eps": INF},
}


@pytest.mark.parametrize("rule", WRONG, ids=lambda rule: rule.__name__)
def test_invalid_argument_raises_with_name_and_value(rule: type[ClippingRule]) -> None:
    for name, value in WRONG[rule].items():
        with pytest.raises(ValueError, match=name) as raised:
            rule(**{name: value})
        assert repr(value) in str(raised.value)
