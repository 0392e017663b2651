"""Strategy strings, arguments, errors before training, and Lightning's launchers."""

import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.strategies import StrategyRegistry

from lightning_opt.strategies.compression.compressed_ddp import CompressedDDPStrategy
from lightning_opt.strategies.compression.hooked_ddp import HookedDDPStrategy
from lightning_opt.strategies.compressors import PowerSGD, Quantize, Threshold, TopK
from lightning_opt.strategies.diloco.diloco_strategy import DiLoCoStrategy
from lightning_opt.strategies.strategy_strings import (
    START_METHODS,
    STRATEGIES,
    register_strategies,
)
from tests.helpers.models import SmallNet
from tests.helpers.processes import launch
from tests.helpers.trainers import quiet_trainer
from tests.strategies.runs import fit

NAMES = {
    "ddp_topk": TopK,
    "ddp_threshold": Threshold,
    "ddp_int8": Quantize,
    "ddp_int4": Quantize,
    "ddp_compressed": TopK,
    "ddp_powersgd": PowerSGD,
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
        ({"compressor": "powersgd", "bucket_cap_mb": 1}, "one bucket"),
    ],
)
def test_invalid_arguments_raise(settings, words):
    with pytest.raises(ValueError, match=words):
        CompressedDDPStrategy(**settings)


@pytest.mark.parametrize(
    ("settings", "ratios"),
    [
        ({"ratio": 0.01, "ramp_steps": 0}, {0: None, 9: None, 10: 0.01, 10**6: 0.01}),
        (
            {"ratio": 0.001, "ramp_steps": 500},
            {9: None, 10: 0.25, 134: 0.25, 135: 0.0625, 509: 0.25**4, 510: 0.001},
        ),
        (
            {"ratio": 0.1, "ramp_steps": 10, "warmup_steps": 2},
            {1: None, 2: 0.25, 11: 0.25, 12: 0.1},
        ),
        # The length of the run is unknown.
        ({"ratio": 0.01}, {9: None, 10: 0.25, 343: 0.25, 344: 0.0625, 1009: 0.25**3, 1010: 0.01}),
        ({"ratio": 0.5}, {9: None, 10: 0.5}),
    ],
)
def test_ramp_has_stages(settings, ratios):
    strategy = CompressedDDPStrategy(**settings)
    found = {step: strategy.compressor_at(step) for step in ratios}
    assert {step: c and c.ratio for step, c in found.items()} == ratios
    # One object per stage: a new one would need new buffers.
    assert strategy.compressor_at(10) is strategy.compressor_at(10)


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


@pytest.mark.distributed
def test_errors_and_warnings_before_the_first_step():
    launch(_errors, processes=1)


@pytest.mark.distributed
def test_single_process_trains_like_ddp():
    launch(_single, processes=1)


def _single() -> None:
    weights = []
    for strategy in ("ddp", "ddp_topk"):
        model = SmallNet()
        fit(model, strategy)
        weights.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    assert torch.equal(*weights)


SCRIPT = """
import sys
import lightning_opt
from tests.helpers.models import SmallNet
from tests.helpers.trainers import quiet_trainer
from tests.strategies.runs import same_on_all_ranks, state_of

class Net(SmallNet):
    def on_train_end(self):
        assert state_of(self.trainer)["step"] == 11
        assert same_on_all_ranks(self)
        sys.stdout.write(f"rank {self.global_rank} is fine\\n")

if __name__ == "__main__":
    quiet_trainer(strategy=sys.argv[1], devices=2, limit_val_batches=0).fit(Net())
"""


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("name", ["ddp_topk", "ddp_topk_spawn"])
def test_lightnings_launchers_start_the_strategy(tmp_path, name):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    environment: dict[str, Any] = {
        **os.environ,
        "PYTHONPATH": str(Path.cwd()),
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        [sys.executable, str(script), name],
        env=environment,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "rank 0 is fine" in done.stdout
    assert "rank 1 is fine" in done.stdout
