"""Thresholds on the total norm, against independent references and other packages."""

import math
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
import zclip
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

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
from tests.gradients.cases import (
    both_paths,
    every_norm_rule,
    search,
    statistics_of,
    thresholds_of,
)
from tests.gradients.references import lognormal_norms

STEPS = 10_000
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


@cache
def passed_by_zclip(max_norm: float | None) -> tuple[np.ndarray, float, float]:
    """Return the norms after clipping with the package zclip, its mean and its variance."""
    model = nn.Linear(1, 1, bias=False, dtype=torch.float64)
    peer = zclip.ZClip(alpha=0.97, z_thresh=2.5, warmup_steps=25, max_grad_norm=max_norm)
    passed = []
    for norm in lognormal_norms(STEPS):
        model.weight.grad = torch.full((1, 1), norm, dtype=torch.float64)
        peer.step(model)
        passed.append(model.weight.grad.item())
    return np.array(passed), peer.mean, peer.var


@both_paths
@pytest.mark.parametrize("max_norm", [None, 1.0])
def test_zclip_equals_the_package(max_norm: float | None, path: str) -> None:
    rule = ZClip(alpha=0.97, z=2.5, warmup=25, max_norm=max_norm)
    norms, state = np.array(lognormal_norms(STEPS)), rule.init()
    limits = np.array(thresholds_of(rule, norms.tolist(), path, state))
    passed, mean, var = passed_by_zclip(max_norm)
    ours = np.where(norms > limits, norms * limits / (norms + 1e-6), norms)
    np.testing.assert_allclose(ours, passed, rtol=1e-5)
    assert (ours < 0.99 * norms).mean() > 0.01, "the trace must show clipping"
    assert list(map(float, state["moments"]))[:2] == pytest.approx([mean, var], rel=1e-9)


@every_norm_rule
def test_host_and_device_agree(make: Any) -> None:
    norms = lognormal_norms(1_000, seed=1)
    norms[500:560] = [20.0 * norm for norm in norms[500:560]]  # a lasting shift
    np.testing.assert_allclose(
        thresholds_of(make(), norms, "device"), thresholds_of(make(), norms, "host"), rtol=1e-12
    )


# --- faults ---------------------------------------------------------------------------------------


def run(rule: NormRule, norms: list[float], path: str) -> tuple[list[float], dict[str, Any]]:
    state = rule.init()
    return thresholds_of(rule, norms, path, state), statistics_of(state)


faults = st.lists(st.tuples(st.integers(0, 40), st.sampled_from([NAN, INF, 0.0])), max_size=12)


@both_paths
@every_norm_rule
@search
@given(faults=faults)
def test_nonfinite_norm_changes_no_statistic(
    make: Any, path: str, faults: list[tuple[int, float]]
) -> None:
    clean = lognormal_norms(40, seed=2)
    expected, statistics = run(make(), clean, path)

    norms: list[float] = []
    for index, norm in enumerate([*clean, None]):
        norms += [fault for position, fault in faults if position == index]
        norms += [] if norm is None else [norm]
    thresholds, after = run(make(), norms, path)

    assert after == statistics
    assert [t for t, n in zip(thresholds, norms, strict=True) if 0 < n < INF] == expected
    assert not any(map(math.isnan, thresholds))


@both_paths
@every_norm_rule
def test_norm_whose_square_overflows_keeps_statistics_finite(make: Any, path: str) -> None:
    norms = lognormal_norms(300, seed=3)
    for index in (3, 20, 100):
        norms.insert(index, 1e200)
    assert 0.0 < thresholds_of(make(), [*norms, 1e6], path)[-1] < 100.0


# --- behaviour that other packages lack -----------------------------------------------------------


def passes(rule: NormRule, norms: list[float]) -> np.ndarray:
    return np.minimum(norms, thresholds_of(rule, norms))


def over_seeds(measure: Any) -> float:
    return float(np.median([measure(seed) for seed in range(20)]))


def steady(steps: int, seed: int) -> list[float]:
    return list(np.exp(0.2 * np.random.default_rng(seed).standard_normal(steps)))


def test_hundredfold_spike_is_clipped_to_twofold() -> None:
    assert over_seeds(lambda s: passes(Robust(), [*steady(500, s), 100.0])[-1]) <= 2.0


def test_tenth_spike_in_a_row_is_clipped_to_twofold() -> None:
    assert over_seeds(lambda s: passes(Robust(), steady(500, s) + [100.0] * 10)[-1]) <= 2.0


def test_spike_does_not_raise_later_thresholds() -> None:
    def rise(seed: int) -> float:
        norms = steady(400, seed)
        quiet, spiked = list(norms), list(norms)
        spiked[300] = 100.0
        return thresholds_of(Robust(), spiked)[-1] / thresholds_of(Robust(), quiet)[-1]

    assert over_seeds(rise) <= 1.02


def test_lasting_shift_is_accepted_within_fifty_steps() -> None:
    def steps_to_accept(seed: int) -> int:
        norms = steady(500, seed) + [10.0 * norm for norm in steady(200, seed + 100)]
        passing = np.array(norms) <= np.array(thresholds_of(Robust(), norms))
        return next(n for n in range(190) if passing[500 + n : 510 + n].all())

    assert 0 < over_seeds(steps_to_accept) <= 50


def test_steady_or_drifting_run_is_hardly_clipped() -> None:
    def share(seed: int, drift: float) -> float:
        norms = np.array(steady(3_000, seed)) * (1 + drift) ** np.arange(3_000)
        return float(np.mean(norms > np.array(thresholds_of(Robust(), norms.tolist()))))

    assert over_seeds(lambda s: share(s, 0.0)) <= 0.01
    assert over_seeds(lambda s: share(s, 0.005)) <= 0.01


def test_without_patience_a_shift_is_accepted_later() -> None:
    norms = [1.0] * 300 + [10.0] * 60
    patient = np.array(thresholds_of(Robust(patience=None), norms))
    assert (patient[300:] < 10.0).all()
    assert (np.array(thresholds_of(Robust(patience=25), norms))[326:] > 10.0).all()


# --- arguments ------------------------------------------------------------------------------------

WRONG_NUMBERS = [0, -1.0, NAN, INF, True, "1", None]
WRONG_SHARES = [1.0, -0.1, NAN, True, "0.9", None]
WRONG_COUNTS = [0, -1, 2.5, NAN, True, "9"]
NUMBER = "must be a finite number above 0"
SHARE = "must be a number of at least 0 and below 1"
ARGUMENTS: list[tuple[type[ClippingRule], str, list[Any], str]] = [
    (FixedNorm, "max_norm", WRONG_NUMBERS, NUMBER),
    (FixedValue, "max_value", WRONG_NUMBERS, NUMBER),
    (MeanStd, "k", WRONG_NUMBERS, NUMBER),
    (MeanStd, "window", [*WRONG_COUNTS, None, 1], "must be a whole number of at least 2"),
    (MeanStd, "warmup", [*WRONG_COUNTS, 1], "must be a whole number of at least 2"),
    (MeanStd, "warmup", [101], "must be at most window"),
    (MeanStd, "history", ["all", None, True], "'raw', 'clipped'"),
    (Percentile, "percentile", [-0.1, 100.1, NAN, True, "10"], "must be a number from 0 to 100"),
    (Percentile, "window", [*WRONG_COUNTS, 1], "must be a whole number of at least 2"),
    (ZClip, "alpha", WRONG_SHARES, SHARE),
    (ZClip, "z", WRONG_NUMBERS, NUMBER),
    (ZClip, "warmup", [*WRONG_COUNTS, 1], "must be a whole number of at least 2"),
    (ZClip, "max_norm", WRONG_NUMBERS[:-1], NUMBER),
    (Robust, "k", WRONG_NUMBERS, NUMBER),
    (Robust, "decay", WRONG_SHARES, SHARE),
    (Robust, "winsor", WRONG_NUMBERS, NUMBER),
    (Robust, "warmup", [*WRONG_COUNTS, 1], "must be a whole number of at least 2"),
    (Robust, "patience", WRONG_COUNTS, "must be a whole number of at least 1"),
    (Robust, "min_std", WRONG_NUMBERS, NUMBER),
    (PerParameter, "factor", WRONG_NUMBERS, NUMBER),
    (PerParameter, "decay", WRONG_SHARES, SHARE),
    (PerParameter, "warmup", WRONG_COUNTS, "must be a whole number of at least 1"),
    (PerParameter, "warmup_norm", WRONG_NUMBERS, NUMBER),
    (UnitWise, "clip_factor", WRONG_NUMBERS, NUMBER),
    (UnitWise, "eps", WRONG_NUMBERS, NUMBER),
]


@pytest.mark.parametrize(("rule", "name", "wrong", "message"), ARGUMENTS)
def test_invalid_argument_raises(
    rule: type[ClippingRule], name: str, wrong: list[Any], message: str
) -> None:
    for value in wrong:
        with pytest.raises(ValueError, match=message) as raised:
            rule(**{name: value})
        assert name in str(raised.value)
        assert repr(value) in str(raised.value)


def test_percentile_takes_both_ends() -> None:
    assert Percentile(0).percentile == 0
    assert Percentile(100.0).percentile == 100.0


def test_repr_shows_the_settings() -> None:
    assert repr(ZClip(z=3.0)) == "ZClip(alpha=0.97, z=3.0, warmup=25, max_norm=None)"
    assert repr(Percentile(5.0, 10)) == "Percentile(percentile=5.0, window=10)"
