"""Faults in real trainings are reported with type and place; clean trainings have no issue."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, TensorDataset

from lightning_opt import AdaptiveClipping, GradientHealth
from tests.helpers.models import AdversarialNet, ResumableLoader
from tests.helpers.trainers import fit, loss_scaling, quiet_trainer

FEATURES, CLASSES, WIDTH = 8, 4, 16


class Classifier(LightningModule):
    def __init__(self, net: nn.Module, lr: float = 1e-3, rows: int = 960) -> None:
        super().__init__()
        self.net, self.lr, self.rows = net, lr, rows

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=self.lr)

    def train_dataloader(self) -> Any:
        generator = torch.Generator().manual_seed(0)
        inputs = torch.randn(self.rows, FEATURES, generator=generator)
        targets = (inputs @ torch.randn(FEATURES, CLASSES, generator=generator)).argmax(1)
        return ResumableLoader(TensorDataset(inputs, targets), batch_size=16)


def mlp(depth: int, activation: type[nn.Module] = nn.ReLU, width: int = WIDTH) -> nn.Sequential:
    """Return a network with linear layers ``0``, ``2``, ..., ``2 * depth``."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for fan_in in (FEATURES, *[width] * (depth - 1)):
        layers += [nn.Linear(fan_in, width), activation()]
    return nn.Sequential(*layers, nn.Linear(width, CLASSES))


def train(
    model: LightningModule, steps: int = 40, every: int = 10, plugins: Any = None, **settings: Any
) -> GradientHealth:
    health = GradientHealth(every_n_steps=every, **settings)
    fit(model, health, AdaptiveClipping(), max_steps=steps, max_epochs=-1, plugins=plugins)
    return health


def issue_of(health: GradientHealth, kind: str) -> Any:
    found = [issue for issue in health.issues if issue.type == kind]
    assert len(found) == 1, f"{kind} is not among {[str(issue) for issue in health.issues]}"
    return found[0]


class Log(nn.Module):
    """A layer with a logarithm, of negative numbers in one batch."""

    def __init__(self, bad_call: int) -> None:
        super().__init__()
        self.calls, self.bad_call = -1, bad_call

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x + (x - 1e3 if self.calls == self.bad_call else x.abs() + 1).log()


def test_nan_in_a_module_is_reported_with_module_and_batch(path):
    net = mlp(3)
    net.insert(4, Log(bad_call=23))
    health = train(Classifier(net), steps=30, activations=True)
    issue = issue_of(health, "nan")
    assert (issue.severity, issue.place) == ("critical", "net.4")
    assert "epoch 0, batch 23" in issue.detail
    assert health.summary().status == "critical"
    assert not any(module._forward_hooks for module in net.modules())
    net[4] = Log(bad_call=23)
    health = train(Classifier(net), steps=25, activations=True)  # ends before a report
    broken = mlp(3)
    nn.init.constant_(broken[6].bias, math.nan)
    quiet_trainer(callbacks=[health], max_steps=10).fit(Classifier(broken))
    assert issue_of(health, "nan").place == "net.6"


def test_nan_between_modules_is_reported_at_the_next_module(path):
    class Inside(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = mlp(2), nn.Linear(CLASSES, CLASSES)

        def forward(self, x: Tensor) -> Tensor:
            return self.head((self.body(x) - 1e3).log())

    issue = issue_of(train(Classifier(Inside()), steps=20, activations=True), "nan")
    assert issue.place == "net.head"
    assert "entered it from code between modules" in issue.detail


def test_nan_in_the_backward_pass_is_reported_at_the_layer_nearest_to_the_loss(path):
    class Root(nn.Module):
        """Finite outputs, but the gradient of a root at zero times zero is NaN in one batch."""

        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return x + (0 * x).sqrt() if self.calls == 10 else x

    net = mlp(4)
    net.insert(5, Root())  # linear layers: 0, 2, 4, then 7 and 9
    issue = issue_of(train(Classifier(net), steps=10, every=5), "nan")
    assert issue.place == "net.4"
    assert "3 of 5 layers" in issue.detail


def test_nonfinite_step_between_reports_is_reported(path):
    class Once(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = super().training_step(batch, batch_idx)
            return loss * math.nan if batch_idx == 6 else loss

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            for parameter in self.parameters():  # as a guard would
                parameter.grad.nan_to_num_(0, 0, 0)

    health = train(Once(mlp(2)), steps=10, every=10)
    assert health.state_dict()["0"]["nonfinite"] == 1
    assert "at step 7" in issue_of(health, "nan").detail
    health = train(Once(mlp(2)), steps=8, every=5)
    assert "at step 7" in issue_of(health, "nan").detail
    health = train(Once(mlp(2)), steps=60, every=10)
    assert not [issue for issue in health.issues if issue.severity == "critical"]
    assert str(health.summary()).startswith("warning: no issue now, but 1 of 60 steps")
    assert health.diagnose()[0].state == "look"


def test_dead_relu_layer_is_critical():
    net = mlp(5)
    with torch.no_grad():
        net[4].bias.fill_(-1e4)
    health = train(Classifier(net))
    issue = issue_of(health, "dead")
    assert (issue.severity, issue.place) == ("critical", "net.4")
    assert issue.others == ("net.0", "net.2")
    assert "vanishing" not in {found.type for found in health.issues}


def test_deep_sigmoid_network_has_vanishing_gradients():
    health = train(Classifier(mlp(30, nn.Sigmoid, 32)))
    issue = issue_of(health, "vanishing")
    assert issue.severity == "critical"
    affected = {issue.place, *issue.others}
    assert {"net.0", "net.2", "net.20"} <= affected
    assert not {"net.56", "net.58", "net.60"} & affected
    assert "dead" not in {found.type for found in health.issues}


def test_gradients_whose_squares_underflow_are_vanishing_not_dead():
    """Norms of gradients below 1e-23 are zero in float32, but the gradients are not."""
    net = mlp(4)
    net.insert(4, Scale(1e-30))
    issue = issue_of(train(Classifier(net)), "vanishing")
    assert {issue.place, *issue.others} == {"net.0", "net.2", "net.5"}


class Scale(nn.Module):
    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        return self.factor * x


def test_gradients_that_grow_with_depth_are_exploding():
    net = mlp(20)
    with torch.no_grad():
        for layer in net[2:-1:2]:
            layer.weight.mul_(8)
    health = train(Classifier(net), steps=20)
    issue = issue_of(health, "exploding")
    assert issue.severity == "critical"
    assert issue.place in {"net.0", "net.2", "net.4"}


def test_gradients_that_grow_over_time_are_exploding():
    class Grows(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return super().training_step(batch, batch_idx) * 1.3**batch_idx

    assert not train(Grows(mlp(3)), steps=10).issues
    assert issue_of(train(Grows(mlp(3)), steps=40), "exploding").severity == "critical"


def test_drop_between_two_layers_is_a_bottleneck():
    net = mlp(8)
    net.insert(8, Scale(1e-4))  # after the linear layer 6; the next one is now 9
    assert issue_of(train(Classifier(net)), "bottleneck").place == "net.9"


def test_parameters_without_gradient_are_stale_not_dead():
    class Partly(Classifier):
        def __init__(self) -> None:
            super().__init__(mlp(3))
            self.unused, self.dropped = nn.Linear(3, 3), nn.Linear(FEATURES, CLASSES)
            self.net[0].requires_grad_(False)

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            logits = self.net(batch[0])
            if self.global_step < 15:
                logits = logits + self.dropped(batch[0])
            return nn.functional.cross_entropy(logits, batch[1])

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1e-3)

    health = train(Partly())
    issue = issue_of(health, "stale")
    assert {issue.place, *issue.others} == {"unused", "dropped"}
    assert "(weight, bias)" in issue.detail
    states = {row["layer"]: row["state"] for row in health.report(top=None).rows}
    assert states["net.0"] == "frozen"
    assert states["unused"] == states["dropped"] == "stale"
    assert [found.type for found in health.issues] == ["stale"]
    assert health.summary().status == "warning"


@pytest.mark.parametrize("fused", [False, True])
def test_loss_scaler_overflows_are_counted_but_no_issue(fused):
    class Scaled(Classifier):
        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1e-3, fused=fused)

    health = train(Scaled(mlp(3)), plugins=loss_scaling(2.0**24))
    assert health.state_dict()["0"]["overflows"] > 3
    assert health.state_dict()["0"]["nonfinite"] == 0
    assert not [issue for issue in health.issues if issue.severity == "critical"]


def test_nan_at_every_loss_scale_is_an_issue_even_if_the_run_is_resumed(tmp_path):
    """That is, after 20 steps in a row."""
    net = mlp(2)
    with torch.no_grad():
        net[2].weight[0, 0] = math.nan
    last = None
    for steps, severities in ((15, []), (25, ["critical"])):
        health = GradientHealth(every_n_steps=5)
        trainer = quiet_trainer(
            callbacks=[health], max_steps=steps, max_epochs=-1, plugins=loss_scaling(2.0**16)
        )
        trainer.fit(Classifier(net), ckpt_path=last, weights_only=True)
        assert [issue.severity for issue in health.issues] == severities
        last = tmp_path / f"{steps}.ckpt"
        trainer.save_checkpoint(last)


# --- trainings without a fault --------------------------------------------------------------------

STEPS, EVERY = 60, 10


def images(rows: int = 256) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(0, 4, (rows,), generator=generator)
    pattern = torch.randn(4, 3, 8, 8, generator=generator)
    return pattern[labels] + torch.randn(rows, 3, 8, 8, generator=generator), labels


def tokens(rows: int = 256, length: int = 16, vocabulary: int = 500) -> tuple[Tensor, Tensor]:
    """Return sequences that count upwards; each batch contains few words of the vocabulary."""
    generator = torch.Generator().manual_seed(0)
    start = torch.randint(0, vocabulary, (rows, 1), generator=generator)
    sequence = (start + torch.arange(length + 1)) % vocabulary
    return sequence[:, :-1], sequence[:, 1:]


class Task(LightningModule):
    def __init__(
        self,
        net: nn.Module,
        data: Callable[[], tuple[Tensor, Tensor]],
        optimizer: type[Optimizer] = torch.optim.AdamW,
        **settings: Any,
    ) -> None:
        super().__init__()
        self.net, self.data = net, data
        self.optimizer, self.settings = optimizer, {"lr": 1e-3, **settings}

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        logits = self.net(batch[0])
        return nn.functional.cross_entropy(logits.flatten(0, -2), batch[1].flatten())

    def configure_optimizers(self) -> Any:
        return self.optimizer(self.parameters(), **self.settings)

    def train_dataloader(self) -> Any:
        return DataLoader(TensorDataset(*self.data()), batch_size=16)


def transformer(vocabulary: int = 500, width: int = 32) -> nn.Module:
    layer = nn.TransformerEncoderLayer(
        width, 4, 2 * width, dropout=0.0, batch_first=True, norm_first=True
    )
    body = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
    head = [nn.LayerNorm(width), nn.Linear(width, vocabulary)]
    return nn.Sequential(nn.Embedding(vocabulary, width), body, *head)


class Residual(nn.Module):
    """A ConvNet block; the convolution's bias before BatchNorm has almost no gradient."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(width, width, 3, padding=1)
        self.norm = nn.BatchNorm2d(width)
        nn.init.zeros_(self.norm.weight)  # as in ResNet: the branch starts at zero

    def forward(self, x: Tensor) -> Tensor:
        return x + self.norm(self.convolution(nn.functional.relu(x)))


def convnet() -> nn.Module:
    stem = [nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()]
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 4)]
    return nn.Sequential(*stem, *(Residual(16) for _ in range(4)), *head)


TRAININGS: dict[str, Callable[[], tuple[LightningModule, dict[str, Any]]]] = {
    "transformer": lambda: (Task(transformer(), tokens), {}),
    "convnet": lambda: (Task(convnet(), images, torch.optim.SGD, lr=0.1, momentum=0.9), {}),
    "gan": lambda: (AdversarialNet(), {}),
    "a mask": lambda: (
        Classifier(nn.Sequential(mlp(2), nn.ConstantPad1d((0, 1), float("-inf")))),
        {},
    ),
    "fp16 with a loss scaler": lambda: (
        Classifier(mlp(2, width=32)),
        {"plugins": loss_scaling(2.0**24, growth_interval=20)},
    ),
    "a model that converges": lambda: (
        Classifier(mlp(2, width=64), lr=3e-2, rows=16),
        {"max_steps": 2 * STEPS},
    ),
}


@pytest.mark.parametrize("kind", TRAININGS)
def test_clean_training_has_no_critical_issue(kind):
    torch.manual_seed(0)
    model, settings = TRAININGS[kind]()
    health = GradientHealth(every_n_steps=EVERY, activations=True)
    seen: list[str] = []

    class Collect(Callback):
        def on_train_batch_end(self, *args: Any) -> None:
            seen.extend(str(issue) for issue in health.issues)

    settings = {"max_steps": STEPS, "max_epochs": -1, **settings}
    fit(model, health, AdaptiveClipping(), Collect(), **settings)
    assert not [issue for issue in seen if "[critical]" in issue], set(seen)
    assert health.state_dict()["0"]["reported_step"]
    assert health.summary().status == "healthy"
