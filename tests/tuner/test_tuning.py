"""How long a trial may take."""

import pytest

from lightning_opt.tuner.search.objective import Objective
from lightning_opt.tuner.tuning import Plan


def plan(budget: float, timeout: float | None = None) -> Plan:
    return Plan("a:model", "a:data", {}, None, Objective(), budget, timeout)


@pytest.mark.parametrize("budget", [10.0, 60.0, 600.0, 7200.0])
def test_the_limit_follows_from_the_baselines_own_start(budget: float) -> None:
    """A model that takes a minute to start is no failure, however short the budget is."""
    assert plan(budget).patience(0.0) >= max(300.0, budget)
    assert plan(budget).patience(60.0) >= 240.0
    assert 30.0 <= plan(budget).patience(1.0) <= 300.0


def test_what_is_asked_for_holds() -> None:
    assert plan(60.0, timeout=7.0).patience(0.0) == plan(60.0, timeout=7.0).patience(60.0) == 7.0
