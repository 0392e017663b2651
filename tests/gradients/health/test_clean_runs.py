"""Trainings without a fault: none has a critical issue."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_opt import AdaptiveClipping, GradientHealth
from tests.gradients.health.test_faults import Classifier, mlp
from tests.helpers.models import AdversarialNet
from tests.helpers.trainers import fit, loss_scaling

functional = nn.functional
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
        optimizer: Callable[..., Any] = torch.optim.AdamW,
        **settings: Any,
    ) -> None:
        super().__init__()
        self.net, self.data = net, data
        self.optimizer, self.settings = optimizer, {"lr": 1e-3, **settings}

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        logits = self.net(batch[0])
        return functional.cross_entropy(logits.flatten(0, -2), batch[1].flatten())

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
        return x + self.norm(self.convolution(functional.relu(x)))


def convnet() -> nn.Module:
    stem = [nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()]
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 4)]
    return nn.Sequential(*stem, *(Residual(16) for _ in range(4)), *head)


def with_frozen_layers() -> nn.Module:
    net = mlp(3, width=32)
    for parameter in net[:4].parameters():
        parameter.requires_grad_(False)
    return net


TRAININGS: dict[str, Callable[[], tuple[LightningModule, dict[str, Any]]]] = {
    "transformer": lambda: (Task(transformer(), tokens), {}),
    "convnet": lambda: (Task(convnet(), images, torch.optim.SGD, lr=0.1, momentum=0.9), {}),
    "gan": lambda: (AdversarialNet(), {}),
    "a mask": lambda: (
        Classifier(nn.Sequential(mlp(2), nn.ConstantPad1d((0, 1), float("-inf")))),
        {},
    ),
    "frozen layers": lambda: (Classifier(with_frozen_layers()), {}),
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
