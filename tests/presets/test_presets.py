"""Presets in real Trainers: their parts work together under every strategy."""

import itertools
import pickle
from collections import UserList
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from torch.utils.data import DataLoader, Subset

import lightning_opt as lo
from lightning_opt.core.measure import machine
from lightning_opt.presets import situation
from lightning_opt.presets._optional import as_optional
from lightning_opt.trainer.run_callback import RunCallback
from lightning_opt.worker.recipes import instantiate
from tests.helpers.models import (
    AdversarialNet,
    SmallNet,
    WholeBatchNet,
    assert_same_weights,
    batches_of,
    shard,
    weights_of,
)
from tests.helpers.processes import launch
from tests.helpers.trainers import FSDPOnCPU, quiet_trainer

pytestmark = [
    # torch's compiler reads `.grad` of each tensor.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
]

NAMES = ("basic", "advanced", "ultra")
TENSOR = ModelParallelStrategy()

QUICK: dict[str, Any] = {
    # Inductor takes seconds per run, and has its own tests.
    "CompileModel": {"backend": "eager"},
    "DataPipelineTuner": {"max_workers": 0, "verbose": False},
}
"""Settings that make runs of tiny models fast."""


def quick(name: str, **overrides: Any) -> lo.Preset:
    """Return a preset that runs fast and does not change the numbers."""
    settings = QUICK if name != "basic" else {}
    return lo.preset(name, **{**settings, **overrides})


def compiling() -> lo.Preset:
    """Return a preset that compiles on a CPU, without that being asked for."""
    return lo.preset("basic").plus(lo.CompileModel, QUICK["CompileModel"])


def fit(preset: lo.Preset, model: LightningModule, **settings: Any) -> Any:
    # A CPU with bfloat16 in hardware would get bf16.
    precision = {"precision": "32-true"} if preset.name != "basic" else {}
    defaults = {"accelerator": "cpu", "devices": 1, "max_epochs": 2, **precision}
    trainer = quiet_trainer(**preset.trainer_kwargs(**{**defaults, **settings}))
    trainer.fit(model)
    return trainer


def on(preset: lo.Preset, **trainer: Any) -> list[str]:
    return [part.name for part in preset.choose(**trainer) if part.is_on]


def reason(preset: lo.Preset, name: str, **trainer: Any) -> str:
    (found,) = [c.reason for c in preset.choose(**trainer) if c.name == name]
    assert found, f"{name} is on"
    return found


# --- they train -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_weights_equal_a_run_without_preset(name):
    """Without clipping, a preset changes a healthy run only by rounding."""
    plain = SmallNet("AdamW")
    quiet_trainer(max_epochs=2).fit(plain)
    model = SmallNet("AdamW")
    trainer = fit(quick(name, AdaptiveClipping=None), model)
    assert_same_weights(model, plain, rtol=0 if name == "basic" else 1e-5)
    assert trainer.global_step == 24


def test_each_preset_extends_the_one_before():
    names = [[type(callback).__name__ for callback in lo.preset(n).callbacks()] for n in NAMES]
    for less, more in itertools.pairwise(names):
        assert set(less) < set(more)
    for found in names:
        assert len(found) == len(set(found))
        order = [n for n in found if n in ("GradientHealth", "NonFiniteGuard", "AdaptiveClipping")]
        assert order == ["GradientHealth", "NonFiniteGuard", "AdaptiveClipping"]


class Ranked(WholeBatchNet):
    """Each rank loads its own rows, so that a batch can be split."""

    def train_dataloader(self) -> Any:
        rank, ranks = self.global_rank, self.trainer.world_size
        rows = Subset(batches_of(12), range(rank, 48, ranks))
        return DataLoader(rows, batch_size=4 // ranks)


class Sharded(Ranked):
    """The same under FSDP2."""

    def configure_model(self) -> None:
        shard(self, *self.layer)


STRATEGIES: dict[str, Any] = {
    "ddp": (Ranked, lambda: DDPStrategy(process_group_backend="gloo")),
    "ddp_static": (Ranked, lambda: DDPStrategy(process_group_backend="gloo", static_graph=True)),
    "ddp_compressed": (Ranked, lambda: "ddp_compressed"),
    "fsdp1": (Ranked, lambda: FSDPOnCPU(use_orig_params=True)),
    "fsdp2": (Sharded, lambda: ModelParallelStrategy(2, 1)),
}


def under_each_strategy() -> dict[str, Any]:
    found = {}
    for strategy, (kind, make) in STRATEGIES.items():
        model = kind("AdamW")
        preset = quick("ultra", AdaptiveClipping=None)
        trainer = fit(preset, model, strategy=make(), devices=2, max_epochs=1)
        if strategy == "fsdp1":  # its flat shards are not gathered after the fit
            assert trainer.global_step == 12
            continue
        callbacks = [type(callback).__name__ for callback in trainer.callbacks]
        found[strategy] = (weights_of(model), callbacks)
    return found


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view tensor")
@pytest.mark.filterwarnings("ignore:The preset leaves out MicroBatching")
@pytest.mark.filterwarnings("ignore:MicroBatching. it was not possible to check .* are sharded")
def test_two_processes_give_the_same_weights_as_one():
    plain = SmallNet("AdamW")
    quiet_trainer().fit(plain)
    first, second = launch(under_each_strategy)
    for strategy, (state, callbacks) in first.items():
        assert_same_weights(state, second[strategy][0])
        assert_same_weights(state, plain, rtol=1e-3, atol=1e-4)
        assert ("MicroBatching" in callbacks) == (strategy != "ddp_static")
        assert "CompileModel" in callbacks


# --- unsupported parts ----------------------------------------------------------------------------


def test_parts_that_the_trainer_replaces_are_left_out():
    model = SmallNet()
    trainer = fit(quick("ultra"), model, gradient_clip_val=0.5, accumulate_grad_batches=5)
    assert any(isinstance(c, lo.Accumulation) for c in trainer.callbacks)  # also a short window
    assert trainer.global_step == 2 * 3
    assert "gradient_clip_val" in reason(quick("ultra"), "AdaptiveClipping", gradient_clip_val=0.5)


def test_unsupported_part_is_left_out_at_the_start_with_a_warning():
    """The preset was chosen without the model and without the Trainer's last arguments."""
    exported = instantiate(quick("ultra").to_dict(accelerator="cpu", precision="32-true"))
    with pytest.warns(UserWarning, match="leaves out MicroBatching: .* manual optimisation"):
        quiet_trainer(**exported).fit(AdversarialNet())
    compiled = torch.compile(SmallNet(), backend="eager")
    with pytest.warns(UserWarning, match=r"leaves out CompileModel: .* torch\.compile already"):
        fit(compiling(), compiled)
    arguments = quick("basic").trainer_kwargs(accelerator="cpu")
    trainer = quiet_trainer(**{**arguments, "gradient_clip_val": 0.5})
    pickle.loads(pickle.dumps(trainer.callbacks))
    with pytest.warns(UserWarning, match="leaves out AdaptiveClipping: .*gradient_clip_val"):
        trainer.fit(SmallNet())
    assert not any(isinstance(callback, lo.AdaptiveClipping) for callback in trainer.callbacks)


class Unsupported(RunCallback):
    def on_train_start(self, trainer, pl_module):
        trainer.accumulate_grad_batches = 3
        raise ValueError("not here")

    def release(self, trainer):
        trainer.accumulate_grad_batches = 1


def test_part_that_raises_when_training_starts_is_left_out():
    trainer = quiet_trainer(callbacks=[as_optional(Unsupported)()])
    with pytest.warns(UserWarning, match="leaves out Unsupported: not here"):
        trainer.fit(SmallNet())
    assert trainer.global_step == 12


def test_guard_behind_the_users_clipping_is_an_error_and_not_left_out():
    trainer = quiet_trainer(callbacks=[lo.AdaptiveClipping("zclip"), *quick("basic").callbacks()])
    with pytest.raises(RuntimeError, match=r"guard measures them\. A preset's trainer_kwargs"):
        trainer.fit(SmallNet())


def test_named_part_raises_if_it_is_not_supported():
    with pytest.raises(ValueError, match=r"MicroBatching does not work under manual"):
        fit(quick("ultra", MicroBatching={"size": 2}), AdversarialNet())


@pytest.mark.parametrize(
    ("trainer", "missing"),
    [
        ({"strategy": "deepspeed"}, {"GradientHealth", "NonFiniteGuard", "AdaptiveClipping"}),
        ({"strategy": "deepspeed_stage_2"}, {"CompileModel", "MicroBatching", "FusedOptimizer"}),
        ({"strategy": FSDPOnCPU(), "devices": 2}, {"CompileModel"}),
        ({"strategy": TENSOR, "devices": 2}, {"CompileModel"}),
        ({"strategy": "no_such_thing"}, {"CompileModel"}),
        ({"accelerator": "mps"}, {"CompileModel", "precision"}),
        ({"strategy": "ddp_topk", "devices": 2}, {"AdaptiveClipping"}),
        ({"strategy": lo.CompressedDDPStrategy("threshold"), "devices": 2}, {"AdaptiveClipping"}),
    ],
)
def test_unsupported_parts_are_left_out(trainer, missing):
    preset = quick("ultra")
    assert not missing & set(on(preset, **trainer))
    for name in missing:
        assert reason(preset, name, **trainer)


def test_clipping_works_with_dense_compression():
    for strategy in ("ddp_int8", "ddp_compressed", lo.CompressedDDPStrategy("int4")):
        assert "AdaptiveClipping" in on(lo.preset("basic"), strategy=strategy, devices=2)


# --- the machine ----------------------------------------------------------------------------------


def test_bf16_needs_hardware_support_of_the_cpu(monkeypatch):
    monkeypatch.setattr(machine, "cpu_flags", lambda: frozenset({"avx512f", "avx512_bf16"}))
    preset = lo.preset("advanced")
    assert preset.trainer_kwargs(accelerator="cpu")["precision"] == "bf16-mixed"
    given = preset.trainer_kwargs(accelerator="cpu", precision="32-true")
    assert given["precision"] == "32-true"
    plugin = lo.DynamicLossScale()
    assert "precision" not in preset.trainer_kwargs(accelerator="cpu", plugins=[plugin])

    monkeypatch.setattr(machine, "cpu_flags", lambda: frozenset({"avx512f", "avx2"}))
    assert "precision" not in preset.trainer_kwargs(accelerator="cpu")
    assert "avx512_bf16" in reason(preset, "precision", accelerator="cpu")


def test_cpu_flags_are_read_from_cpuinfo(tmp_path):
    listing = tmp_path / "cpuinfo"
    listing.write_text("processor\t: 0\nflags\t\t: fpu avx512_bf16 amx_tile\n\nflags\t: other\n")
    assert machine.cpu_flags.__wrapped__(listing) == {"fpu", "avx512_bf16", "amx_tile"}
    assert machine.cpu_flags.__wrapped__(tmp_path / "missing") == frozenset()


def test_choice_of_parts_depends_on_the_gpus(monkeypatch):
    def parts(capability: tuple[int, int] = (9, 0), **trainer: Any) -> set[str]:
        monkeypatch.setattr(machine, "cuda_capability", lambda forks: capability)
        return set(on(lo.preset("ultra"), accelerator="cuda", **{"devices": 1, **trainer}))

    monkeypatch.setattr(machine, "find_spec", lambda name: object())
    monkeypatch.setattr(machine.shutil, "which", lambda name: name)
    assert not {"precision", "CompileModel"} & parts((6, 1))
    assert {"precision", "CompileModel"} & parts((7, 5)) == {"CompileModel"}
    one, eight, two_nodes = parts(), parts(devices=8), parts(devices=8, num_nodes=2)
    assert {"precision", "CompileModel", "FusedOptimizer", "MicroBatching"} <= one
    assert eight - one == {"GarbageCollection"}, "ranks wait for each other's collections"
    assert two_nodes - eight == {"strategy"}
    assert not one - eight
    assert "strategy" not in parts(num_nodes=2, strategy="fsdp")
    arguments = lo.preset("ultra").trainer_kwargs(accelerator="cuda", num_nodes=2)
    assert arguments["strategy"] == "ddp_compressed"
    found = reason(lo.preset("ultra"), "strategy", accelerator="cuda", devices=8)
    assert found == "all processes are on one machine, without a network between them"


def test_compiling_on_a_cpu_needs_a_request():
    assert "lightning-opt tune measures" in reason(
        lo.preset("ultra"), "CompileModel", accelerator="cpu"
    )
    for asked in (True, {"scope": "regions"}):
        assert "CompileModel" in on(lo.preset("advanced", CompileModel=asked), accelerator="cpu")


def test_unknown_gpu_is_not_called_too_old(monkeypatch):
    monkeypatch.setattr(machine, "open_nvml", lambda: None)
    found = reason(lo.preset("ultra"), "precision", accelerator="cuda", strategy="ddp_fork")
    assert found == "the GPU's compute capability is unknown: NVML or the GPU is not available"


def test_compiling_needs_a_compiler(monkeypatch):
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CC", raising=False)
    assert "C compiler" in reason(lo.preset("advanced"), "CompileModel", accelerator="cuda")
    assert "CompileModel" in on(lo.preset("advanced", CompileModel=True), accelerator="cuda")


# --- the user's own settings ----------------------------------------------------------------------


class Own(lo.AdaptiveClipping):
    """A subclass, which also replaces the preset's callback."""


class Mine(Callback):
    pass


def test_own_callbacks_replace_and_are_ordered():
    own, mine = Own("zclip"), Mine()
    given = UserList([mine, own, lo.CurvatureMonitor()])  # like OmegaConf's, no `list`
    found = lo.preset("basic").trainer_kwargs(callbacks=given)["callbacks"]
    names = " ".join(type(callback).__name__ for callback in found)
    assert names == (
        "GradientHealth NonFiniteGuard CurvatureMonitor Own PerformanceMonitor MemoryCleanup Mine"
    )
    assert found[3] is own


def test_overrides_reach_callbacks_and_trainer():
    preset = lo.preset(
        "advanced",
        AdaptiveClipping={"rule": {"class_path": "lightning_opt.ZClip", "init_args": {"z": 3.0}}},
        NonFiniteGuard={"spike": 6.0},
        MemoryCleanup=None,
        CompileModel=False,
        max_epochs=3,
    )
    arguments = preset.trainer_kwargs(max_steps=5)
    found = {type(callback).__name__: callback for callback in arguments["callbacks"]}
    assert found["AdaptiveClipping"].rule.z == 3.0
    assert found["NonFiniteGuard"].spike == 6.0
    assert not {"MemoryCleanup", "CompileModel"} & found.keys()
    assert (arguments["max_epochs"], arguments["max_steps"]) == (3, 5)
    assert preset.trainer_kwargs(max_epochs=7)["max_epochs"] == 7
    assert "AdaptiveClipping" in on(lo.preset("basic"))  # presets are immutable
    assert repr(lo.preset("basic", MemoryCleanup=None)) == "preset('basic', MemoryCleanup=None)"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"AdaptivClipping": None}, r"did you mean 'AdaptiveClipping'\?.*Gra"),
        ({"max_epoch": 3}, r"did you mean 'max_epochs'"),
        ({"AdaptiveClipping": {"rul": "zclip"}}, r"unexpected keyword argument 'rul'"),
        ({"AdaptiveClipping": {"rule": "clip"}}, r"rule must be one of .*got 'clip'"),
        ({"AdaptiveClipping": "zclip"}, r"must be a dict of its settings, True, or None"),
        ({"callbacks": []}, r"trainer_kwargs\(callbacks=\[...\]\)"),
    ],
)
def test_wrong_overrides_raise(overrides, message):
    with pytest.raises((ValueError, TypeError), match=message):
        lo.preset("basic", **overrides)


def test_describe_lists_parts_with_reasons():
    report = lo.preset("ultra", MemoryCleanup=None).describe(accelerator="cpu", devices=1)
    rows = {row["part"]: row for row in report.rows}
    assert rows["GradientHealth"]["on"] == "yes"
    assert rows["MemoryCleanup"]["costs, or why not"] == "excluded by you"
    assert all(row["for"] and row["costs, or why not"] for row in report.rows)
    assert rows["MicroBatching"]["settings"] == "size='auto'"
    assert report.notes[0] == lo.preset("ultra").purpose
    assert "single" in report.notes[1]
    assert str(lo.preset("basic")).startswith("Preset 'basic'")


# --- situations -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("trainer", "expected"),
    [
        ({"accelerator": "cpu"}, ("cpu", 1, "single")),
        ({"accelerator": "cpu", "devices": 3}, ("cpu", 3, "ddp")),
        ({"accelerator": "cpu", "devices": "2", "num_nodes": 4}, ("cpu", 8, "ddp")),
        ({"accelerator": "cuda", "devices": [0, 3]}, ("cuda", 2, "ddp")),
        ({"accelerator": "cuda", "devices": "0,1,"}, ("cuda", 2, "ddp")),
        ({"accelerator": "cpu", "strategy": "ddp_topk_spawn"}, ("cpu", 1, "ddp")),
        ({"accelerator": "cpu", "strategy": lo.DiLoCoStrategy()}, ("cpu", 1, "ddp")),
        ({"accelerator": "cpu", "strategy": "fsdp"}, ("cpu", 1, "fsdp1")),
        ({"accelerator": "cpu", "strategy": ModelParallelStrategy(2, 1)}, ("cpu", 1, "fsdp2")),
        ({"accelerator": "cpu", "strategy": TENSOR}, ("cpu", 1, "tensor_parallel")),
    ],
)
def test_situation_of_trainer_arguments(trainer, expected):
    found = situation.Situation(trainer)
    assert (found.device, found.processes, found.strategy) == expected


def test_deterministic_runs_exclude_the_tuner_of_workers():
    found = reason(lo.preset("advanced"), "DataPipelineTuner", deterministic=True)
    assert "random augmentation" in found
