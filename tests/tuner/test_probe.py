"""Planted faults and harmless changes in real trainings with a TrialWatch."""

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from torch import nn

import lightning_opt as lo
from benchmarks.tuner import numerics
from benchmarks.tuner.numerics import NETS, Planted, observe, usual, why_not
from lightning_opt.tuner import probe
from lightning_opt.tuner.numerics import compare_gradients
from tests.helpers.models import SmallNet
from tests.helpers.trainers import quiet_trainer

TASK = ("ConvNet", "AdamW", False)
TASKS = [TASK, ("transformer", "AdamW", True)]


@pytest.mark.parametrize("task", TASKS, ids=str)
def test_planted_fault_is_rejected_by_its_gradient(task: Any) -> None:
    fault = Planted("one layer random", NETS[task[0]][1])
    assert "gradient" in why_not(task, callbacks=[fault])


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
    assert (facts.device, facts.convolutions, facts.samples, facts.workers) == ("cpu", 2, 32, 0)
    assert sorted(observed.moved) == [2, 4, 8]
    assert len(observed.gradients) == 4
    assert all(distance > 0 for distance in observed.moved[8].values())


def test_elements_are_taken_from_the_whole_parameter(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = usual(TASK, 0, "32-true").gradients[0]
    monkeypatch.setattr(probe, "MAX_ELEMENTS", 4)
    for name, taken in observe(TASK, 0).gradients[0].items():
        assert torch.equal(taken, whole[name][:: max(1, len(whole[name]) // 4)])


def test_only_rank_0_writes_its_observations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Trainer, "is_global_zero", False)
    assert observe(TASK, 0).gradients == []


def test_lazy_layers_can_be_tried(tmp_path: Path) -> None:
    net = SmallNet()
    net.layer = nn.LazyLinear(1)  # type: ignore[assignment]
    watch = probe.TrialWatch(str(tmp_path / "watch.pt"))
    quiet_trainer(callbacks=[watch]).fit(net)
    assert len(probe.Observations.read(tmp_path / "watch.pt").gradients) == 4


class Workers(Callback):
    """Sets workers at the start of an epoch, as DataPipelineTuner does."""

    def on_train_epoch_start(self, trainer: Trainer, pl_module: Any) -> None:
        trainer.train_dataloader.num_workers = 2


def test_workers_are_read_at_the_first_batch() -> None:
    assert observe(TASK, 0, callbacks=[Workers()]).facts.workers == 2


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
    assert compare_gradients(own.gradients, usually.gradients) == ""
