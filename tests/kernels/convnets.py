"""Small convolutional modules and batches of images for them."""

from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

STEPS = 4


def images_of(steps: int, seed: int = 0, ndim: int = 4) -> DataLoader[Any]:
    """Return batches of two images with three channels, and their targets."""
    generator = torch.Generator().manual_seed(seed)
    space = (6, 4, 2)[: ndim - 2]
    images = torch.randn(2 * steps, 3, *space, generator=generator)
    targets = torch.randn(2 * steps, 2, generator=generator)
    return DataLoader(TensorDataset(images, targets), batch_size=2)


class ConvNet(LightningModule):
    """Convolutions with BatchNorm and Dropout.

    Attributes:
        seen: Stage, and whether the output and the weight of the first convolution are in
            channels_last.
    """

    def __init__(self, optimizer: str = "Adam", ndim: int = 4, fail_at: int | None = None) -> None:
        super().__init__()
        self.optimizer, self.ndim, self.fail_at = optimizer, ndim, fail_at
        self.seen: list[tuple[str, bool, bool]] = []
        generator_state = torch.get_rng_state()
        torch.manual_seed(1)
        conv, norm = {4: (nn.Conv2d, nn.BatchNorm2d), 5: (nn.Conv3d, nn.BatchNorm3d)}[ndim]
        self.net = nn.Sequential(
            conv(3, 6, 3, padding=1, bias=False), norm(6), nn.ReLU(),
            conv(6, 6, 1), nn.Tanh(), conv(6, 4, 3, padding=1), nn.Flatten(2),
        )  # fmt: skip
        # After the convolutions, since dropout draws in memory order.
        self.head = nn.Sequential(nn.Dropout(0.2), nn.Linear(4, 2))
        torch.set_rng_state(generator_state)

    def forward(self, image: Tensor) -> Tensor:
        return self.head(self.net(image).mean(2))

    def step(self, batch: Any, stage: str) -> Tensor:
        image, target = batch
        last = {4: torch.channels_last, 5: torch.channels_last_3d}[self.ndim]
        with torch.no_grad():
            out = self.net[0](image)
        layouts = [t.is_contiguous(memory_format=last) for t in (out, self.net[0].weight)]
        self.seen.append((stage, *layouts))
        return nn.functional.mse_loss(self(image), target)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.global_step == self.fail_at:
            raise ArithmeticError("planted")
        own = slice(self.global_rank, None, self.trainer.world_size)
        return self.step([part[own] for part in batch], "train")

    def validation_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.step(batch, "validate")

    def test_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.step(batch, "test")

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.step(batch, "predict")
        return self(batch[0])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        more = {"momentum": 0.9} if self.optimizer == "SGD" else {}
        return getattr(torch.optim, self.optimizer)(self.parameters(), lr=0.02, **more)

    def train_dataloader(self) -> DataLoader[Any]:
        return images_of(STEPS, ndim=self.ndim)

    def val_dataloader(self) -> DataLoader[Any]:
        return images_of(1, seed=1, ndim=self.ndim)

    test_dataloader = predict_dataloader = val_dataloader
