"""The tuner with real trainings in their own processes."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

import lightning_opt as lo
from lightning_opt.tuner.autotune import parse_budget
from tests.tuner.subjects import added

ROOT = Path(__file__).parents[2]
MODEL, DATA = "tests.tuner.subjects:Sleeper", "tests.tuner.subjects:batches"
BASE = {"accelerator": "cpu", "devices": 1}

CANDIDATES: dict[str, Any] = {
    "less sleep": added("Faster"),
    "bfloat16": added("Autocast", dtype="bfloat16"),
    "wrong autocast": added("Autocast", dtype="float16"),
    "frozen": added("Freezing"),
    "small steps": added("Stumbling"),
    "flipped": added("Flipping"),
    "raises": added("Failing"),
}


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_wrong_learning_is_rejected_and_failures_are_reported() -> None:
    candidates = [{name: settings} for name, settings in CANDIDATES.items()]
    result = lo.autotune(  # the budget must not end the search on a busy machine
        MODEL, DATA, budget="25m", base=BASE, candidates=candidates, progress=False
    )

    trials = {trial.name: trial for trial in result.trials}
    verdicts = {name: trials[name].verdict for name in CANDIDATES}
    assert verdicts == {
        "less sleep": "accepted",
        "bfloat16": "accepted",
        "wrong autocast": "rejected",
        "frozen": "rejected",
        "small steps": "rejected",
        "flipped": "rejected",
        "raises": "error",
    }
    assert trials["less sleep"].agreement == pytest.approx(1), "the same seed and batches"
    assert 0.9 < (trials["bfloat16"].agreement or 0) < 0.99999
    assert "layers.0" in trials["frozen"].why
    assert "times as far" in trials["small steps"].why
    assert "points elsewhere" in trials["flipped"].why
    assert "planted" in trials["raises"].why
    assert "planted" in trials["raises"].details
    assert result.complete
    assert "less sleep" in result.switches or "bfloat16" in result.switches
    wrong = {"wrong autocast", "frozen", "small steps", "flipped"}
    assert not wrong & set(result.switches)
    explanation = result.explain()
    for name in wrong:
        assert f"Rejected, since it changes the result: {name};" in explanation
    assert "Failed (error): raises" in explanation


def tune(journal: Path) -> lo.TuneResult:
    own = {f"share {number}": added("Faster", share=number / 10) for number in (9, 8, 3)}
    return lo.autotune(MODEL, DATA, budget="2m", candidates=[own], base=BASE, journal=journal)


def lines_of(journal: Path) -> list[dict[str, Any]]:
    """Return the complete records."""
    lines = journal.read_text().splitlines() if journal.exists() else []
    return [json.loads(line)["record"] for line in lines if line.endswith("}}")]


def wait_for_records(journal: Path, count: int) -> None:
    deadline = time.monotonic() + 200
    while len(lines_of(journal)) < count and time.monotonic() < deadline:
        time.sleep(0.02)


@pytest.mark.slow
def test_budget_starts_after_the_baseline() -> None:
    candidates = [{"less sleep": CANDIDATES["less sleep"]}]
    result = lo.autotune(
        f"{MODEL.partition(':')[0]}:SlowStart", DATA, budget=4, base=BASE, candidates=candidates,
        progress=False,
    )  # fmt: skip
    assert result.switches == ("less sleep",)


@pytest.mark.slow
def test_killed_and_interrupted_searches_continue_from_the_journal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    journal = tmp_path / "tune.jsonl"
    script = f"from tests.tuner.test_autotune import Path, tune; tune(Path({str(journal)!r}))"
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    with subprocess.Popen([sys.executable, "-c", script], env=environment) as process:
        wait_for_records(journal, 2)
        process.kill()
    killed = lines_of(journal)
    assert [line["kind"] for line in killed] == ["baseline", "trial"]

    def interrupt() -> None:
        wait_for_records(journal, len(killed) + 1)
        os.kill(os.getpid(), signal.SIGINT)

    capsys.readouterr()
    usual = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        threading.Thread(target=interrupt, daemon=True).start()
        with pytest.raises(KeyboardInterrupt):
            tune(journal)
    finally:
        signal.signal(signal.SIGINT, usual)
    said = capsys.readouterr().err
    assert f"has {len(killed)} records; continuing from there." in said
    assert f"The same call continues from {journal}." in said
    assert "Interrupted" not in said, "whoever catches it says so"
    assert "share 9: " in said
    assert "from the journal" in said

    result = tune(journal)
    done = lines_of(journal)
    assert done[: len(killed)] == killed, "what was there stays as it was"
    tried = [tuple(line["trial"]["switches"]) for line in done if line["kind"] == "trial"]
    assert tried == [("share 9",), ("share 8",), ("share 3",)], "each once"
    assert result.switches == ("share 3",)


@pytest.mark.slow
def test_budget_shorter_than_a_start_allows_one_trial() -> None:
    result = lo.autotune(
        MODEL, DATA, budget=0.5, base=BASE, candidates=[{"less sleep": added("Faster")}]
    )
    assert [trial.name for trial in result.trials] == ["baseline", "less sleep"]


@pytest.mark.slow
def test_largest_batch_is_found_and_user_limits_do_not_end_a_trial(tmp_path: Path) -> None:
    """The largest batch is the whole data set; `max_epochs` of the base does not end a trial."""
    result = lo.autotune(
        MODEL, DATA, objective="batch", budget="1m", base={**BASE, "max_epochs": 1},
        candidates=[{"less sleep": added("Faster")}], progress=False,
    )  # fmt: skip
    assert result.batches[()] == 1024
    assert "Largest batch, tried: 1024 as it is" in result.explain()
    assert result.settings["max_epochs"] == 1
    steps = 1024 // 32
    assert len(result.trials[0].losses) > steps


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
        ({"candidates": ["fusd"]}, "'fusd', not a switch of the tuner; did you mean 'fused'"),
        ({"min_gain": 1.0}, "min_gain must be a number of at least 0 and below 1"),
        ({"max_slowdown": 0}, "max_slowdown must be"),
        ({"timeout": 0}, "timeout must be"),
    ],
)
def test_invalid_arguments_raise_before_any_run(arguments: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        lo.autotune(MODEL, DATA, **arguments)


def test_model_instead_of_a_factory_raises() -> None:
    from tests.tuner.subjects import Sleeper

    with pytest.raises(TypeError, match="model must be a function without arguments"):
        lo.autotune(Sleeper(), DATA)  # type: ignore[arg-type]
