"""How long processes may take to start."""

import pytest

from lightning_opt.tuner.tuning import start_timeout


@pytest.mark.parametrize("budget", [10.0, 600.0, 7200.0])
def test_timeout_follows_from_the_baseline_s_start(budget: float) -> None:
    """A model that takes a minute to start does not fail, however short the budget is."""
    assert start_timeout(budget, 0.0, None) >= max(300.0, budget)
    assert start_timeout(budget, 60.0, None) >= 240.0
    assert 30.0 <= start_timeout(budget, 1.0, None) <= 300.0
    assert start_timeout(budget, 60.0, 7.0) == 7.0
