"""The forms of a result: table, explanation, YAML, JSON."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.callbacks import Timer
from lightning.pytorch.cli import LightningCLI

import lightning_opt as lo
from lightning_opt.tuner.probe import Facts
from lightning_opt.tuner.result import TuneResult
from lightning_opt.tuner.search import Objective, Switches, Trial
from lightning_opt.tuner.space import Space
from tests.helpers.models import SmallNet

FACTS = Facts(blocks=3, convolutions=1, samples=8, cpus=2)
BASE = {
    "accelerator": "cpu", "max_epochs": 1, "logger": False, "enable_checkpointing": False,
    "enable_progress_bar": False, "num_sanity_val_steps": 0,
}  # fmt: skip


def trial(switches: Switches, ratio: float, peak: float, verdict: str = "accepted") -> Trial:
    return Trial(
        switches, verdict, ratio=ratio, low=0.98 * ratio, high=1.02 * ratio, seconds=0.1 * ratio,
        peak=int(1e8 * peak), peak_ratio=peak, losses=[1.0, 0.5], startup=2.5,
    )  # fmt: skip


TRIALS = [
    trial((), 1.0, 1.0, "baseline"),
    trial(("fused",), 0.9, 1.0),
    trial(("channels_last",), 0.8, 1.1),
    trial(("fused", "channels_last"), 0.65, 1.1),
    trial(("checkpointing",), 1.3, 0.5, "no gain"),
    trial(("quick",), 0.5, 0.5, "rejected"),
    Trial(("compile",), "died", "The process was killed by SIGSEGV.", details="..."),
]
TRIALS[-2].why = "its loss differs by +1"
TRIALS.append(trial(("one_thread",), 0.9, 1.0))


def result(best: Switches = ("fused", "channels_last"), **base: Any) -> TuneResult:
    candidates = {"checkpointing": True, "quick": {"benchmark": True}}
    space = Space("throughput", FACTS, candidates, {**BASE, **base})
    return TuneResult("throughput", space, TRIALS, best, machine="2 CPUs", seconds=60)


@pytest.mark.parametrize("best", [("fused", "channels_last"), ()])
def test_yaml_runs_under_lightning_cli(
    best: Switches, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["fit"])  # LightningCLI warns of the arguments of pytest
    monkeypatch.setenv("JSONARGPARSE_DEPRECATION_WARNINGS", "off")
    found = result(best)
    (tmp_path / "trainer.yaml").write_text(found.to_yaml())
    cli: Any = LightningCLI(
        SmallNet,
        args=["fit", "--config", str(tmp_path / "trainer.yaml")],
        save_config_callback=None,
        seed_everything_default=False,
    )
    ours = {type(callback) for callback in cli.trainer.callbacks}
    assert ours >= ({lo.FusedOptimizer, lo.ChannelsLast} if best else set())
    assert cli.trainer.global_step == 12


def test_trainer_kwargs_are_new_objects_each_time() -> None:
    found = result()
    one, other = found.trainer_kwargs(max_epochs=2), found.trainer_kwargs(callbacks=[Timer()])
    assert one["max_epochs"] == 2
    assert [type(item) for item in one["callbacks"]] == [lo.FusedOptimizer, lo.ChannelsLast]
    assert isinstance(other["callbacks"][-1], Timer)
    assert one["callbacks"][0] is not other["callbacks"][0]
    assert "callbacks" not in result(()).trainer_kwargs()


def test_settings_with_objects_can_be_used_but_not_written(tmp_path: Path) -> None:
    found = result(callbacks=[Timer()])
    with pytest.raises(ValueError, match="which cannot be written as text"):
        found.to_yaml()
    assert json.loads(found.to_json())["settings"] is None
    assert {path.name for path in found.save(tmp_path)} == {"result.json", "report.md"}
    assert isinstance(found.trainer_kwargs()["callbacks"][0], Timer)


def test_save_writes_all_forms(tmp_path: Path) -> None:
    written = result().save(tmp_path / "new")
    assert {path.name for path in written} == {"report.md", "result.json", "trainer.yaml"}
    assert all(path.stat().st_size for path in written)
    content = json.loads((tmp_path / "new/result.json").read_text())
    assert content["switches"] == ["fused", "channels_last"]
    assert [tuple(item["switches"]) for item in content["trials"]] == [t.switches for t in TRIALS]
    assert content["trials"][1]["ratio"] == 0.9


def test_table_has_every_trial() -> None:
    table = result().table
    assert table.title == "Trials for throughput: fused + channels_last"
    assert [(row["configuration"], row["verdict"]) for row in table.rows] == [
        ("fused + channels_last", "best"), ("channels_last", "accepted"), ("fused", "accepted"),
        ("one_thread", "accepted"), ("baseline", "baseline"), ("checkpointing", "no gain"),
        ("compile", "died"), ("quick", "rejected"),
    ]  # fmt: skip
    assert table.rows[0]["interval"] == "0.637 to 0.663"
    assert table.rows[0]["step ms"] == 65.0


def test_explanation_has_answer_rejections_and_failures() -> None:
    text = result().explain()
    assert text.startswith(
        "Use fused + channels_last: a step takes 0.65 times as long (between 0.64 and 0.66), "
        "with 1.10 times the peak memory."
    )
    assert "fp16 (it is for CUDA" in text
    assert "quick: rejected; its loss differs by +1" in text
    assert "compile: died; The process was killed by SIGSEGV." in text
    nothing = result(()).explain()
    assert nothing.startswith("Change nothing: no switch certainly reduces step time")
    assert result(()).table.title.endswith("change nothing")


# --- numbers ------------------------------------------------------------------------------------


def test_repeated_trials_are_pooled() -> None:
    noise = [0.01, -0.01, 0.02, 0.0, -0.02, 0.01]
    first, second = Trial(("a",)), Trial(("a",))
    first.pairs_by_start = [[(1.0, 0.80 + part) for part in noise]]
    second.pairs_by_start = [[(1.0, 0.84 + part) for part in noise]]
    first.set_times()
    pooled = second.pooled(first)
    assert first.ratio == pytest.approx(0.8, rel=0.02)
    assert pooled.ratio == pytest.approx(0.82, rel=0.02)
    assert pooled.low < 0.82 < pooled.high
    wrong = Trial(("a",), "rejected")
    assert wrong.pooled(first) is wrong


def test_objectives_score_time_or_memory() -> None:
    small, quick = trial(("a",), 1.2, 0.5), trial(("b",), 0.6, 1.5)
    throughput, memory = Objective("throughput"), Objective("memory", max_slowdown=1.3)
    assert throughput.outcome(quick).score == 0.6
    assert throughput.outcome(small).score == 1.2
    assert memory.outcome(small).score == 0.5
    assert memory.outcome(small).high < 0.51
    slow = trial(("c",), 1.4, 0.3)
    assert memory.outcome(slow).score == math.inf
    assert throughput.outcome(Trial(("e",), "out of memory")).score == math.inf
    assert throughput.outcome(trial(("f",), 0.5, 1, "rejected")).score == math.inf
