"""The tuner with real trainings in their own processes."""

from typing import Any

import pytest
from lightning_utilities.core.rank_zero import rank_zero_only

import lightning_opt as lo
from lightning_opt.tuner.autotune import parse_budget, start_timeout
from tests.tuner.subjects import Sleeper, added

MODEL, DATA = "tests.tuner.subjects:Sleeper", "tests.tuner.subjects:batches"
BASE = {"accelerator": "cpu", "devices": 1}

CANDIDATES: dict[str, Any] = {
    "less sleep": added("Faster"),
    "wrong autocast": added("Autocast"),
    "raises": added("Failing"),
}


@pytest.fixture
def short_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the time that a trial is measured."""
    monkeypatch.setattr("lightning_opt.tuner.autotune.BLOCK_SECONDS", 0.1)


@pytest.mark.slow
def test_wrong_learning_is_rejected_and_failures_are_reported(short_blocks: None) -> None:
    candidates = [{name: settings} for name, settings in CANDIDATES.items()]
    result = lo.autotune(  # the budget must not end the search on a busy machine
        MODEL, DATA, budget="25m", base=BASE, candidates=candidates, progress=False
    )

    trials = {trial.name: trial for trial in result.trials}
    verdicts = {name: trials[name].verdict for name in CANDIDATES}
    assert verdicts == {"less sleep": "accepted", "wrong autocast": "rejected", "raises": "error"}
    assert "planted" in trials["raises"].why
    assert "planted" in trials["raises"].details
    assert result.complete
    assert result.switches == ("less sleep",)


@pytest.mark.slow
def test_budget_starts_after_the_baseline_and_allows_one_trial(short_blocks: None) -> None:
    """Both the baseline and the trial take longer to start than the budget."""
    model = f"{MODEL.partition(':')[0]}:SlowStart"
    candidates = [{"less sleep": added("Faster")}]
    result = lo.autotune(model, DATA, budget=0.5, base=BASE, candidates=candidates)
    assert [trial.name for trial in result.trials] == ["baseline", "less sleep"]
    # So short a trial may find no gain on a busy machine.
    assert result.trials[1].verdict in ("accepted", "no gain")
    assert result.trials[1].ratio is not None
    assert result.trials[1].ratio < 1


@pytest.mark.parametrize("budget", [10.0, 600.0, 7200.0])
def test_timeout_follows_from_the_baseline_s_start(budget: float) -> None:
    """A model that takes a minute to start does not fail, however short the budget is."""
    assert start_timeout(budget, 0.0, None) >= max(300.0, budget)
    assert start_timeout(budget, 60.0, None) >= 240.0
    assert 30.0 <= start_timeout(budget, 1.0, None) <= 300.0
    assert start_timeout(budget, 60.0, 7.0) == 7.0


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90s", 90), ("10m", 600), (" 1.5 min ", 90), ("1h", 3600), ("45", 45), (12, 12)],
)
def test_budget_is_seconds_or_text(text: str | float, seconds: float) -> None:
    assert parse_budget(text) == seconds


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"budget": "soon"}, "budget must be seconds or a text such as '90s'"),
        ({"budget": "0s"}, "budget must be seconds"),
        ({"budget": -1}, "budget must be a finite number above 0"),
        ({"objective": "speed"}, "objective must be one of 'throughput', 'memory'"),
        ({"candidates": ["fusd"]}, "'fusd', not a built-in switch; did you mean 'fused'"),
        ({"max_slowdown": 0}, "max_slowdown must be"),
        ({"timeout": 0}, "timeout must be"),
    ],
)
def test_invalid_arguments_raise_before_any_run(arguments: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        lo.autotune(MODEL, DATA, **arguments)


def test_search_on_another_rank_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    # Lightning sets it from RANK, LOCAL_RANK, SLURM_PROCID or JSM_NAMESPACE_RANK.
    monkeypatch.setattr(rank_zero_only, "rank", 1)
    with pytest.raises(RuntimeError, match="called in rank 1 of a distributed run"):
        lo.autotune(MODEL, DATA)


def test_model_instead_of_a_factory_raises() -> None:
    with pytest.raises(TypeError, match="model must be a function without arguments"):
        lo.autotune(Sleeper(), DATA)  # type: ignore[arg-type]
