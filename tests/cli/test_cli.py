"""The command line, called as the console script calls it, on a small project of files."""

import contextlib
import io
import json
import os
import pickle
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import yaml
from lightning.pytorch import seed_everything
from lightning.pytorch.cli import LightningCLI

import lightning_opt as lo
from lightning_opt.cli import main, measuring_commands
from lightning_opt.cli.main import COMMANDS
from lightning_opt.profiling.run_report import page
from lightning_opt.tuner import autotune
from tests.cli.small_project import Small, SmallData
from tests.helpers.models import SmallNet
from tests.helpers.processes import launch
from tests.helpers.trainers import quiet_trainer
from tests.profiling.drawing import draw_here

PROJECT = Path(__file__).with_name("small_project.py")
MODULE = "tests.cli.small_project"
ROOT = Path(__file__).parents[2]

QUIET = [
    "--trainer.accelerator=cpu",
    "--trainer.log_every_n_steps=1",
    "--trainer.devices=1",
    "--trainer.enable_progress_bar=false",
    "--trainer.enable_model_summary=false",
]
BARE = [*QUIET, "--trainer.logger=false", "--trainer.enable_checkpointing=false"]
TARGETS = [f"{PROJECT}:Small", "--data", f"{PROJECT}:SmallData"]
FIT = ["fit", *TARGETS]


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch) -> Iterator[None]:
    """Run in an empty folder, and restore the process state that a command changes."""
    monkeypatch.setattr(page, "find_spec", lambda _: None)  # drawing pictures takes a second
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["lightning-opt"])
    monkeypatch.setattr("sys.path", list(sys.path))
    modules = set(sys.modules)
    yield
    for name in set(sys.modules) - modules:
        if name.startswith(("small_project", "_small_project", "user_", "_2_user_")):
            del sys.modules[name]


def fails(arguments: list[str], capsys: Any) -> tuple[int, str]:
    """Return exit code and standard error, which must not be a traceback."""
    path = list(sys.path)
    code = main(arguments)
    assert sys.path == path
    message = capsys.readouterr().err
    assert "Traceback" not in message
    assert "error: " in message
    return code, message


# --- help and mistakes ----------------------------------------------------------------------------


def test_help_and_wrong_commands_import_no_slow_module():
    program = (
        "import sys; from lightning_opt.cli import main\n"
        "main(['--help']); main(['tun']); print(); print(*sys.modules)"
    )
    command, environment = [sys.executable, "-c", program], {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
    modules = set(done.stdout.splitlines()[-1].split())
    assert {"torch", "lightning", "numpy", "jsonargparse"} & modules == set()


def test_help_lists_commands_examples_and_own_options(capsys):
    assert main(["--version"]) == 0
    assert lo.__version__ in capsys.readouterr().out
    assert main([]) == 2
    listed = capsys.readouterr().out
    for command in ("fit", "presets", "tune", "bench", "profile", "doctor"):
        assert f"\n  {command:9}{COMMANDS[command]}\n" in listed
        assert main([command, "--help"]) == 0
        text = capsys.readouterr().out
        assert f"\nexamples:\n  lightning-opt {command} " in text
        if command != "fit":  # fit lists the Trainer's arguments
            assert "--trainer.max_epochs" not in text
            assert len(text.splitlines()) < 80


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["tun"], "There is no command 'tun'; did you mean 'tune'?"),
        (["presets", "advancd"], "There is no preset 'advancd'; did you mean 'advanced'?"),
        (["bench"], "bench needs a model"),
        (["tune", "no_such_module:Model"], "There is no module 'no_such_module' here"),
        (["tune", "no_such_module:Model"], "add that folder to PYTHONPATH"),
        (["tune", "no_such_file.py:Model"], "There is no file no_such_file.py"),
        (["tune", "PROJECT:Smal"], "its classes are Small, SmallData"),
        (["tune", "PROJECT:rows"], "rows is not a class that inherits from LightningModule"),
        (["tune", "PROJECT"], "name a class in it: PROJECT:Small, PROJECT:SmallData"),
        (["tune", *TARGETS, "--candidates", "bf16,compil"], "did you mean 'compile'?"),
        (["bench", *TARGETS, "--against", "no.yaml"], "There is no file no.yaml"),
        (["bench", *TARGETS, "--without=Runtime,Runtim"], "--without: no preset has Runtim."),
        (["profile", *TARGETS, "--without=Runtime"], "so it needs --preset."),
        (["profile", *TARGETS, "--trainer.max_steps=3"], "--steps sets the number"),
        (["fit", "PROJECT:Small", "--modle", "3"], "unrecognized arguments: --modle 3"),
        (["bench", *TARGETS, "--model.widht", "3"], "Small: Option 'widht' is not accepted."),
    ],
    ids=lambda value: " ".join(value[:6]) if isinstance(value, list) else "",
)
def test_wrong_usage_is_one_sentence_and_exit_code_2(arguments, sentence, capsys):
    words = [word.replace("PROJECT", str(PROJECT)) for word in arguments]
    code, message = fails(words, capsys)
    assert code == 2
    assert sentence.replace("PROJECT", str(PROJECT)) in message
    assert len(message.splitlines()) < 15, "no list of all options"


def test_import_errors_of_the_users_files_are_reported(capsys, tmp_path):
    (tmp_path / "user_broken.py").write_text("import no_such_thing\n")
    assert "No module named 'no_such_thing'" in fails(["tune", "user_broken.py:Model"], capsys)[1]
    (tmp_path / "user_wrong.py").write_text("1 / 0\n")
    code, message = fails(["tune", "user_wrong.py:Model"], capsys)
    assert code == 1
    assert "ZeroDivisionError" in message
    (tmp_path / "user_classless.py").write_text("x = 1\n")
    message = fails(["tune", "user_classless.py"], capsys)[1]
    assert "in it: none. Give the file that defines it: path/to/file.py:Class." in message
    (tmp_path / "user_ends.py").write_text("raise SystemExit(2)  # as argparse does\n")
    code, message = fails(["tune", "user_ends.py:Model"], capsys)
    assert code == 1
    assert "user_ends.py cannot be imported: SystemExit: 2. Call what parses arg" in message
    (tmp_path / "user_part.py").write_text("from .models import Model\n")
    message = fails(["tune", "user_part.py:Model"], capsys)[1]
    assert "package: package.module:Class. If the package is in src, first set PYTHON" in message
    assert "--debug" in message
    assert main(["--debug", "tune", "user_wrong.py:Model"]) == 1
    assert "Traceback" in capsys.readouterr().err


def test_configuration_without_class_path_asks_for_the_class(capsys):
    Path("plain.yaml").write_text("model: {width: 3}\n")
    message = fails(["fit", "plain.yaml"], capsys)[1]
    assert "Name the class first: path/to/file.py:Class --config plain.yaml" in message


def test_missing_extra_exits_with_3(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "jsonargparse", None)
    code, message = fails(["presets"], capsys)
    assert code == 3
    assert "pip install 'lightning-opt[cli]'" in message


def test_interrupted_training_exits_with_130(capsys):
    stop = f"--trainer.callbacks={MODULE}.Interrupt"
    assert main([*FIT, stop, "--trainer.max_steps=4", *BARE]) == 130
    assert capsys.readouterr().err.count("Interrupted.") == 1


# --- presets and fit ------------------------------------------------------------------------------


def test_presets_lists_and_explains(capsys):
    assert main(["presets"]) == 0
    text = capsys.readouterr().out
    assert text.index("basic") < text.index("advanced") < text.index("ultra")
    assert main(["presets", "ultra", "--trainer.strategy=fsdp"]) == 0
    assert "not supported, under this strategy" in capsys.readouterr().out


def plain_cli(*arguments: str) -> LightningCLI:
    os.environ["JSONARGPARSE_DEPRECATION_WARNINGS"] = "off"
    return LightningCLI(args=arguments, save_config_callback=None, seed_everything_default=0)


def test_exported_preset_runs_under_lightning_cli(capsys, tmp_path):
    assert main(["presets", "ultra", "--yaml", "--trainer.max_epochs=1", *BARE]) == 0
    file = tmp_path / "trainer.yaml"
    file.write_text(capsys.readouterr().out)
    model = [f"--model={MODULE}.Small", f"--data={MODULE}.SmallData"]
    cli = plain_cli("fit", "--config", str(file), *model)
    names = [type(callback).__name__ for callback in cli.trainer.callbacks]
    expected = lo.preset("ultra").trainer_kwargs(accelerator="cpu")["callbacks"]
    assert names[: len(expected)] == [type(callback).__name__ for callback in expected]
    assert cli.trainer.global_step == 8


def weights_in(folder: Path) -> dict[str, torch.Tensor]:
    (file,) = folder.rglob("*.ckpt")
    return torch.load(file, weights_only=True)["state_dict"]


def test_fit_gives_the_same_weights_as_python(tmp_path):
    arguments = ["--preset=basic", "--without=MemoryCleanup", "--model.width=5", *QUIET]
    lo.preset("basic").callbacks()  # whose classes leave short names unambiguous
    own = ["--trainer.callbacks=AdaptiveClipping", "--trainer.callbacks.rule=zclip"]
    short = ["--trainer.precision=64-true", "--trainer.deterministic=true", "--seed_everything=3"]
    assert main([*FIT, *arguments, *own, *short, "--trainer.max_epochs=1"]) == 0

    seed_everything(3, workers=True, verbose=False)
    model, data = Small(width=5), SmallData()
    preset = lo.preset("basic", MemoryCleanup=None, precision="64-true", deterministic=True)
    more = {"callbacks": [lo.AdaptiveClipping("zclip")], "max_epochs": 1, "logger": False}
    quiet_trainer(**preset.trainer_kwargs(**more)).fit(model, datamodule=data)
    found = weights_in(tmp_path)
    assert found.keys() == model.state_dict().keys()
    assert all(torch.equal(found[name], value) for name, value in model.state_dict().items())

    # The saved configuration spells the preset out, and any LightningCLI can read it.
    (saved,) = tmp_path.rglob("config.yaml")
    assert saved.with_name("report.html").exists()
    content = yaml.safe_load(saved.read_text())
    callbacks = [entry["class_path"] for entry in content["trainer"]["callbacks"]]
    optional = ("GradientHealth", "NonFiniteGuard", "PerformanceMonitor")
    expected = [f"lightning_opt.presets._optional.{name}" for name in optional]
    assert callbacks == [*expected[:2], "lightning_opt.AdaptiveClipping", expected[2]]
    assert content["trainer"]["callbacks"][2]["init_args"]["rule"] == "zclip"
    assert content["trainer"]["precision"] == "64-true"
    assert not {"preset", "without"} & content.keys()
    content["model"]["class_path"] = f"{MODULE}.Small"
    content["data"]["class_path"] = f"{MODULE}.SmallData"
    del content["ckpt_path"]
    again = tmp_path / "again.yaml"
    again.write_text(yaml.safe_dump(content))
    cli = plain_cli("fit", "--config", str(again), "--trainer.logger=false")
    assert all(torch.equal(found[name], v) for name, v in cli.model.state_dict().items())


def test_fit_reads_the_preset_from_a_configuration_file(tmp_path, capsys):
    file = tmp_path / "user.yaml"
    content = {
        "preset": "basic",
        "model": {"class_path": f"{MODULE}.Small", "init_args": {"width": 3}},
        "data": {"class_path": f"{MODULE}.SmallData"},
        "trainer": {"max_steps": 2, "strategy": "auto"},
    }
    file.write_text(yaml.safe_dump(content))
    assert main(["fit", str(file), *BARE]) == 0
    assert main(["fit", str(file), "--print_config"]) == 0
    assert "preset: basic" in capsys.readouterr().out


def _fit_as_a_script(folder, words):
    """Run the command as ``python -m lightning_opt`` does, without importing torch anew."""
    for name in ("LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE"):
        del os.environ[name]  # so that Lightning starts the other process
    os.environ["PYTHONPATH"] = str(ROOT)
    os.chdir(folder)
    sys.modules["__main__"].__spec__ = find_spec("lightning_opt.__main__")
    sys.argv = ["lightning-opt", *words]
    assert main() == 0
    processes = torch.distributed.get_world_size()
    torch.distributed.destroy_process_group()
    return processes


@pytest.mark.distributed
@pytest.mark.slow
def test_fit_starts_the_second_ddp_process(tmp_path):
    words = [*FIT, "--preset=basic", "--trainer.strategy=ddp_topk", "--trainer.max_steps=2"]
    words += [*QUIET, "--trainer.devices=2"]
    assert launch(_fit_as_a_script, tmp_path, words, processes=1) == [2]
    assert weights_in(tmp_path)


@pytest.mark.distributed
@pytest.mark.slow
def test_fit_trains_in_a_spawned_process(tmp_path):
    """Its start pickles the model as ``ddp_spawn`` does, without a new interpreter."""
    strategy = ["--trainer.strategy=DDPStrategy", "--trainer.strategy.start_method=forkserver"]
    assert main([*FIT, *strategy, "--trainer.max_steps=2", *QUIET]) == 0
    assert weights_in(tmp_path)


def _measure_in_two_processes(folder):
    os.chdir(folder)
    page.find_spec = lambda _: None
    two = [word.replace("devices=1", "devices=2") for word in QUIET]
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        for command in ("profile", "doctor"):
            assert main([command, *TARGETS, "--steps=2", "--trainer.strategy=ddp", *two]) == 0
    return printed.getvalue()


@pytest.mark.distributed
@pytest.mark.slow
def test_only_the_first_process_prints(tmp_path):
    first, second = launch(_measure_in_two_processes, tmp_path)
    assert "report.html" in first
    assert "report.html" not in second


# --- commands that measure ------------------------------------------------------------------------


def test_profile_reports_phases(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(page, "find_spec", find_spec)
    draw_here(monkeypatch)
    assert main(["profile", *TARGETS, "--steps=6", "--out=there", "--preset=basic", *QUIET]) == 0
    table = capsys.readouterr().out
    assert all(phase in table for phase in ("forward", "backward", "callback GradientHealth"))
    assert "Where a step's time goes" in (tmp_path / "there" / "report.html").read_text()
    assert not (tmp_path / "report.html").exists()


WATCHED = """
trainer:
  accelerator: cpu
  enable_progress_bar: false
  log_every_n_steps: 1
  callbacks:
    - class_path: lightning.pytorch.callbacks.ModelCheckpoint
      init_args: {dirpath: saved, every_n_train_steps: 1}
    - class_path: lightning.pytorch.callbacks.EarlyStopping
      init_args: {monitor: val_loss}
    - class_path: lightning.pytorch.callbacks.LearningRateMonitor
  logger:
    class_path: lightning.pytorch.loggers.CSVLogger
    init_args: {save_dir: logged}
optimizer:
  class_path: torch.optim.SGD
  init_args: {lr: 0.1}
lr_scheduler:
  class_path: lightning.pytorch.cli.ReduceLROnPlateau
  init_args: {monitor: val_loss}
"""


@pytest.mark.filterwarnings("ignore:ReduceLROnPlateau conditioned on metric val_loss")
def test_short_runs_save_nothing_and_skip_validation(capsys, tmp_path):
    Path("watched.yaml").write_text(WATCHED)
    words = ["profile", *TARGETS, "--config", "watched.yaml", "--steps=9"]  # an epoch has 8
    words += [f"--trainer.callbacks+={MODULE}.Watching", "--trainer.callbacks.config.width=3"]
    assert main(words) == 0, capsys.readouterr()
    assert not (tmp_path / "saved").exists()


def test_doctor_reports_findings(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(page, "find_spec", find_spec)
    draw_here(monkeypatch)
    words = ["doctor", *TARGETS, "--model.width=4", "--steps=20", "--json", *QUIET]
    assert main([*words, "--strict"]) == 1
    text = capsys.readouterr().out
    found = {row["topic"]: row for row in json.loads(text[text.index("{") :])["rows"]}
    assert found["gradients"]["verdict"] == "ok"
    assert found["optimizer"]["verdict"] == "look"  # AdamW could be fused
    assert "checkpoints" not in found  # the short run has none
    assert "takes longest" in found["profile"]["finding"]
    assert "Callbacks take" not in found["profile"]["finding"]  # these are the command's own
    written = (tmp_path / "report.html").read_text()
    assert "Gradient RMS by layer" in written
    assert found["optimizer"]["finding"] in written


def test_model_with_its_own_loaders_needs_no_data(capsys, monkeypatch):
    seeds = []
    monkeypatch.setattr(measuring_commands, "seed_everything", lambda seed, **_: seeds.append(seed))
    path = f"{SmallNet.__module__}:SmallNet"
    words = [path, "--model.lr=0.01", "--steps=2", "--seed_everything=7", *QUIET]
    assert main(["profile", *words]) == 0
    assert "backward" in capsys.readouterr().out
    assert main(["doctor", *words]) == 0  # without --strict
    assert seeds == [7, 7]


@pytest.mark.parametrize("name", ["user_model.py", "2 user-models.v1.py"])
def test_any_file_and_dataclass_arguments_work_in_each_process(name, monkeypatch):
    shutil.copy(PROJECT, name)
    compared = Mock(side_effect=ArithmeticError("not measured"))
    monkeypatch.setattr(measuring_commands, "compare", compared)
    words = [f"{name}:Configured", "--model.config.width=3", "--model.lr=0.5"]
    assert main(["bench", *words, *TARGETS[1:], *BARE]) == 1
    monkeypatch.setenv("JSONARGPARSE_DEPRECATION_WARNINGS", "off")  # as in the child process
    model = pickle.loads(pickle.dumps(compared.call_args.args[0]))()
    assert (model.net[0].out_features, model.hparams.lr) == (3, 0.5)


def test_parts_are_excluded_from_the_presets_that_have_them(monkeypatch):
    compared = Mock(side_effect=ArithmeticError("not measured"))
    monkeypatch.setattr(measuring_commands, "compare", compared)
    words = ["--preset=basic,advanced", "--without=Runtime,GradientHealth"]  # basic has no Runtime
    assert main(["bench", *TARGETS, *words, *BARE]) == 1
    for name in ("basic", "advanced"):
        callbacks = compared.call_args.args[2][name]()["callbacks"]
        names = {type(callback).__name__ for callback in callbacks}
        assert "AdaptiveClipping" in names
        assert names.isdisjoint({"Runtime", "GradientHealth"})


@pytest.mark.slow
def test_bench_writes_table_and_json(capsys, tmp_path, monkeypatch):
    compared = Mock(wraps=measuring_commands.compare)
    monkeypatch.setattr(measuring_commands, "compare", compared)
    config = tmp_path / "other.yaml"
    config.write_text(yaml.safe_dump({"trainer": {"max_epochs": 3, "gradient_clip_val": 4}}))
    words = ["bench", *TARGETS, "--preset=basic", f"--against={config}", "--out=there"]
    words += ["--starts=1", "--rounds=2", "--steps=4", "--seconds=20"]
    words += ["--trainer.gradient_clip_val=2", "--trainer.accumulate_grad_batches=2"]
    assert main([*words, *BARE]) == 0
    settings = compared.call_args.args[2][str(config)]
    names = ("gradient_clip_val", "max_epochs", "accumulate_grad_batches")
    assert [settings[name] for name in names] == [4, 3, 2]
    assert "plain" in capsys.readouterr().out
    assert json.loads((tmp_path / "there" / "bench.json").read_text())
    table = (tmp_path / "there" / "bench.md").read_text()
    for name in ("plain", "basic", str(config)):
        assert f"| {name} |" in table


@pytest.mark.slow
def test_tune_writes_a_configuration(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(autotune, "BLOCK_SECONDS", 0.02)
    words = ["tune", *TARGETS, "--candidates=fused", "--budget=1s"]
    assert main([*words, "--quiet", "--trainer.accumulate_grad_batches=2", *BARE]) == 0
    assert "baseline" in capsys.readouterr().out
    result = json.loads((tmp_path / "tuned" / "result.json").read_text())
    assert result["settings"]["accumulate_grad_batches"] == 2
    # The result is a configuration for the next command.
    answer = tmp_path / "tuned" / "trainer.yaml"
    assert main([*FIT, f"--config={answer}", "--trainer.max_steps=1", *QUIET]) == 0
