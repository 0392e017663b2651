"""Trial steps have no side effects, not even on parameters that the step itself writes."""

import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
import torchmetrics
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.utils.data import DataLoader

import lightning_opt as lo
from lightning_opt.core.modules.trial import (
    TrialStep,
    WrittenParameters,
    all_parameters,
    copy_batch,
    without_side_effects,
)
from tests.helpers.models import (
    AdversarialNet,
    SmallNet,
    TwoOptimizersNet,
    assert_same_weights,
    weights_of,
)
from tests.helpers.processes import launch
from tests.helpers.trainers import MemoryLogger, loss_scaling, quiet_trainer


class Run(MemoryLogger):
    """Its experiment is used like Comet's, as a context, and like Neptune's, by keys."""

    @contextmanager
    def group(self, name: str) -> Iterator[MemoryLogger]:
        yield self

    def __getitem__(self, name: str) -> list[str]:
        return self.images

    def __setitem__(self, name: str, value: Any) -> None:
        self.images.append(name)


class Teaching(L.LightningModule):
    """Its step writes a teacher's weights and a buffer, draws all kinds of random numbers, and
    changes the learning rate."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.student, self.teacher = nn.Linear(4, 4), nn.Linear(4, 4).requires_grad_(False)
        self.hidden = [nn.Linear(4, 4).requires_grad_(False)]
        self.register_buffer("center", torch.zeros(4))
        self.draws, self.own = np.random.default_rng(0), torch.Generator().manual_seed(0)
        self.accuracy, self.count, self.seen = torchmetrics.MeanMetric(), 0, list[float]()
        self.writes_batch = False

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        with torch.no_grad():
            for mine, other in zip(
                self.teacher.parameters(), self.student.parameters(), strict=True
            ):
                mine.mul_(0.9).add_(other, alpha=0.1)
            bias = self.hidden[0].bias
            bias.data = bias.data * 0.9 + self.student.bias.data * 0.1
            self.hidden[0].weight.lerp_(self.student.weight, 0.1)
            self.center.mul_(0.9).add_(batch.mean(0), alpha=0.1)
            self.student.weight.clamp_(-0.4, 0.4)  # as of a critic
        if self.writes_batch:
            batch += 1
        if batch_idx:
            self.lr_schedulers().step()
        noise = random.random() + np.random.rand() + self.draws.random()  # noqa: NPY002
        noise = noise + self.hidden[0](batch)
        noise = noise + torch.rand(4) + torch.rand(4, generator=self.own)
        loss = (self.student(batch) - self.teacher(batch) + noise - self.center).square().mean()
        self.count += 1
        self.accuracy.update(loss.detach())
        self.seen.append(float(loss.detach()))
        self.late = self.count
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log("accuracy", self.accuracy)
        if isinstance(self.logger, Run):
            with self.logger.experiment.group("images") as group:
                group.add_image("batch", batch)
            self.logger.experiment["loss"] = self.logger.experiment["last"].append("loss")
            self.logger.log_metrics({"own": float(loss.detach())}, self.logger.version)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.student.parameters(), lr=0.05)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)]

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(torch.arange(48.0).reshape(12, 4) / 48, batch_size=4)


def fit(callback: Any = None, **settings: Any) -> Teaching:
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(1)
    model, logger = Teaching(), Run()
    callbacks = [] if callback is None else [callback]
    quiet_trainer(callbacks=callbacks, logger=logger, limit_val_batches=0, **settings).fit(model)
    model.last = [random.random(), np.random.rand(), float(torch.rand(()))]  # noqa: NPY002
    model.last += [model.draws.random(), float(torch.rand((), generator=model.own))]
    model.last += [logger.experiment.images]
    logged = [{key: v for key, v in m.items() if "/" not in key} for _, m in logger.records]
    model.last += [model.count, model.seen, model.late, [m for m in logged if m.keys() - {"epoch"}]]
    return model


@pytest.mark.parametrize(
    "callback",
    [
        lambda: lo.CurvatureMonitor(every_n_steps=1),
        lambda: lo.DataPipelineTuner(max_workers=0, verbose=False),
        lambda: lo.ActivationCheckpointing("auto", budget=0.9, strict=False, modules=["student"]),
        lambda: lo.MicroBatching("auto"),
        lambda: lo.Accumulation(),
    ],
    ids=["curved step", "pipeline tuner", "trial step", "split check", "check of the mean"],
)
@pytest.mark.filterwarnings("ignore:.*. each training_step changes")
@pytest.mark.filterwarnings("ignore:ActivationCheckpointing cannot meet")
def test_trial_steps_do_not_change_the_run(callback: Any) -> None:
    plain, tried = fit(), fit(callback())
    assert tried.last == plain.last
    assert_same_weights(tried, plain)


def test_parameters_of_all_hidden_modules_are_found() -> None:
    module = SmallNet()
    module.teachers = [nn.Linear(2, 2, bias=False), {"mean": nn.Linear(2, 2, bias=False)}]  # type: ignore[assignment]
    hidden = all_parameters(module).keys() - dict(module.named_parameters())
    assert hidden == {"teachers.0.weight", "teachers.1.mean.weight"}


@pytest.mark.parametrize("compiled", [False, True])
def test_written_parameters_are_restored(compiled: bool) -> None:
    class Trying(L.Callback):
        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, index: int) -> None:
            if compiled:
                module.student.compile(backend="eager")
            before = [p.detach().clone() for p in module.parameters()]
            written = WrittenParameters(module)
            for error in (None, None, ZeroDivisionError):
                try:
                    with without_side_effects(trainer, module, written):
                        module.training_step(batch, 0)
                        changed.append(not torch.equal(module.teacher.weight, before[2]))
                        if error:
                            raise error
                except ZeroDivisionError:
                    pass
                torch.testing.assert_close(list(module.parameters()), before, rtol=0, atol=0)
            assert "training_step" not in vars(module)
            step, rows, module.writes_batch = (
                TrialStep(trainer, module, batch, index),
                batch.clone(),
                True,
            )
            for _ in range(2):
                step.run()
                torch.testing.assert_close(list(module.parameters()), before, rtol=0, atol=0)
                assert torch.equal(batch, rows)

    changed: list[bool] = []
    fit(Trying(), max_steps=1)
    assert changed == [True] * 3


def test_no_optimizer_and_no_loss_scaler_steps_in_trials() -> None:
    class StepsBoth(AdversarialNet):
        def training_step(self, batch: Any, batch_idx: int) -> None:
            super().training_step(batch, batch_idx)
            for optimizer in self.optimizers(use_pl_optimizer=False):  # type: ignore[union-attr]
                optimizer.step()

    class Trying(L.Callback):
        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, index: int) -> None:
            for optimizer in trainer.optimizers:
                optimizer.register_step_post_hook(lambda *_: steps.append(index))
            TrialStep(trainer, module, batch, index).run()
            assert steps == []
            assert scaling.scaler.get_scale() == 1024.0  # type: ignore[union-attr]

    steps: list[int] = []
    scaling = loss_scaling(1024.0, growth_interval=1)
    trainer = quiet_trainer(callbacks=[Trying()], plugins=[scaling], limit_train_batches=1)
    trainer.fit(StepsBoth())
    assert steps


class Alternating(SmallNet):
    """Uses one of two heads by the number of its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.heads, self.calls = nn.ModuleList([nn.Linear(1, 1), nn.Linear(1, 1)]), 0

    def step(self, batch: Any) -> Tensor:
        self.calls += 1
        return self.heads[self.calls % 2](super().step(batch).view(1)).sum()


class TriesFirstStep(L.Callback):
    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 0:
            TrialStep(trainer, module, batch, batch_idx).run()


def train_under_ddp() -> None:
    def weights(model: type[SmallNet], *callbacks: Any, **settings: bool) -> dict[str, Tensor]:
        strategy = DDPStrategy(process_group_backend="gloo", **settings)
        trainer = quiet_trainer(callbacks=[*callbacks], devices=2, strategy=strategy, max_steps=4)
        torch.manual_seed(0)
        trainer.fit(net := model())
        return weights_of(net)

    tuner = lo.DataPipelineTuner(max_workers=0, verbose=False)
    expected = weights(SmallNet, static_graph=True)
    for callback in (lo.Accumulation(), tuner):
        assert_same_weights(weights(SmallNet, callback, static_graph=True), expected)
    for model in (TwoOptimizersNet, Alternating):
        expected = weights(model, find_unused_parameters=True)
        assert_same_weights(weights(model, TriesFirstStep(), find_unused_parameters=True), expected)


def test_trials_do_not_change_what_ddp_knows_about_parameters():
    launch(train_under_ddp)


def test_batch_that_cannot_be_copied_is_copied_in_parts():
    lock, rows = threading.Lock(), torch.ones(2, requires_grad=True) * 2
    copied = copy_batch({"lock": lock, "rows": [rows]})
    assert copied["lock"] is lock
    assert not copied["rows"][0].requires_grad
    assert torch.equal(copied["rows"][0], rows)
    assert copied["rows"][0].data_ptr() != rows.data_ptr()
    with pytest.raises(ValueError, match="holds a generator: the trial would use it up"):
        copy_batch({"rows": rows, "more": (row for row in rows)})
