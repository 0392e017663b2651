"""The switches, their exclusions, and the joining of settings."""

import inspect
import json
from dataclasses import replace
from typing import Any

import pytest
from lightning.pytorch.callbacks import LearningRateMonitor, Timer

import lightning_opt as lo
from lightning_opt.tuner.probe import Facts
from lightning_opt.tuner.space import Space, built_in_switches
from lightning_opt.worker.recipes import as_mapping

NET = Facts(blocks=4, convolutions=3, samples=32, threads=1, cpus=2)


def names(facts: Facts = NET, objective: str = "throughput", **arguments: Any) -> list[str]:
    return list(Space(objective, facts, **arguments).switches)


def test_unsuitable_switches_are_left_out_with_reasons() -> None:
    space = Space("throughput", NET)
    tried = "fused channels_last all_threads bf16 data_pipeline compile_regions compile"
    assert list(space.switches) == tried.split()
    assert space.left_out["tf32"] == "it is for CUDA, and the device is cpu"
    assert space.left_out["one_thread"] == "torch uses one thread already"


@pytest.mark.parametrize(
    ("facts", "gone", "reason"),
    [
        (Facts(blocks=0), "compile_regions", "the model has no repeated blocks"),
        (Facts(convolutions=0), "channels_last", "the model has no convolutions in 2D or 3D"),
        (Facts(threads=2, cpus=2), "all_threads", "torch uses all CPUs already"),
        (Facts(why_no_bf16="no bf16 units"), "bf16", "no bf16 units"),
        (Facts(device="cuda"), "fp16", "bfloat16 needs no loss scale"),
    ],
)
def test_reason_of_a_left_out_switch(facts: Facts, gone: str, reason: str) -> None:
    assert Space("throughput", facts).left_out[gone] == reason


def test_memory_objective_has_its_own_switches() -> None:
    small = names(objective="memory")
    assert {"checkpointing", "half_batches", "quarter_batches"} <= set(small)
    assert "channels_last" not in small
    space = Space("memory", NET)
    part = space.switches["half_batches"].settings
    assert as_mapping(part)["callbacks"][0]["init_args"] == {"size": 16}
    assert "a batch has 2 samples" in Space("memory", Facts(samples=2)).left_out["half_batches"]


def test_workers_are_also_tried_with_one_thread() -> None:
    space = Space("throughput", replace(NET, threads=2))
    tuner, runtime = space.settings(["data_pipeline_one_thread"])["callbacks"]  # type: ignore[index]
    assert tuner["class_path"] == "lightning_opt.DataPipelineTuner"
    assert runtime["init_args"]["threads"] == 1
    assert not space.allows(["data_pipeline_one_thread", "one_thread"])
    assert not space.allows(["data_pipeline_one_thread", "data_pipeline"])


@pytest.mark.parametrize("facts", [NET, replace(NET, device="cuda", why_no_bf16="old")])
def test_every_switch_can_be_created_and_measures_the_same_each_time(facts: Facts) -> None:
    """A callback that decides by itself could decide differently in each trial."""
    for switch in built_in_switches(facts):
        assert switch.about
        assert json.dumps(switch.settings)
        for callback in as_mapping(switch.settings).get("callbacks", []):
            kind = getattr(lo, callback["class_path"].rpartition(".")[2])
            arguments = callback.get("init_args", {})
            assert kind(**arguments)
            call = inspect.signature(kind).bind(**arguments)
            call.apply_defaults()
            assert call.arguments.get("policy") != "auto", switch.name
            assert not call.arguments.get("measure"), switch.name


def test_list_of_candidates_is_exact() -> None:
    own = {"slow decay": {"accumulate_grad_batches": 2}}
    space = Space("throughput", NET, ["checkpointing", own, "bf16"])
    assert list(space.switches) == ["checkpointing", "slow decay", "bf16"]


def test_mapping_of_candidates_changes_the_choice() -> None:
    found = names(candidates={"compile": None, "checkpointing": True, "own": {"benchmark": True}})
    assert "compile" not in found
    assert found[-2:] == ["checkpointing", "own"]


@pytest.mark.parametrize(
    ("candidates", "match"),
    [
        (["warp drive"], "'warp drive', not a built-in switch. The built-in switches are fused,"),
        ({"warp drive": None}, "not a built-in switch"),
        ({"own": {}}, "candidates\\['own'\\] must be Trainer arguments such as {'precision'"),
        ({"own": 3}, "must be Trainer arguments"),
        ("compile", "must be a list or a mapping, got the string 'compile'"),
    ],
)
def test_invalid_candidates_raise(candidates: Any, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        Space("throughput", NET, candidates)


def test_switches_in_base_are_left_out() -> None:
    base = {"precision": "bf16-mixed", "callbacks": [lo.FusedOptimizer()]}
    more = {**base, "callbacks": [lo.ChannelsLast()]}
    left = Space("throughput", NET, {"fused": True, "bf16": True, "more": more}, base).left_out
    assert "more" not in left
    assert left["fused"] == "base has FusedOptimizer already"
    assert left["bf16"] == "base sets precision='bf16-mixed'"
    assert "base" in Space("throughput", NET, base=lambda: base).left_out["bf16"]


def test_incompatible_switches_are_not_allowed() -> None:
    space = Space("memory", NET, {"own": {"precision": "16-true"}})
    assert space.allows(["compile", "checkpointing", "bf16"])
    assert not space.allows(["compile", "compile_regions"])
    assert not space.allows(["checkpointing", "checkpointing_selective"])
    assert not space.allows(["own", "bf16"])
    timed = {"a": {"callbacks": [Timer()]}, "b": {"callbacks": Timer()}}
    assert not Space("memory", NET, [timed]).allows("ab")


def test_settings_are_joined_in_order() -> None:
    base = {"accelerator": "cpu", "callbacks": LearningRateMonitor(), "max_epochs": 1}
    space = Space("memory", NET, base=base | {"plugins": ["base"]})
    more = {"callbacks": ["last"], "max_epochs": 3, "plugins": "own"}
    settings = space.settings(["compile", "bf16"], more)
    assert not callable(settings)
    assert [*settings] == ["accelerator", "callbacks", "max_epochs", "plugins", "precision"]
    assert settings["plugins"] == ["base", "own"]
    assert settings["max_epochs"] == 3
    monitor, compiled, last = settings["callbacks"]
    assert isinstance(monitor, LearningRateMonitor)
    assert compiled == {"class_path": "lightning_opt.CompileModel"}
    assert last == "last"


def test_function_settings_are_called_each_time() -> None:
    space = Space("memory", NET, {"own": lambda: {"callbacks": [Timer()]}})
    made = space.settings(["own"])
    assert callable(made)
    assert made()["callbacks"][0] is not made()["callbacks"][0]
