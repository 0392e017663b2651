"""Planted faults and harmless changes, as a trial's callback sees them in real trainings."""

import functools
import itertools
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lightning_opt as lo
from lightning_opt.tuner.trials.baseline import Observed
from lightning_opt.tuner.trials.numerics import compare_gradients, compare_losses, compare_paths
from lightning_opt.tuner.trials.probe import TrialWatch
from tests.helpers.trainers import quiet_trainer

STEPS = 8


class Images(nn.Sequential):
    """Convolutions with normalisation, and biases whose gradient is nothing but rounding."""

    def __init__(self, drop: float) -> None:
        super().__init__(
            nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(),
            nn.Conv2d(16, 16, 3, stride=2), nn.BatchNorm2d(16), nn.ReLU(),
            nn.Flatten(), nn.Dropout(drop), nn.Linear(144, 4),
        )  # fmt: skip


class Words(nn.Module):
    """A transformer, whose queries and keys have small gradients where much cancels."""

    def __init__(self, drop: float) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(16, 2, 32, drop, batch_first=True) for _ in range(2)
        )
        self.head = nn.Linear(16, 4)

    def forward(self, images: Tensor) -> Tensor:
        hidden = images.flatten(1)[:, :192].unflatten(1, (12, 16))
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden.mean(1))


class Task(LightningModule):
    def __init__(self, net: nn.Module, optimizer: type[torch.optim.Optimizer], warm: bool) -> None:
        super().__init__()
        self.net, self.optimizer, self.warm = net, optimizer, warm

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.seen = [*getattr(self, "seen", []), float(loss.detach())]
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = self.optimizer(self.parameters(), lr=1e-3)
        rate = (lambda step: step / 2000) if self.warm else (lambda step: 1.0)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class Planted(Callback):
    """Changes gradients."""

    def __init__(self, change: Callable[[str, Tensor], Tensor]) -> None:
        self.change = change

    def on_before_optimizer_step(self, trainer: Trainer, module: Any, optimizer: Any) -> None:
        for name, parameter in module.named_parameters():
            parameter.grad.copy_(self.change(name, parameter.grad))


def noise(values: Tensor) -> Tensor:
    return torch.randn_like(values) * values.square().mean().sqrt()


FAULTS = {
    "signs": lambda name, values: -values,
    "one layer": lambda name, values: noise(values) if LAYER(name) else values,
    "all": lambda name, values: noise(values),
}


def LAYER(name: str) -> bool:  # noqa: N802 - of either net
    return name.startswith(("net.3.", "net.blocks.0.linear1."))


def observe(
    folder: Path, net: Any, optimizer: Any, warm: bool, seed: int = 0, reseed: bool = False,
    **settings: Any,
) -> tuple[Observed, list[float]]:  # fmt: skip
    """Train for some steps, and return what a trial would have told."""
    seed_everything(seed, verbose=False)
    model = Task(net(), optimizer, warm)
    data = TensorDataset(torch.randn(STEPS * 16, 3, 8, 8), torch.randint(4, (STEPS * 16,)))
    watch = TrialWatch(str(folder / "watch.pt"), reseed)
    callbacks = [*settings.pop("callbacks", []), watch]
    steps = {"accelerator": "cpu", "max_steps": STEPS, "callbacks": callbacks}
    trainer = quiet_trainer(**{**steps, **settings})
    trainer.fit(model, DataLoader(data, batch_size=16))
    return Observed.read(folder / "watch.pt"), model.seen


@functools.cache
def usual(*task: Any, seed: int, reseed: bool = False) -> tuple[Observed, list[float]]:
    """Return what the baseline tells."""
    with tempfile.TemporaryDirectory() as folder:
        return observe(Path(folder), *task, seed=seed, reseed=reseed)


def verdict(folder: Path, *task: Any, seed: int = 0, reseed: bool = False, **settings: Any) -> str:
    """Return why a training with these settings is rejected; empty if it is not."""
    own, losses = observe(folder, *task, seed=seed, reseed=reseed, **settings)
    reference, expected = usual(*task, seed=seed)
    _, why = compare_gradients(own.gradients, reference.gradients)
    if why:
        spread, _ = usual(*task, seed=seed, reseed=True)
        _, why = compare_gradients(own.gradients, reference.gradients, spread.gradients)
    return why or compare_paths(own.moved, reference.moved) or compare_losses(losses, expected)


SEEDS = (0,)
NETS = (partial(Images, 0.0), partial(Words, 0.2))
TASKS = list(itertools.product(NETS, (torch.optim.SGD, torch.optim.AdamW), (False, True)))
TITLES = [f"{net.func.__name__} {rule.__name__} {warm}" for net, rule, warm in TASKS]


@pytest.mark.parametrize("task", TASKS, ids=TITLES)
def test_planted_faults_are_rejected(task: Any, tmp_path: Path) -> None:
    """Whatever the learning rate: from equal weights and batches gradients say it at once."""
    for (fault, change), seed in itertools.product(FAULTS.items(), SEEDS):
        why = verdict(tmp_path, *task, seed=seed, callbacks=[Planted(change)])
        assert "gradient" in why, fault


@pytest.mark.parametrize("task", TASKS, ids=TITLES)
def test_harmless_changes_are_accepted(task: Any, tmp_path: Path) -> None:
    changes: list[dict[str, Any]] = [{"precision": "bf16-mixed"}]
    if task[0].func is Images:
        changes.append({"callbacks": [lo.ChannelsLast()]})
    else:  # where the model draws random numbers, and does not normalise over a batch
        changes += [{"reseed": True}, {"callbacks": [lo.MicroBatching(size=8)]}]
    for change, seed in itertools.product(changes, SEEDS):
        assert verdict(tmp_path, *task, seed=seed, **change) == "", change


def test_what_it_tells(tmp_path: Path) -> None:
    observed, _ = observe(tmp_path, partial(Images, 0.0), torch.optim.AdamW, False)
    facts = observed.facts
    assert (facts.device, facts.convolutions, facts.samples, facts.fused) == ("cpu", 2, 16, False)
    assert facts.loader
    assert facts.automatic
    assert facts.share("forward") is None, "nothing measured it"
    assert sorted(observed.moved) == [2, 4, 8]
    assert len(observed.gradients) == 4
    assert all(distance > 0 for distance in observed.moved[8].values())


def test_wrappers_leave_the_names_as_they_are(tmp_path: Path) -> None:
    """What compiles or wraps a part of the model puts a name of its own between."""

    def wrapped() -> nn.Module:
        net = Images(0.0)
        net[0] = torch.compile(net[0], backend="eager")
        return net

    own, _ = observe(tmp_path, wrapped, torch.optim.SGD, False)
    reference, _ = usual(partial(Images, 0.0), torch.optim.SGD, False, seed=0)
    assert own.gradients[0].keys() == reference.gradients[0].keys()
    assert own.moved[8].keys() == reference.moved[8].keys()
    assert compare_gradients(own.gradients, reference.gradients)[1] == ""


def test_a_profiler_says_where_the_steps_go_until_that_is_steady(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lightning_opt.tuner.trials.probe.SECONDS", 0.0)
    profiler = lo.StepProfiler(log_every_n_steps=0, flops=False, print_table=False)
    seen: list[bool] = []

    class Look(Callback):
        def on_train_batch_start(self, trainer: Trainer, *rest: Any) -> None:
            seen.append(trainer.profiler is profiler)  # type: ignore[attr-defined]

    observed, losses = observe(
        tmp_path, partial(Images, 0.0), torch.optim.AdamW, False, profiler=profiler,
        callbacks=[Look()], max_steps=12, max_epochs=2,
    )  # fmt: skip
    facts = observed.facts
    assert seen == [True] * 8 + [False] * 4, "the steps that are timed run without it"
    assert facts.steady
    assert min(facts.account[name] for name in ("forward", "backward", "optimizer")) > 0
    assert facts.room > 0
    bare = usual(partial(Images, 0.0), torch.optim.AdamW, False, seed=0)[1]
    assert losses[: len(bare)] == bare
