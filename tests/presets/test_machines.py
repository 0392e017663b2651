"""Choices of presets for simulated machines."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import nn

import lightning_opt as lo
from lightning_opt.core.measure import machine
from lightning_opt.presets import situation

GB = 10**9


@pytest.fixture
def gpus_of_24_gb(monkeypatch: pytest.MonkeyPatch) -> None:
    """Modern GPUs with a compiler."""
    monkeypatch.setattr(machine, "cuda_capability", lambda forks: (9, 0))
    monkeypatch.setattr(machine, "find_spec", lambda name: object())
    monkeypatch.setattr(machine.shutil, "which", lambda name: name)
    usage = SimpleNamespace(total=24 * GB)
    limits = SimpleNamespace(read=lambda: [usage])
    monkeypatch.setattr(situation, "MemoryLimits", lambda device, host: limits)


class Wide(LightningModule):
    """Repeated blocks with weights on the meta device."""

    def __init__(self, gigabytes: float) -> None:
        super().__init__()
        with torch.device("meta"):
            width = int((gigabytes * GB / 16 / 4) ** 0.5)  # four blocks, 16 bytes a weight
            layers = (nn.Linear(width, width, bias=False) for _ in range(4))
            self.blocks = nn.ModuleList(nn.Sequential(layer, nn.ReLU()) for layer in layers)


def chosen(name: str, model: LightningModule | None = None, **trainer: Any) -> dict[str, Any]:
    preset = lo.preset(name) if model is None else lo.preset(name).for_model(model)
    found = preset.choose(accelerator="cuda", **trainer)
    return {choice.part.name: choice for choice in found}


def on(*arguments: Any, **trainer: Any) -> set[str]:
    return {name for name, choice in chosen(*arguments, **trainer).items() if choice.is_on}


pytestmark = pytest.mark.usefixtures("gpus_of_24_gb")


def test_choices_differ_for_one_gpu_eight_gpus_and_two_nodes() -> None:
    one, eight = on("ultra", devices=1), on("ultra", devices=8)
    assert {"precision", "CompileModel", "FusedOptimizer", "MicroBatching"} <= one
    assert eight - one == {"GarbageCollection"}, "ranks wait for each other's collections"
    assert on("ultra", devices=8, num_nodes=2) - eight == {"strategy"}
    assert chosen("ultra", devices=8, num_nodes=2)["strategy"].settings == "ddp_compressed"
    assert not chosen("ultra", num_nodes=2, strategy="fsdp")["strategy"].is_on
    assert "strategy" not in chosen("advanced", devices=8, num_nodes=2)
    assert not one - eight
    reason = chosen("ultra", devices=8)["strategy"].because
    assert reason == "all processes are on one machine, without a network between them"


def test_compiling_is_always_measured() -> None:
    for name in ("advanced", "ultra"):
        assert chosen(name, devices=1)["CompileModel"].settings["measure"] is True


def test_memory_decides_on_checkpointing() -> None:
    """Of the total memory of a device; frozen weights have no gradients and states."""
    small, tight, frozen = Wide(1.0), Wide(18.0), Wide(18.0).requires_grad_(False)
    assert "ActivationCheckpointing" not in on("advanced", devices=1), "the model is unknown"
    assert "ActivationCheckpointing" not in on("advanced", small, devices=1)
    assert "ActivationCheckpointing" in on("advanced", tight, devices=1)
    assert "ActivationCheckpointing" not in on("advanced", frozen, devices=1)
    sharded = {"devices": 8, "strategy": ModelParallelStrategy(8, 1)}
    assert "ActivationCheckpointing" not in on("advanced", tight, **sharded)
    because = chosen("advanced", tight, **sharded)["ActivationCheckpointing"].because
    assert because == "the model leaves enough memory for activations"


def test_compiling_decides_on_the_checkpointing_policy() -> None:
    compiled = chosen("advanced", Wide(18.0), devices=1)
    assert compiled["CompileModel"].is_on
    assert compiled["ActivationCheckpointing"].settings == {"policy": "every_layer"}
    preset = lo.preset("advanced", CompileModel=None).for_model(Wide(18.0))
    found = {choice.part.name: choice for choice in preset.choose(accelerator="cuda", devices=1)}
    assert found["ActivationCheckpointing"].settings == {"policy": "auto", "strict": False}
