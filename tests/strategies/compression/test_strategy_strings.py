"""Strategy strings, arguments, errors before training, and Lightning's launchers."""

import multiprocessing
import os
import pickle
import warnings
from pathlib import Path

import pytest
import torch
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.strategies import StrategyRegistry

from lightning_opt.strategies.compression.compressed_ddp import (
    CompressedDDPStrategy,
    HookedDDPStrategy,
)
from lightning_opt.strategies.compressors import Quantize, Threshold, TopK
from lightning_opt.strategies.diloco.diloco_strategy import DiLoCoStrategy
from lightning_opt.strategies.strategy_strings import (
    START_METHODS,
    STRATEGIES,
    register_strategies,
)
from tests.helpers.models import SmallNet
from tests.helpers.processes import launch
from tests.helpers.trainers import quiet_trainer
from tests.strategies.runs import fit, same_on_all_ranks, state_of

NAMES = {
    "ddp_topk": TopK,
    "ddp_threshold": Threshold,
    "ddp_int8": Quantize,
    "ddp_int4": Quantize,
    "ddp_compressed": TopK,
}


@pytest.mark.parametrize("suffix", START_METHODS)
@pytest.mark.parametrize("name", STRATEGIES)
def test_string_creates_the_strategy(name, suffix):
    strategy = quiet_trainer(strategy=name + suffix, devices=2).strategy
    assert strategy._start_method == START_METHODS[suffix]
    if name in NAMES:
        assert type(strategy) is CompressedDDPStrategy
        assert type(strategy.compressor) is NAMES[name]
    elif name.startswith("diloco"):
        assert type(strategy) is DiLoCoStrategy
    else:
        assert type(strategy) is HookedDDPStrategy
        assert "ddp_" + strategy.hook == name
    if isinstance(getattr(strategy, "compressor", None), Quantize):
        assert name.endswith(str(strategy.compressor.bits))
    assert type(pickle.loads(pickle.dumps(strategy))) is type(strategy)  # as spawning does


def test_existing_string_is_not_replaced():
    ours = StrategyRegistry["ddp_topk"]  # not by monkeypatch, which calls its `get`
    StrategyRegistry["ddp_topk"] = "theirs"
    try:
        register_strategies(StrategyRegistry)
        assert StrategyRegistry["ddp_topk"] == "theirs"
    finally:
        StrategyRegistry["ddp_topk"] = ours


@pytest.mark.parametrize(
    "compressor",
    [
        "int8",
        "auto",
        {"class_path": "lightning_opt.Quantize", "init_args": {"bits": 4, "block": 256}},
        {"class_path": "lightning_opt.TopK", "init_args": {"ratio": 0.02}},
    ],
)
def test_configuration_file_creates_the_strategy(compressor, monkeypatch):
    monkeypatch.setattr("sys.argv", ["fit"])  # LightningCLI warns of the arguments of pytest
    # Lightning 2.6 calls jsonargparse 4.53 in a way that is about to go.
    monkeypatch.setenv("JSONARGPARSE_DEPRECATION_WARNINGS", "off")
    strategy = {
        "class_path": "lightning_opt.CompressedDDPStrategy",
        "init_args": {"compressor": compressor, "warmup_steps": 7},
    }
    cli = LightningCLI(
        SmallNet,
        run=False,
        save_config_callback=None,
        seed_everything_default=False,
        args={"trainer": {"strategy": strategy, "accelerator": "cpu", "devices": 2}},
    )
    made = cli.trainer.strategy
    assert made.warmup_steps == 7
    if compressor == "int8":
        assert made.compressor.bits == 8
    elif compressor == "auto":
        assert made.chooses
    else:
        arguments = compressor["init_args"]
        assert {key: getattr(made.compressor, key) for key in arguments} == arguments


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"compressor": "gzip"}, "compressor must be one of 'auto', 'topk'.*got 'gzip'"),
        ({"ratio": 0.0}, "ratio must"),
        ({"ratio": 1.5}, "ratio must"),
        ({"warmup_steps": 1}, "warmup_steps .* at least 2"),
        ({"warmup_steps": 2, "static_graph": True}, "warmup_steps .* at least 3"),
        ({"ramp_steps": -1}, "ramp_steps"),
        ({"every_n_steps": 0}, "every_n_steps"),
        ({"ddp_comm_hook": print}, "ddp_comm_hook"),
    ],
)
def test_invalid_arguments_raise(settings, words):
    with pytest.raises(ValueError, match=words):
        CompressedDDPStrategy(**settings)


def test_unknown_hook_raises():
    with pytest.raises(ValueError, match="hook must be"):
        HookedDDPStrategy("fp8")


def _errors() -> None:
    with pytest.raises(ValueError, match="LBFGS"):
        fit(SmallNet(optimizer="LBFGS"), "ddp_topk")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(SmallNet(optimizer="Adam"), CompressedDDPStrategy(ratio=0.001), max_steps=2)
    assert any("second moments" in str(warning.message) for warning in caught)


def _single() -> None:
    weights = []
    for strategy in ("ddp", "ddp_topk"):
        model = SmallNet()
        fit(model, strategy)
        weights.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    assert torch.equal(*weights)


def _single_process() -> None:
    _errors()
    _single()


@pytest.mark.distributed
def test_single_process_trains_like_ddp_and_checks_optimizers():
    launch(_single_process, processes=1)


class Net(SmallNet):
    """Writes a file for each rank at the end."""

    def __init__(self, folder: str) -> None:
        super().__init__()
        self.folder = Path(folder)

    def on_train_end(self) -> None:
        assert state_of(self.trainer)["step"] == 11
        assert same_on_all_ranks(self)
        (self.folder / f"done {self.global_rank}").touch()


def _fork(folder: str) -> None:
    multiprocessing.current_process()._config["daemon"] = False  # it may have children
    for name in os.environ:  # torchrun's variables tell Lightning to start nothing
        if any(part in name for part in ("RANK", "TORCHELASTIC", "MASTER", "WORLD_SIZE")):
            del os.environ[name]
    quiet_trainer(strategy="ddp_topk_fork", devices=2, limit_val_batches=0).fit(Net(folder))


@pytest.mark.distributed
def test_lightning_forks_the_processes_of_a_strategy(tmp_path):
    launch(_fork, str(tmp_path), processes=1)
    assert sorted(file.name for file in tmp_path.glob("done *")) == ["done 0", "done 1"]
