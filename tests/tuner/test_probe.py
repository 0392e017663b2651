"""Planted faults and harmless changes in real trainings with a TrialWatch."""

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from torch import nn
from torch.utils.data import DataLoader

import lightning_opt as lo
from benchmarks.tuner import numerics
from benchmarks.tuner.numerics import FAULTS, NETS, Planted, observe, usual, why_not
from lightning_opt.profiling.durations import Durations
from lightning_opt.profiling.steps import phase_clock as phases
from lightning_opt.tuner import probe
from lightning_opt.tuner.numerics import compare_gradients
from lightning_opt.tuner.probe import TrialWatch, seconds_by_group

TASKS = list(itertools.product(NETS, ["AdamW"], (False, True)))
TASK = ("ConvNet", "AdamW", False)


@pytest.mark.parametrize("task", TASKS, ids=str)
def test_planted_faults_are_rejected(task: Any) -> None:
    """By the gradients, whatever the learning rate."""
    for fault in FAULTS:
        why = why_not(task, callbacks=[Planted(fault, NETS[task[0]][1])])
        assert "gradient" in why, fault


@pytest.mark.parametrize("task", TASKS, ids=str)
def test_harmless_changes_are_accepted(task: Any) -> None:
    changes: list[dict[str, Any]] = [{"precision": "bf16-mixed"}]
    if task[0] == "ConvNet":
        changes.append({"callbacks": [lo.ChannelsLast()]})
    else:  # where the model draws random numbers, and does not normalise over a batch
        changes += [{"reseed": 2}, {"callbacks": [lo.MicroBatching(size=8)]}]
    for change in changes:
        assert why_not(task, **change) == "", change


def test_observations_have_facts_gradients_and_distances() -> None:
    observed = observe(TASK, 0)
    facts = observed.facts
    assert (facts.device, facts.convolutions, facts.samples, facts.fused) == ("cpu", 2, 32, False)
    assert facts.uses_dataloader
    assert facts.automatic_optimization
    assert facts.share("forward") is None, "nothing measured it"
    assert sorted(observed.moved) == [2, 4, 8]
    assert len(observed.gradients) == 4
    assert all(distance > 0 for distance in observed.moved[8].values())


def test_only_rank_0_writes_its_observations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Trainer, "is_global_zero", False)
    assert observe(TASK, 0).gradients == []


class Workers(Callback):
    """Sets workers at the start of an epoch, as DataPipelineTuner does."""

    def on_train_epoch_start(self, trainer: Trainer, pl_module: Any) -> None:
        trainer.train_dataloader.num_workers = 2


def test_workers_are_read_at_the_first_batch() -> None:
    assert observe(TASK, 0).facts.workers == 0
    assert observe(TASK, 0, callbacks=[Workers()]).facts.workers == 2


def test_workers_of_several_loaders_are_found() -> None:
    watch = TrialWatch()
    loaders = {"a": DataLoader(range(4)), "b": [DataLoader(range(4), num_workers=2)]}  # type: ignore[arg-type]
    trainer: Any = SimpleNamespace(train_dataloader=loaders)
    watch.on_train_batch_start(trainer, nn.Identity(), torch.ones(4), 0)  # type: ignore[arg-type]
    assert watch._facts == {"samples": 4, "workers": 2}


def test_wrapped_modules_keep_their_names(monkeypatch: pytest.MonkeyPatch) -> None:
    usually = usual(TASK, 0, "32-true")
    make, layer = NETS["ConvNet"]

    def wrapped() -> nn.Module:
        net = make()
        net[0] = torch.compile(net[0], backend="eager")
        return net

    monkeypatch.setitem(numerics.NETS, "ConvNet", (wrapped, layer))
    own = observe(TASK, 0)
    assert own.gradients[0].keys() == usually.gradients[0].keys()
    assert own.moved[8].keys() == usually.moved[8].keys()
    assert compare_gradients(own.gradients, usually.gradients)[1] == ""


def test_profiler_is_removed_once_queues_have_settled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("lightning_opt.tuner.probe.PROFILED_SECONDS", 0.0)
    profiler = lo.StepProfiler(log_every_n_steps=0, flops=False, print_table=False)
    seen: list[bool] = []

    class Look(Callback):
        def on_train_batch_start(self, trainer: Trainer, *rest: Any) -> None:
            seen.append(trainer.profiler is profiler)  # type: ignore[attr-defined]

    observed = observe(TASK, 0, profiler=profiler, callbacks=[Look()], max_steps=12, max_epochs=2)
    facts = observed.facts
    assert seen == [True] * 8 + [False] * 4, "the steps that are timed run without it"
    assert facts.steady
    assert min(facts.seconds_by_group[name] for name in ("forward", "backward", "optimizer")) > 0
    bare = usual(TASK, 0, "32-true").losses
    assert observed.losses[: len(bare)] == bare


# --- seconds of a step by group of phases -------------------------------------------------------


def clock(device: dict[int, float] | None = None) -> Any:
    found = SimpleNamespace(phases=phases.Phases(), device=None)
    if device is not None:
        durations = {phase: Durations() for phase in device}
        for phase, seconds in device.items():
            durations[phase].add(seconds)
        found.device = SimpleNamespace(durations=durations)
    return found


def test_phases_are_grouped_without_those_of_the_measurement() -> None:
    of = clock()
    own = of.phases.number("callback EarlyStopping", False)
    gate = of.phases.number("callback StepGate", False)
    watch = of.phases.number("callback TrialWatch", True)
    window = {
        phases.DATA: 4.0, phases.FORWARD: 2.0, phases.LOSS: 1.0, phases.BACKWARD: 6.0,
        phases.OPTIMIZER: 2.0, phases.ZEROING: 1.0, phases.LOGGING: 0.5, own: 0.5,
        phases.COMMUNICATION: 1.0, phases.LOOP: 3.0, gate: 100.0, watch: 50.0,
    }  # fmt: skip
    assert seconds_by_group(of, window, 2) == {
        probe.WAITING: 2.0, probe.FORWARD: 1.5, probe.BACKWARD: 3.0, probe.OPTIMIZER: 1.5,
        probe.COMMUNICATION: 0.5, probe.CALLBACKS: 0.5, probe.REST: 1.5,
    }  # fmt: skip


HOST = {phases.DATA: 3.0, phases.FORWARD: 1.0, phases.BACKWARD: 1.0, phases.LOOP: 5.0}


@pytest.mark.parametrize(
    ("device", "waiting", "rest"),
    [
        ({phases.FORWARD: 3.0, phases.BACKWARD: 7.0}, 0.0, 0.0),  # nothing leaves it idle
        ({phases.FORWARD: 3.0, phases.BACKWARD: 5.0}, 2.0, 0.0),
        ({phases.FORWARD: 1.0, phases.BACKWARD: 2.0, -1: 9.0}, 3.0, 4.0),
    ],
)
def test_host_time_counts_on_gpu_only_while_the_device_is_idle(
    device: dict[int, float], waiting: float, rest: float
) -> None:
    found = seconds_by_group(clock(device), HOST, 1)
    assert found[probe.BACKWARD] == pytest.approx(device[phases.BACKWARD], rel=0.1)
    assert found[probe.WAITING] == pytest.approx(waiting, rel=0.2, abs=0.2)
    assert found[probe.REST] == pytest.approx(rest, rel=0.2, abs=0.2)
    assert sum(found.values()) == pytest.approx(10.0, rel=0.05)
