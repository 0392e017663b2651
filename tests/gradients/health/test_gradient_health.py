"""GradientHealth in Trainers: measurements, logs, resume and errors."""

import copy
import json
import math
import statistics
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from torch import Tensor, nn

import lightning_opt as lo
from lightning_opt.gradients.health import optimizer_health
from tests.gradients.health.test_faults import Classifier, mlp
from tests.helpers.models import AdversarialNet, SmallNet
from tests.helpers.syncs import SyncCounter, take_device_path
from tests.helpers.trainers import MemoryLogger, fit, quiet_trainer

FINE = pytest.approx


class Reference(Callback):
    """Records gradients and weights of every step in float64."""

    def __init__(self) -> None:
        self.gradients: list[dict[str, Tensor]] = []
        self.before: list[dict[str, Tensor]] = []
        self.after: list[dict[str, Tensor]] = []

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        named = dict(pl_module.named_parameters())
        self.gradients.append({name: p.grad.double() for name, p in named.items()})
        self.before.append({name: p.detach().double() for name, p in named.items()})

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.after.append({n: p.detach().double() for n, p in pl_module.named_parameters()})


def test_measurements_match_float64(path):
    health, reference = lo.GradientHealth(every_n_steps=6), Reference()
    fit(SmallNet(), health, reference)  # 12 steps: the window of the last report is steps 7 to 12
    vitals = {p.name: p for layer in health.layers for p in layer.parameters}
    assert vitals.keys() == reference.gradients[0].keys()
    for name, found in vitals.items():
        norms = [float(step[name].norm()) for step in reference.gradients[6:]]
        last = reference.gradients[-1][name]
        assert found.mean == FINE(statistics.fmean(norms), rel=1e-5)
        assert math.sqrt(found.variance) == FINE(statistics.pstdev(norms), rel=1e-5)
        assert found.max == FINE(float(last.abs().max()), rel=1e-6)
        assert found.zeros == FINE(float((last == 0).double().mean()))
        change = (reference.after[-1][name] - reference.before[-1][name]).norm()
        assert found.update == FINE(float(change / reference.before[-1][name].norm()), rel=1e-3)


def test_update_ratio_of_a_large_tensor_is_sampled():
    """The sample must cover all columns: 150,000 weights in 6 columns, about every 18th."""
    model = SmallNet("Adam", widths=(25_000,), lr=1e-3)
    health, reference = lo.GradientHealth(every_n_steps=12), Reference()
    fit(model, health, reference)
    found = next(p for p in health.layers[0].parameters if p.name == "layer.0.weight")
    before, after = reference.before[-1][found.name], reference.after[-1][found.name]
    assert found.numel == 150_000
    assert found.update == FINE(float((after - before).norm() / before.norm()), rel=0.1)


def test_reports_log_all_keys_at_the_trainers_step():
    logger, health = MemoryLogger(), lo.GradientHealth(every_n_steps=5)
    reference = Reference()
    trainer = fit(SmallNet(), health, reference, logger=logger)
    records = [(s, m) for s, m in logger.records if any(k.startswith("health/") for k in m)]
    assert [step for step, _ in records] == [4, 9]
    totals = [
        float(torch.stack([g.norm() for g in step.values()]).norm()) for step in reference.gradients
    ]
    last = records[-1][1]
    assert last["health/norm"] == FINE(statistics.median(totals[5:10]), rel=1e-5)
    assert last["health/peak_norm"] == FINE(max(totals[5:10]), rel=1e-5)
    assert last.keys() == {
        f"health/{key}"
        for key in (
            "norm", "peak_norm", "noise", "update", "zeros", "smallest_rms", "largest_rms",
            "nonfinite", "overflows", "critical", "warnings",
        )
    }  # fmt: skip
    assert trainer.callback_metrics["health/norm"] == FINE(last["health/norm"])


def test_each_optimizer_has_its_own_history():
    logger, health = MemoryLogger(), lo.GradientHealth(every_n_steps=4)
    fit(AdversarialNet(generator_every=2), health, logger=logger)
    steps = {index: state["steps"] for index, state in health.state_dict().items()}
    assert steps == {"0": 6, "1": 12}
    logged = {key for _, metrics in logger.records for key in metrics}
    assert {"health/0/norm", "health/1/norm"} <= logged
    assert "health/norm" not in logged
    names = [layer.name for layer in health.layers]
    assert sorted(names) == ["discriminator.0", "discriminator.2", "generator.0", "generator.2"]


def test_several_steps_in_one_batch_all_count():
    class Twice(AdversarialNet):
        def training_step(self, batch: Any, batch_idx: int) -> None:
            super().training_step(batch, batch_idx)
            super().training_step(batch, batch_idx)

    health = lo.GradientHealth(every_n_steps=1)
    fit(Twice(), health)
    steps = {index: state["steps"] for index, state in health.state_dict().items()}
    assert steps == {"0": 24, "1": 24}
    assert sum(layer.parameters[0].count for layer in health.layers) == 8


def test_nan_in_an_activation_is_one_issue_with_several_optimizers():
    model, health = AdversarialNet(), lo.GradientHealth(every_n_steps=2, activations=True)
    nn.init.constant_(model.discriminator[0].weight, math.nan)
    fit(model, health, max_steps=4)
    assert [issue.place for issue in health.issues].count("discriminator.0") == 1


def test_nested_activations_are_watched():
    class Nested(SmallNet):
        def step(self, batch: Any) -> Tensor:
            rows = torch.nested.nested_tensor(list(batch[0].split([1, 3])), layout=torch.jagged)
            return self.loss(self.layer(rows).values(), batch[1])

    model, health = Nested(), lo.GradientHealth(every_n_steps=2, activations=True)
    nn.init.constant_(model.layer[2].weight, math.nan)
    fit(model, health, max_steps=4, limit_val_batches=0)
    assert health.issues[0].place == "layer.2"


def test_copy_of_the_model_is_not_watched():
    class Copies(Callback):
        def on_train_batch_end(self, trainer, pl_module, *args):
            self.records = len(health._activations._batches)

        def on_before_zero_grad(self, trainer, pl_module, optimizer):
            copied = copy.deepcopy(pl_module)
            self.watches = [hook.func.__self__ for hook in hooks_of(copied)]
            copied.layer(torch.randn(4, 6))

    def hooks_of(model):
        return [hook for part in model.modules() for hook in part._forward_hooks.values()]

    copies, health = Copies(), lo.GradientHealth(activations=True)
    fit(SmallNet(), health, copies)
    assert copies.records == 12
    assert [watch._outputs for watch in copies.watches] == [[]] * 3


def test_compiled_model_gets_no_hooks():
    model = Classifier(mlp(2))
    model.net.compile(backend="eager")
    health = lo.GradientHealth(every_n_steps=2, activations=True)

    class CheckHooks(Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            assert not any(m._forward_pre_hooks or m._forward_hooks for m in pl_module.modules())

    fit(model, health, CheckHooks(), max_steps=4)
    assert [layer.name for layer in health.layers] == ["net.0", "net.2", "net.4"]


def test_device_is_read_once_per_report(monkeypatch):
    take_device_path(monkeypatch)

    class Window(Callback):
        def __init__(self, syncs: SyncCounter, start: bool) -> None:
            self.syncs, self.start, self.counts = syncs, start, []

        def on_before_optimizer_step(self, trainer, pl_module, optimizer):
            self.mark()

        def on_train_batch_end(self, *args: Any) -> None:
            self.mark()

        def mark(self) -> None:
            self.syncs.clear() if self.start else self.counts.append(self.syncs.where.copy())

    with SyncCounter() as syncs:
        after = Window(syncs, False)
        health = lo.GradientHealth(every_n_steps=3)
        fit(SmallNet(), Window(syncs, True), health, after)
    ours = [
        sum(n for place, n in count.items() if "lightning_opt" in place) for count in after.counts
    ]
    before_update, at_batch_end = ours[::2], ours[1::2]
    assert sum(before_update) == 0
    assert at_batch_end == [0, 0, 1] * 4
    assert all("health/measures" in p for c in after.counts for p in c if "lightning_opt" in p)


def test_issue_and_history_survive_a_resume(tmp_path):
    """Findings in two reports before a stop and in one after it make an issue."""

    def broken() -> Classifier:
        net = mlp(4)
        with torch.no_grad():
            net[4].bias.fill_(-1e4)
        return Classifier(net)

    first = lo.GradientHealth(every_n_steps=5)
    trainer = fit(broken(), first, max_steps=12)
    trainer.save_checkpoint(tmp_path / "stopped.ckpt")
    assert not first.issues
    json.dumps(first.state_dict())  # plain types, whatever the checkpoint's format

    second, model = lo.GradientHealth(every_n_steps=5), broken()
    trainer = quiet_trainer(callbacks=[second], max_steps=15, max_epochs=-1)
    trainer.fit(model, ckpt_path=tmp_path / "stopped.ckpt", weights_only=True)
    assert [issue.type for issue in second.issues] == ["dead"]
    assert second.issues[0].place == "net.4"
    assert second.state_dict()["0"]["steps"] == 15
    assert second.state_dict()["0"]["timeline"][-1]["step"] == 15
    first.load_state_dict(second.state_dict())
    assert [str(issue) for issue in first.issues] == [str(issue) for issue in second.issues]


def test_long_timeline_is_thinned(monkeypatch):
    monkeypatch.setattr(optimizer_health, "TIMELINE", 8)
    health = lo.GradientHealth(every_n_steps=1)
    fit(SmallNet(), health, max_epochs=3)
    timeline = health.state_dict()["0"]["timeline"]
    assert len(timeline) <= 8
    assert (timeline[0]["step"], timeline[-1]["step"]) == (1, 36)


def test_complex_weights_count_as_two_real_ones(path):
    class SetGradient(Callback):
        def on_before_optimizer_step(self, trainer, pl_module, optimizer):
            pl_module.filter.grad = torch.tensor([0, 3 + 4j, 3 + 4j, 3 + 4j])

    model = SmallNet("SGD")
    model.filter = nn.Parameter(torch.ones(4, dtype=torch.complex64))
    health = lo.GradientHealth(every_n_steps=3)
    fit(model, SetGradient(), health)
    (found,) = (p for layer in health.layers for p in layer.parameters if p.name == "filter")
    assert found.mean == FINE(75**0.5)
    assert (found.numel, found.max, found.zeros) == (8, 4.0, 0.25)
    assert found.update > 0
