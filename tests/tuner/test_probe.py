"""Planted faults and harmless changes, as a trial's callback sees them in real trainings."""

import itertools
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from torch import nn

import lightning_opt as lo
from benchmarks.tuner import numerics
from benchmarks.tuner.numerics import FAULTS, NETS, OPTIMIZERS, Planted, observe, usual, why_not
from lightning_opt.tuner.numerics import compare_gradients

TASKS = list(itertools.product(NETS, OPTIMIZERS, (False, True)))
TASK = ("ConvNet", "AdamW", False)


@pytest.mark.parametrize("task", TASKS, ids=str)
def test_planted_faults_are_rejected(task: Any) -> None:
    """Whatever the learning rate: from equal weights and batches gradients say it at once."""
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


def test_what_it_tells() -> None:
    observed = observe(TASK, 0)
    facts = observed.facts
    assert (facts.device, facts.convolutions, facts.samples, facts.fused) == ("cpu", 2, 32, False)
    assert facts.loader
    assert facts.automatic
    assert facts.share("forward") is None, "nothing measured it"
    assert sorted(observed.moved) == [2, 4, 8]
    assert len(observed.gradients) == 4
    assert all(distance > 0 for distance in observed.moved[8].values())


class Workers(Callback):
    """Gives the loader workers at the start of an epoch, as DataPipelineTuner does."""

    def on_train_epoch_start(self, trainer: Trainer, pl_module: Any) -> None:
        trainer.train_dataloader.num_workers = 2


def test_it_tells_the_workers_that_the_steps_have() -> None:
    assert observe(TASK, 0).facts.workers == 0
    assert observe(TASK, 0, callbacks=[Workers()]).facts.workers == 2


def test_wrappers_leave_the_names_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """What compiles or wraps a part of the model puts a name of its own between."""
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


def test_a_profiler_says_where_the_steps_go_until_that_is_steady(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("lightning_opt.tuner.probe.SECONDS", 0.0)
    profiler = lo.StepProfiler(log_every_n_steps=0, flops=False, print_table=False)
    seen: list[bool] = []

    class Look(Callback):
        def on_train_batch_start(self, trainer: Trainer, *rest: Any) -> None:
            seen.append(trainer.profiler is profiler)  # type: ignore[attr-defined]

    observed = observe(TASK, 0, profiler=profiler, callbacks=[Look()], max_steps=12, max_epochs=2)
    facts = observed.facts
    assert seen == [True] * 8 + [False] * 4, "the steps that are timed run without it"
    assert facts.steady
    assert min(facts.account[name] for name in ("forward", "backward", "optimizer")) > 0
    assert facts.room > 0
    bare = usual(TASK, 0, "32-true").losses
    assert observed.losses[: len(bare)] == bare
