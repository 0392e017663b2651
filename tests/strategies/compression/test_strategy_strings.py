"""Strategy strings, arguments, errors before training, and Lightning's launchers."""

import pickle

import pytest
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.strategies import StrategyRegistry

from lightning_opt.strategies.compression.compressed_ddp import (
    CompressedDDPStrategy,
    HookedDDPStrategy,
)
from lightning_opt.strategies.diloco.replica import Plan
from lightning_opt.strategies.strategy_strings import (
    START_METHODS,
    STRATEGIES,
    register_strategies,
)
from tests.helpers.models import SmallNet
from tests.helpers.processes import launch
from tests.helpers.trainers import quiet_trainer
from tests.strategies.runs import fit

QUANTIZE = "Quantize(bits={}, block=1024)"
CREATED = {
    "ddp_topk": "TopK(ratio=0.01)",
    "ddp_threshold": "Threshold(value='auto', max_ratio=0.02)",
    "ddp_int8": QUANTIZE.format(8),
    "ddp_int4": QUANTIZE.format(4),
    "ddp_compressed": "TopK(ratio=0.01)",
    "ddp_fp16": "fp16",
    "ddp_bf16": "bf16",
    "diloco": str(Plan(16, 1.0, 0.0, 1, 0, "int8")),
    "diloco_streaming": str(Plan(30, 0.7, 0.8, 4, 5, "int4")),
}
"""The compressor, hook or plan of each strategy."""


def test_strings_create_their_strategies():
    assert CREATED.keys() == STRATEGIES.keys()
    for name, expected in CREATED.items():
        for suffix, start_method in START_METHODS.items():
            strategy = quiet_trainer(strategy=name + suffix, devices=2).strategy
            assert strategy._start_method == start_method
        found = (getattr(strategy, key, None) for key in ("compressor", "hook", "plan"))
        assert str(next(filter(None, found))) == expected
        assert getattr(strategy, "chooses", False) == (name == "ddp_compressed")
        pickle.loads(pickle.dumps(strategy))  # as spawning does


def test_existing_string_is_not_replaced():
    ours = StrategyRegistry["ddp_topk"]  # not by monkeypatch, which calls its `get`
    StrategyRegistry["ddp_topk"] = "theirs"
    try:
        register_strategies(StrategyRegistry)
        assert StrategyRegistry["ddp_topk"] == "theirs"
    finally:
        StrategyRegistry["ddp_topk"] = ours


def test_configuration_file_creates_the_strategy(monkeypatch):
    """With an object; `tests/trainer/test_packages.py` gives the name of a compressor."""
    monkeypatch.setattr("sys.argv", ["fit"])  # LightningCLI warns of the arguments of pytest
    # Lightning 2.6 calls jsonargparse 4.53 in a way that is about to go.
    monkeypatch.setenv("JSONARGPARSE_DEPRECATION_WARNINGS", "off")
    top_k = {"class_path": "lightning_opt.TopK", "init_args": {"ratio": 0.02}}
    strategy = {
        "class_path": "lightning_opt.CompressedDDPStrategy",
        "init_args": {"compressor": top_k, "warmup_steps": 7},
    }
    trainer = LightningCLI(
        SmallNet,
        run=False,
        save_config_callback=None,
        seed_everything_default=False,
        args={"trainer": {"strategy": strategy, "accelerator": "cpu", "devices": 2}},
    ).trainer
    assert trainer.strategy.warmup_steps == 7
    assert str(trainer.strategy.compressor) == "TopK(ratio=0.02)"


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"compressor": "gzip"}, "compressor must be one of 'auto', 'topk'.*got 'gzip'"),
        ({"ratio": 1.5}, "ratio must"),
        ({"warmup_steps": 1}, "warmup_steps .* at least 2"),
        ({"warmup_steps": 2, "static_graph": True}, "warmup_steps .* at least 3"),
        ({"ramp_steps": -1}, "ramp_steps"),
        ({"every_n_steps": 0}, "every_n_steps"),
        ({"hook": "fp8"}, "hook must be"),
    ],
)
def test_invalid_arguments_raise(settings, words):
    strategy = HookedDDPStrategy if "hook" in settings else CompressedDDPStrategy
    with pytest.raises(ValueError, match=words):
        strategy(**settings)


class SeesBuckets(SmallNet):
    def on_train_start(self) -> None:
        self.bucket_bytes = self.trainer.model.bucket_bytes_cap


def _see_buckets() -> None:
    for size, given, settings in (
        (8, "int8", {}),
        (25, "topk", {}),
        (3, "int4", {"bucket_cap_mb": 3}),
    ):
        fit(model := SeesBuckets(), CompressedDDPStrategy(given, **settings))
        assert model.bucket_bytes == size * 2**20


@pytest.mark.distributed
def test_few_bits_get_small_buckets():
    launch(_see_buckets, processes=1)
