"""Diagnosis, report and figure from numbers that are given, without a training."""

import io
import math
from typing import Any

import pytest

from lightning_opt.core.output.report import Report
from lightning_opt.gradients.health.diagnosis import Evidence, diagnose
from lightning_opt.gradients.health.issues import CRITICAL, WARNING, Issue, Persistence
from lightning_opt.gradients.health.plot import draw_health
from lightning_opt.gradients.health.report import layer_rows, summarise
from lightning_opt.gradients.health.vitals import (
    LayerVitals,
    ParameterVitals,
    module_of,
)


def layer(name: str, flow: float = 1e-3, **more: Any) -> LayerVitals:
    """A layer of 100 weights with this RMS, the same at each of ten steps."""
    settings = {"count": 10, "mean": 10 * flow, "norm": 10 * flow, "max": flow, "zeros": 0.0}
    weight = ParameterVitals(f"{name}.weight", 100, True, **{**settings, **more})
    return LayerVitals(name, [weight])


def layers(*flows: float) -> list[LayerVitals]:
    return [layer(f"layer{place}", flow) for place, flow in enumerate(flows)]


def evidence(found: list[LayerVitals], total: float = 1.0, **more: Any) -> Evidence:
    return Evidence(found, [(step, total) for step in range(11, 21)], **more)


def found_in(seen: Evidence, *left_out: str) -> list[Issue]:
    """What the default limits find, without some types."""
    findings = diagnose(seen, exploding=100.0, vanishing=1e-7)
    return [finding for finding in findings if finding.type not in left_out]


def types(seen: Evidence, *left_out: str) -> set[tuple[str, str]]:
    return {(finding.type, finding.severity) for finding in found_in(seen, *left_out)}


def find(seen: Evidence, *left_out: str) -> Issue:
    (finding,) = found_in(seen, *left_out)
    return finding


# --- thresholds: each from both sides -----------------------------------------------------------


@pytest.mark.parametrize(
    ("total", "early", "typical", "expected"),
    [
        (99.0, 50.0, 50.0, set()),
        (101.0, 50.0, 50.0, {("exploding", WARNING)}),
        (101.0, 9.0, 10.0, {("exploding", CRITICAL)}),  # ten times what it was
        (100_001.0, 1e5, 1e5, {("exploding", CRITICAL)}),
        (0.9, 0.01, 0.001, set()),
        (1.1, 0.01, 0.001, {("exploding", WARNING)}),
        (1.1, 0.01, 1.0, set()),  # it was there before
        (101.0, 0.001, 0.01, {("exploding", CRITICAL)}),
        (50.0, None, None, set()),
    ],
)
def test_exploding(total, early, typical, expected):
    assert types(evidence(layers(1, 1, 1), total, early=early, typical=typical)) == expected


@pytest.mark.parametrize(
    ("flows", "before", "expected"),
    [
        ((0.9e-7, 1e-3, 1e-3, 1e-3, 1e-3), {}, WARNING),
        ((1.1e-7, 1e-3, 1e-3, 1e-3, 1e-3), {}, None),
        ((8e-10, 1e-8, 1e-7, 0.9e-6, 0.9e-6), {}, WARNING),
        ((2e-9, 1e-8, 1e-7, 0.9e-6, 0.9e-6), {}, None),  # not a thousandth of the largest
        ((1e-9, 1e-8, 1e-5, 1e-3, 1e-3), {}, CRITICAL),  # two of five
        ((1e-8, 1e-3, 1e-3, 1e-3, 1e-3), {"layer0": 1e-9}, None),  # on its way up
        ((1e-12, 1e-11, 1e-10, 1e-10, 1e-10), {}, None),  # a model that has converged
    ],
)
def test_vanishing(flows, before, expected):
    found = types(evidence(layers(*flows), before=before), "bottleneck")
    assert found == ({("vanishing", expected)} if expected else set())


def test_a_model_without_any_gradient_from_the_start():
    faint = evidence(layers(1e-9, 1e-9, 1e-9), 1e-8, early=1e-8, typical=1e-8)
    assert find(faint).place == "all layers"
    converged = evidence(layers(1e-9, 1e-9, 1e-9), 1e-8, early=1.0, typical=1e-8)
    assert not found_in(converged)


@pytest.mark.parametrize(
    ("flows", "place"),
    [
        ((1e-5, 1e-5, 1e-5, 2e-3, 2e-3, 2e-3), "layer2"),
        ((1e-5, 1e-5, 1e-5, 9e-4, 9e-4, 9e-4), None),
        ((1e-3, 1e-3, 1e-5, 2e-3, 2e-3, 2e-3), None),  # one odd layer
        ((1e-3, 1e-3, 1e-3, 1e-5, 1e-5, 1e-5), None),  # the other way round
    ],
)
def test_bottleneck(flows, place):
    found = found_in(evidence(layers(*flows)))
    assert [finding.place for finding in found] == ([place] if place else [])


def test_imbalance_needs_a_ratio_to_the_others_and_a_size_of_its_own():
    def updates(*ratios: float) -> Evidence:
        found = [layer(f"l{i}", update=r, weight=1.0) for i, r in enumerate(ratios)]
        return evidence(found)

    assert find(updates(1e-4, 0.02, 1e-4)).place == "l1"
    assert not found_in(updates(1e-3, 0.02, 1e-3))
    assert not found_in(updates(1e-6, 5e-3, 1e-6))
    loud = evidence([layer("a"), layer("b", 0.11), layer("c")])
    assert find(loud, "bottleneck").place == "b"


def test_dead_behind_a_vanishing_layer_has_underflowed():
    found = layers(0.0, 0.0, 1e-9, 1e-3, 1e-3)
    findings = found_in(evidence(found), "bottleneck")
    assert {(f.type, f.place) for f in findings} == {
        ("vanishing", "layer0"), ("vanishing", "layer1"), ("vanishing", "layer2"),
    }  # fmt: skip
    dead = found_in(evidence(layers(0.0, 0.0, 1e-3)))
    assert {f.type for f in dead} == {"dead"}
    assert max(dead, key=lambda f: f.badness).place == "layer1"


def test_normalisation_layers_are_not_compared_with_weights():
    gain = LayerVitals("norm", [ParameterVitals("norm.weight", 9, False, count=1, mean=1e-9)])
    found = [layer("a"), gain, layer("b"), layer("c")]
    assert not found_in(evidence(found))


# --- persistence --------------------------------------------------------------------------------


def run(reports: list[str]) -> list[set[str]]:
    persistence, seen = Persistence(), []
    for number, kinds in enumerate(reports):
        found = [Issue(kind, WARNING, "a", "seen") for kind in kinds.split()]
        persistence.update(found, number)
        seen.append({issue.type for issue in persistence.issues({})})
    return seen


def test_issues_come_late_and_go_late():
    assert run(["dead", "dead", "dead"]) == [set(), set(), {"dead"}]
    assert run(["vanishing", "vanishing", "", ""]) == [
        set(), {"vanishing"}, {"vanishing"}, set()
    ]  # fmt: skip
    assert run(["vanishing", "", "vanishing", ""]) == [set()] * 4  # not in a row
    assert run(["nan", "", ""]) == [{"nan"}, {"nan"}, set()]


def test_where_a_nan_came_from_is_not_overwritten_by_what_it_led_to():
    persistence = Persistence()
    persistence.update([Issue("inf", CRITICAL, "encoder.3", "first")], 10)
    persistence.update([Issue("nan", CRITICAL, "all layers", "later")], 20)
    (issue,) = persistence.issues({})
    assert (issue.type, issue.place, issue.since) == ("inf", "encoder.3", 10)


def test_several_places_are_one_issue_named_by_the_worst():
    persistence = Persistence()
    found = [Issue("stale", WARNING, name, name, badness) for name, badness in
             (("c", 1.0), ("a", 3.0), ("b", 2.0))]  # fmt: skip
    for number in range(2):
        persistence.update(found, number)
    (issue,) = persistence.issues({"c": 0, "b": 1, "a": 2})
    assert (issue.place, issue.others) == ("a", ("c", "b"))


# --- what a person sees -------------------------------------------------------------------------


def test_the_report_says_what_where_and_what_to_do():
    found = layers(1e-9, 1e-8, 1e-4, 1e-3, 1e-3)
    persistence = Persistence()
    for step in (10, 20):
        persistence.update(found_in(evidence(found), "bottleneck"), step)
    issues = persistence.issues({f"layer{i}": i for i in range(5)})
    rows = layer_rows(found, issues)
    text = str(Report(f"{summarise(issues, 20, 2)}", rows, [issues[0].advice]))
    assert text.startswith("critical: vanishing at layer0 and 1 more")
    assert "residual connections" in text
    assert issues[0].others == ("layer1",)
    assert [row["layer"] for row in rows[:2]] == ["layer0", "layer1"]


def test_a_healthy_run_is_called_so_and_one_that_was_not_is_not():
    assert str(summarise([], 100, 2)) == "healthy: no issue in 100 steps"
    assert {row["state"] for row in layer_rows(layers(1, 1), [])} == {"ok"}
    status, sentence = summarise([], 100, 2, nonfinite=2)
    assert status == "warning"
    assert "2 of 100 steps" in sentence


@pytest.mark.parametrize("count", [0, 1, 300])
def test_the_figure_of_any_number_of_layers(count):
    found = [layer(f"blocks.{i}.attention.projection", 1e-3) for i in range(count)]
    entry = {"low": 0.5, "median": 1.0, "high": 200.0}
    timeline = [{"step": s, **entry, "flow": {x.name: x.flow for x in found}} for s in (10, 20)]
    figure = draw_health(summarise([], 20, 2), [], found, {0: timeline}, 100.0, 1e-7)
    figure.savefig(io.BytesIO())
    assert len(figure.axes[0].get_xticks()) <= 40


def test_the_figure_of_a_run_that_was_never_finite():
    found = [layer("a", count=0, mean=0.0, nan=3, norm=math.nan)]
    issues_of = Persistence()
    issues_of.update([Issue("nan", CRITICAL, "a", "NAN gradients")], 1)
    issues = issues_of.issues({})
    draw_health(summarise(issues, 3, 1), issues, found, {0: []}, 100.0, 1e-7).savefig(io.BytesIO())


def test_the_figure_before_any_step():
    draw_health(summarise([], 0, 0), [], [], {}, 100.0, 1e-7).savefig(io.BytesIO())


def test_names():
    assert module_of("net.0.weight") == "net.0"
    assert module_of("weight") == "(root)"
