"""The timeout of trials, and the key of a search."""

from functools import partial
from typing import Any

import pytest

import lightning_opt as lo
from lightning_opt.tuner.trial import Objective
from lightning_opt.tuner.tuning import Plan


def plan(budget: float, timeout: float | None = None) -> Plan:
    return Plan("a:model", "a:data", {}, None, Objective(), budget, timeout)


@pytest.mark.parametrize("budget", [10.0, 60.0, 600.0, 7200.0])
def test_timeout_follows_from_the_baseline_s_start(budget: float) -> None:
    """A model that takes a minute to start does not fail, however short the budget is."""
    assert plan(budget).timeout_after(0.0) >= max(300.0, budget)
    assert plan(budget).timeout_after(60.0) >= 240.0
    assert 30.0 <= plan(budget).timeout_after(1.0) <= 300.0


def test_given_timeout_holds() -> None:
    assert (
        plan(60.0, timeout=7.0).timeout_after(0.0)
        == plan(60.0, timeout=7.0).timeout_after(60.0)
        == 7.0
    )


def factory(depth: int = 3) -> int:
    return depth


def key(**parts: Any) -> str:
    usual = {"model": "a:model", "data": factory, "base": {}, "candidates": None}
    made = Plan(**{**usual, "objective": Objective(), "budget": 60.0, **parts})
    return repr(made.key())


def test_key_covers_code_settings_and_objective() -> None:
    """Functions by their code, objects by their attributes; the budget does not count."""
    found = {
        key(**parts)
        for parts in (
            {},
            {"model": "b:model"},
            {"data": partial(factory, depth=4)},
            {"data": partial(factory, depth=5)},
            {"data": lambda: 4},
            {"base": {"callbacks": [lo.CompileModel()]}},
            {"base": {"callbacks": [lo.CompileModel(scope="regions")]}},
            {"candidates": ["fused"]},
            {"objective": Objective("memory")},
        )
    }
    assert len(found) == 9
    assert key() == key(budget=90.0)
    compiled = {"base": {"callbacks": [lo.CompileModel()]}}
    assert key(**compiled) == key(base={"callbacks": [lo.CompileModel()]})
