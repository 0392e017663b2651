"""Configurations that train in turns: the report, the order and failures."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Callback

import lightning_opt as lo
from lightning_opt.profiling.comparing.compare import Comparison, Run, Training, _turn_lengths
from lightning_opt.worker.gate import Step
from lightning_opt.worker.training_process import FitFailed, TrainingProcess
from tests.profiling.fitting import CPU, Net, Waits, mishap, rows

QUICK = {"steps": 8, "rounds": 4, "starts": 2, "warmup": 1}


class WritesName(Callback):
    def __init__(self, name: str, file: Path) -> None:
        self.name, self.file = name, file

    def on_train_start(self, *_: Any) -> None:
        self._write("|")

    def on_train_batch_end(self, *_: Any) -> None:
        self._write(self.name)

    def _write(self, text: str) -> None:
        with self.file.open("a") as file:
            file.write(text)


@pytest.fixture(scope="module")
def comparison() -> Comparison:
    return lo.compare(
        Net,
        rows,
        {
            "plain": CPU,
            "slower": {**CPU, "callbacks": [Waits(0.1)]},  # more than load makes a step wait
            "broken": lambda: mishap("segfaults"),
            "wrong": {"max_stepz": 1},
            "short": {**CPU, "max_steps": 4},
        },
        **QUICK,
    )


def row_of(comparison: Comparison, name: str) -> dict[str, Any]:
    (row,) = [row for row in comparison.report.rows if row["configuration"] == name]
    return row


def test_slower_configuration_is_found(comparison):
    plain, slower = row_of(comparison, "plain"), row_of(comparison, "slower")
    assert slower["verdict"] == "slower"
    assert slower["low"] < slower["ratio"] < slower["high"]
    assert slower["ms/step"] >= 100
    assert plain["ratio"] == 1.0
    assert plain["samples/s"] > slower["samples/s"]
    assert plain["peak MB"] > 0


def test_failed_configurations_are_rows_and_others_continue(comparison):
    assert "SIGSEGV" in row_of(comparison, "broken")["verdict"]
    assert "max_stepz" in row_of(comparison, "wrong")["verdict"]
    assert "ended after 4 steps" in row_of(comparison, "short")["verdict"]
    kinds = {name: failure.kind for name, failure in comparison.failures.items()}
    assert kinds == {"broken": "died", "wrong": "setup", "short": "error"}
    assert set(comparison.ratios) == {"slower"}
    assert [len(t.turns) for t in comparison.runs["plain"].trainings] == [4, 4]


def test_losses_equal_an_uninterrupted_training(comparison):
    """Each start trains from the same seed."""
    with TrainingProcess(Net, rows, CPU) as fit:
        losses = [step.loss for step in fit.advance(1 + 4 * (1 + 2))]
    for name in ("plain", "slower"):
        for training in comparison.runs[name].trainings:
            assert [step.loss for step in training.steps] == losses
        expected = sum(losses[-3:]) / 3  # a quarter of 13 steps
        assert row_of(comparison, name)["loss, equal steps"] == pytest.approx(expected)


def test_json_and_text(comparison):
    content = json.loads(comparison.to_json())
    assert len(content["trainings"]["plain"]) == 2
    assert [len(turn) for turn in content["trainings"]["plain"][0]["seconds"]] == [2] * 4
    assert "segfaults" in content["failures"]["broken"]["details"]
    text = str(comparison)
    assert "cannot be detected" in text
    assert "Starts of each configuration: 2, with up to 4 turns" in text


def test_turns_rotate_and_starts_are_new_processes(tmp_path):
    file = tmp_path / "order"
    named = {name: {**CPU, "callbacks": [WritesName(name, file)]} for name in "ab"}
    lo.compare(Net, rows, named, steps=6, rounds=3, starts=2, warmup=1)
    # Each turn: one step to settle, and two that count.
    first, second = "aaa bbb bbb aaa aaa bbb", "bbb aaa aaa bbb bbb aaa"
    assert file.read_text() == f"|a|b{first}|b|a{second}".replace(" ", "")


def test_time_limit_allows_two_turns(comparison):
    result = lo.compare(Net, rows, {"plain": CPU}, rounds=1000, steps=2000, seconds=0.01, starts=3)
    (training,) = result.runs["plain"].trainings
    assert len(training.turns) == 2


def run_of(name: str, seconds: float, losses: list[float], samples: int = 4) -> Run:
    steps = [Step(seconds, loss, samples) for loss in losses]
    turns = [steps[n + 1 : n + 3] for n in range(1, len(steps) - 2, 3)]
    return Run(name, [Training(steps, turns)])


def compared(*runs: Run) -> Comparison:
    return Comparison({run.name: run for run in runs})


def test_failed_reference_leaves_no_ratios():
    broken = Run("broken", failure=FitFailed("error", "planted"))
    result = compared(broken, run_of("plain", 1.0, [1.0] * 4))
    assert result.ratios == {}
    assert row_of(result, "plain")["verdict"] == "nothing to compare with"


def test_loss_is_read_after_the_fewest_steps():
    losses = [10.0, 9.0, 8.0, 7.0, 6.0, 5.0, 4.0, 3.0, 2.0, 1.0]
    long, short = run_of("long", 1.0, losses), run_of("short", 1.0, losses[:7])
    found = {
        row["configuration"]: row["loss, equal steps"] for row in compared(long, short).report.rows
    }
    assert found == {"long": 4.0, "short": 4.0}


def test_different_batch_sizes_are_compared_per_sample():
    plain = run_of("plain", 1.0, [1.0] * 9, samples=4)
    double = run_of("double", 1.5, [1.0] * 9, samples=8)
    result = compared(plain, double)
    assert result.ratios["double"].value == pytest.approx(0.75)
    assert "seconds per sample" in str(result)


def test_nonfinite_loss_is_null():
    run = run_of("plain", 1.0, [math.nan] * 4)
    assert compared(run).report.rows[0]["loss, equal steps"] is None
    assert json.loads(compared(run).to_json())["trainings"]["plain"][0]["losses"] == [None] * 4


def test_steps_of_turns():
    assert _turn_lengths(None, 12, [0.02, 0.01]) == [5] * 12
    assert _turn_lengths(10, 4, []) == [3, 3, 2, 2]


@pytest.mark.parametrize(
    ("arguments", "settings", "error", "message"),
    [
        ((Net, rows, {}), {}, ValueError, "at least one entry"),
        ((Net, rows, {"a": 3}), {}, TypeError, "The configuration 'a'"),
        ((Net(), rows, {"a": {}}), {}, TypeError, "model must be a function"),
        ((Net, rows, {"a": {}}), {"steps": 3}, ValueError, "one step per turn"),
        ((Net, rows, {"a": {}}), {"starts": 0}, ValueError, "starts"),
        ((Net, rows, {"a": {}}), {"seconds": -1}, ValueError, "seconds"),
    ],
)
def test_invalid_arguments_raise(arguments, settings, error, message):
    with pytest.raises(error, match=message):
        lo.compare(*arguments, **settings)
