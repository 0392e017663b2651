"""Every feature with `lightning`, with `pytorch_lightning`, and with both in one process."""

import importlib
import json
import logging
import pickle
import sys
import warnings
from pathlib import Path

import lightning.pytorch
import lightning_utilities.core.rank_zero as rank_zero
import pytest
import pytorch_lightning
import pytorch_lightning.cli
import torch
import yaml

import lightning_opt as lo
from lightning_opt.cli import main
from lightning_opt.trainer.lightning import NAMES, _load, is_overridden, package_of
from lightning_opt.worker.training_process import TrainingProcess
from tests.helpers.processes import launch
from tests.trainer.every_feature import net_of, outcome, train, train_all

PACKAGES = (lightning.pytorch, pytorch_lightning)
ROOT = Path(__file__).parents[2]
PROJECT = ROOT / "tests" / "cli" / "small_project.py"
QUIET = [f"--trainer.{name}=false" for name in ("enable_progress_bar", "enable_model_summary")] + [
    "--trainer.accelerator=cpu",
    "--trainer.devices=1",
]


def train_with_both(folder: Path):
    warnings.simplefilter("ignore")
    return [train_all(pl, folder) for pl in PACKAGES]


@pytest.mark.slow
@pytest.mark.distributed
def test_all_features_train_alike_with_either_package(tmp_path):
    """`make test` runs other tests with `pytorch_lightning` alone."""
    [(first, second)] = launch(train_with_both, tmp_path, processes=1)
    assert {"MicroBatching", "StepProfiler", "preset ultra", "ddp_int8"} <= first.keys()
    assert first == second


@pytest.mark.parametrize("installed", [NAMES, NAMES[:1], NAMES[1:], ()])
def test_installed_packages_are_loaded_and_messages_keep_the_first_logger(installed, monkeypatch):
    def import_module(name: str) -> object:
        if name not in installed:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        monkeypatch.setattr(rank_zero, "log", logging.getLogger(name))  # as each package does
        return sys.modules[name]

    monkeypatch.setattr(importlib, "import_module", import_module)
    if installed:
        assert tuple(_load()) == installed
        assert rank_zero.log.name == installed[0]
    else:
        with pytest.raises(ImportError, match="pip install lightning, or pip install pytorch-"):
            _load()


# --- both packages in one process ---------------------------------------------------------------


def test_callbacks_serve_a_trainer_of_each_package_in_turn():
    callbacks = [lo.GradientHealth(), lo.MicroBatching(3), lo.ActivationCheckpointing()]
    first, second, third = (
        outcome(train(pl, callbacks=callbacks)) for pl in (*PACKAGES, lightning.pytorch)
    )
    assert first == second == third


def test_checkpoint_of_one_package_resumes_in_the_other(tmp_path):
    def callbacks():
        return [lo.AdaptiveClipping("zclip"), lo.GradientHealth(every_n_steps=2)]

    file = tmp_path / "lightning.ckpt"
    settings = {"plugins": [lo.DynamicLossScale(init_scale=256.0)]}
    train(PACKAGES[0], callbacks=callbacks(), **settings).save_checkpoint(file)
    whole, resumed = (
        outcome(train(pl, callbacks=callbacks(), max_epochs=2, resume=file, **settings))
        for pl in PACKAGES
    )
    assert resumed == whole


@pytest.mark.filterwarnings("ignore:.torch.jit.script_method:DeprecationWarning")
def test_hooks_are_recognised_as_overridden_in_either_package():
    for pl in PACKAGES:
        net = net_of(pl)
        assert is_overridden("training_step", net)
        assert not is_overridden("test_step", net)
        assert not is_overridden("on_train_start", pl.Callback())
        assert package_of(net) is package_of(torch.compile(net)) is pl
    assert is_overridden("setup", lo.GradientHealth())
    assert not is_overridden("on_fit_end", lo.GradientHealth())


class Own(lo.CompressedDDPStrategy):
    def setup(self, trainer):
        super().setup(trainer)
        self.set_up = True


def strategies():
    settings = {"process_group_backend": "gloo"}
    return {
        "ddp_topk": "ddp_topk",
        "ddp_fp16": "ddp_fp16",
        "diloco": "diloco",
        "own": Own("int8", **settings),
        "explicit diloco": lo.DiLoCoStrategy(2, fragments=2, **settings),
        "explicit hook": lo.HookedDDPStrategy("bf16", **settings),
    }


def train_on_two_ranks():
    found = {}
    for pl in PACKAGES:
        for name, strategy in strategies().items():
            trainer = train(pl, strategy=strategy, devices=2)
            made = trainer.strategy
            kinds = (pl.strategies.DDPStrategy, type(strategy))
            assert isinstance(made, kinds[: 1 if isinstance(strategy, str) else 2])
            assert package_of(made) is package_of(made.launcher) is pl
            assert all(package_of(own) is pl for own in made._lightning_optimizers)
            assert pickle.loads(pickle.dumps(type(made))) is type(made)
            if name == "own":
                assert made.set_up
            found[pl.__name__, name] = outcome(trainer)
    return found


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.filterwarnings("ignore:Using `DistributedSampler` with the dataloaders")
def test_strategies_train_alike_under_two_ranks_of_either_package():
    for found in launch(train_on_two_ranks):
        for name in strategies():
            assert found["lightning.pytorch", name] == found["pytorch_lightning", name], name
        weights = [json.dumps(found["pytorch_lightning", name][0]) for name in strategies()]
        assert len(set(weights)) > 3, "the strategies do different things"


# --- configuration files and commands -------------------------------------------------------------


@pytest.fixture
def project(tmp_path, monkeypatch) -> Path:
    """A project that imports ``pytorch_lightning``, in the working directory."""
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "their_project.py"
    source = PROJECT.read_text()
    file.write_text(source.replace("import lightning as L", "import pytorch_lightning as L"))
    yield file
    sys.modules.pop("their_project", None)


def test_lightning_cli_of_pytorch_lightning_reads_our_classes(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.argv", ["fit"])
    monkeypatch.setenv("JSONARGPARSE_DEPRECATION_WARNINGS", "off")
    trainer = {
        "accelerator": "cpu",
        "devices": 2,
        "logger": False,
        "callbacks": [{"class_path": "lightning_opt.GradientHealth"}],
        "profiler": {"class_path": "lightning_opt.StepProfiler"},
        "plugins": [{"class_path": "lightning_opt.DynamicLossScale"}],
        "strategy": {
            "class_path": "lightning_opt.CompressedDDPStrategy",
            "init_args": {"compressor": "int8", "process_group_backend": "gloo"},
        },
    }
    cli = pytorch_lightning.cli.LightningCLI(
        type(net_of(pytorch_lightning)), run=False, save_config_callback=None,
        seed_everything_default=False, args={"trainer": trainer},
    )  # fmt: skip
    made = cli.trainer
    assert isinstance(made.strategy, lo.CompressedDDPStrategy)
    assert isinstance(made.strategy.precision_plugin, lo.DynamicLossScale)
    assert isinstance(made.profiler, lo.StepProfiler)
    assert package_of(made.strategy) is pytorch_lightning


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::lightning_fabric.utilities.warnings.PossibleUserWarning")
def test_commands_train_a_module_of_pytorch_lightning(project, tmp_path, capsys):
    stop = f"--trainer.callbacks={project.stem}.Interrupt"
    words = [f"{project}:Small", "--data", f"{project}:SmallData", "--trainer.max_steps=3"]
    (arguments := tmp_path / "arguments.yaml").write_text("model: {width: 4}\n")
    words.append(f"--config={arguments}")
    assert main(["fit", *words, "--preset=ultra", *QUIET]) == 0
    assert list(tmp_path.rglob("*.ckpt"))
    assert main(["fit", *words[:3], stop, *QUIET]) == 130
    config = tmp_path / "user.yaml"
    content = {
        "model": {"class_path": "their_project.Small", "init_args": {"width": 3}},
        "data": {"class_path": "their_project.SmallData"},
        "trainer": {"callbacks": [{"class_path": "pytorch_lightning.callbacks.Timer"}]},
    }
    config.write_text(yaml.safe_dump(content))
    assert main(["profile", str(config), "--steps=4", *QUIET]) == 0
    assert "forward" in capsys.readouterr().out


@pytest.mark.slow
def test_training_process_trains_a_module_of_pytorch_lightning(project):
    settings = {"accelerator": "cpu", "devices": 1, "callbacks": [{"class_path": "Timer"}]}
    with TrainingProcess(f"{project}:Small", f"{project}:SmallData", settings) as process:
        assert len(process.advance(2)) == 2
