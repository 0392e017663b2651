"""Diagnosis and report from given numbers, without a training."""

from typing import Any

import pytest

from lightning_opt.gradients.health.diagnosis import (
    CRITICAL,
    WARNING,
    Evidence,
    Issue,
    Persistence,
    diagnose,
)
from lightning_opt.gradients.health.gradient_health import layer_rows
from lightning_opt.gradients.health.layer_stats import LayerStats, ParameterStats


def layer(name: str, flow: float = 1e-3, **more: Any) -> LayerStats:
    """A layer of 100 weights with this RMS, the same at each of ten steps."""
    settings = {"count": 10, "mean": 10 * flow, "max": flow, "zeros": 0.0}
    weight = ParameterStats(f"{name}.weight", 100, True, **{**settings, **more})
    return LayerStats(name, [weight])


def layers(*flows: float) -> list[LayerStats]:
    return [layer(f"layer{place}", flow) for place, flow in enumerate(flows)]


def evidence(layers: list[LayerStats], total: float = 1.0, **more: Any) -> Evidence:
    return Evidence(layers, [(step, total) for step in range(11, 21)], **more)


def findings_of(evidence: Evidence, *without: str) -> list[Issue]:
    findings = diagnose(evidence, exploding=100.0, vanishing=1e-7)
    return [finding for finding in findings if finding.type not in without]


def test_share_of_zeros_is_that_of_all_elements():
    weight = ParameterStats("weight", 90, True, count=10, zeros=0.0)
    bias = ParameterStats("bias", 10, True, count=10, zeros=1.0)
    assert LayerStats("layer", [weight, bias]).zeros == 0.1


# --- thresholds, from both sides ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("total", "early", "typical", "severity"),
    [
        (101.0, 50.0, 50.0, WARNING),
        (101.0, 9.0, 10.0, CRITICAL),  # ten times its earlier level
        (100_001.0, 1e5, 1e5, CRITICAL),
        (1.1, 0.01, 0.001, WARNING),
        (1.1, 0.01, 1.0, None),  # an earlier report had this level
        (50.0, 0.001, 0.006, WARNING),
        (50.0, 0.001, 0.004, CRITICAL),  # 12,500 times its earlier level
    ],
)
def test_total_norm_above_the_limit_is_exploding(total, early, typical, severity):
    found = findings_of(evidence(layers(1, 1, 1), total, early=early, typical=typical))
    assert [(f.type, f.severity) for f in found] == ([("exploding", severity)] if severity else [])


@pytest.mark.parametrize(
    ("flows", "expected"),
    [
        ((0.9e-7, 1e-3, 1e-3, 1e-3, 1e-3), WARNING),
        ((1.1e-7, 1e-3, 1e-3, 1e-3, 1e-3), None),
        ((8e-10, 1e-8, 1e-7, 0.9e-6, 0.9e-6), WARNING),
        ((2e-9, 1e-8, 1e-7, 0.9e-6, 0.9e-6), None),  # not a thousandth of the largest
        ((1e-9, 1e-8, 1e-5, 1e-3, 1e-3), CRITICAL),  # two of five
        ((1e-12, 1e-11, 1e-10, 1e-10, 1e-10), None),  # a model that has converged
    ],
)
def test_small_rms_is_vanishing(flows, expected):
    found = findings_of(evidence(layers(*flows)), "bottleneck")
    assert {(f.type, f.severity) for f in found} == (
        {("vanishing", expected)} if expected else set()
    )


@pytest.mark.parametrize(("early", "places"), [(1e-8, ["all layers"]), (1.0, [])])
def test_small_rms_in_all_layers_is_vanishing_unless_the_run_has_converged(early, places):
    faint = evidence(layers(1e-9, 1e-9, 1e-9), 1e-8, early=early, typical=1e-8)
    assert [finding.place for finding in findings_of(faint)] == places


@pytest.mark.parametrize(
    ("flows", "place"),
    [
        ((1e-5, 1e-5, 1e-5, 2e-3, 2e-3, 2e-3), "layer2"),
        ((1e-5, 1e-5, 1e-5, 9e-4, 9e-4, 9e-4), None),
        ((1e-3, 1e-3, 1e-5, 2e-3, 2e-3, 2e-3), None),  # one odd layer
        ((1e-3, 1e-3, 1e-3, 1e-5, 1e-5, 1e-5), None),  # the other way round
    ],
)
def test_lasting_drop_of_rms_is_a_bottleneck(flows, place):
    found = findings_of(evidence(layers(*flows)))
    assert [finding.place for finding in found] == ([place] if place else [])


def test_normalisation_layers_are_not_compared_with_weights():
    gain = LayerStats("norm", [ParameterStats("norm.weight", 9, False, count=1, mean=1e-9)])
    assert not findings_of(evidence([layer("a"), gain, layer("b"), layer("c")]))


# --- persistence --------------------------------------------------------------------------------


def run(reports: list[str]) -> list[set[str]]:
    persistence, seen = Persistence(), []
    for kinds in reports:
        persistence.update([Issue(kind, WARNING, "a", "seen") for kind in kinds.split()])
        seen.append({issue.type for issue in persistence.issues()})
    return seen


@pytest.mark.parametrize(
    ("reports", "expected"),
    [
        (["dead"] * 3, [set(), set(), {"dead"}]),
        (["vanishing", "vanishing", ""], [set(), {"vanishing"}, set()]),
        (["vanishing", "", "vanishing", ""], [set()] * 4),  # not consecutive
        (["nan", ""], [{"nan"}, set()]),
    ],
)
def test_issues_need_reports_in_a_row_and_clear_without_the_finding(reports, expected):
    assert run(reports) == expected


def test_first_nonfinite_finding_is_kept():
    persistence = Persistence()
    persistence.update([Issue("inf", CRITICAL, "encoder.3", "first")])
    persistence.update([Issue("nan", CRITICAL, "all layers", "later")])
    (issue,) = persistence.issues()
    assert (issue.type, issue.place) == ("inf", "encoder.3")


@pytest.mark.parametrize("reports", [(WARNING, CRITICAL), (CRITICAL, WARNING)])
@pytest.mark.parametrize("together", [False, True])
def test_critical_nonfinite_finding_stays_critical(reports, together):
    persistence = Persistence()
    found = [Issue("nan", severity, severity, "seen") for severity in reports]
    for findings in [found] if together else [[one] for one in found]:
        persistence.update(findings)
    (issue,) = persistence.issues()
    # The last place within one report, the first over reports.
    assert (issue.severity, issue.place) == (CRITICAL, reports[1 if together else 0])


# --- report ---------------------------------------------------------------------------------


def test_rows_of_the_worst_issue_come_first():
    found = layers(1e-3, 1e-3, 1e-8, 1e-9, 1e-3)
    persistence = Persistence()
    for _ in range(2):
        persistence.update(findings_of(evidence(found), "bottleneck"))
    issues = persistence.issues()
    rows = layer_rows(found, issues)
    assert (issues[0].place, issues[0].others) == ("layer3", ("layer2",))
    assert [row["layer"] for row in rows] == ["layer3", "layer2", "layer0", "layer1", "layer4"]
    assert [row["state"] for row in rows] == ["vanishing"] * 2 + ["ok"] * 3
