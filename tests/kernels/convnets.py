"""Small convolutional modules and batches of images for them."""

from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader

STEPS = 4


def images_of(steps: int, seed: int = 0, ndim: int = 4) -> list[dict[str, Any]]:
    """Return samples with an image of three channels, a mask, tokens and a target."""
    generator = torch.Generator().manual_seed(seed)
    space = (6, 4, 2)[: ndim - 2]
    return [
        {
            "nested": [torch.randn(3, *space, generator=generator), (torch.ones(7, 2, 2),)],
            "tokens": torch.arange(5),
            "target": torch.randn(2, generator=generator),
        }
        for _ in range(2 * steps)
    ]


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
        image, _ = batch["nested"]
        last = {4: torch.channels_last, 5: torch.channels_last_3d}[self.ndim]
        assert batch["tokens"].is_contiguous()
        with torch.no_grad():
            out = self.net[0](image)
        layouts = [t.is_contiguous(memory_format=last) for t in (out, self.net[0].weight)]
        assert image.is_contiguous()
        self.seen.append((stage, *layouts))
        return nn.functional.mse_loss(self(image), batch["target"])

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.global_step == self.fail_at:
            raise ArithmeticError("planted")
        rank, ranks = self.global_rank, self.trainer.world_size
        if ranks > 1:
            image, (mask,) = batch["nested"]
            batch = {
                "nested": [image[rank::ranks], (mask[rank::ranks],)],
                "tokens": batch["tokens"],
                "target": batch["target"][rank::ranks],
            }
        return self.step(batch, "train")

    def validation_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.step(batch, "validate")

    def test_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.step(batch, "test")

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.step(batch, "predict")
        return self(batch["nested"][0])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        more = {"momentum": 0.9} if self.optimizer == "SGD" else {}
        return getattr(torch.optim, self.optimizer)(self.parameters(), lr=0.02, **more)

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(images_of(STEPS, ndim=self.ndim), batch_size=2)  # type: ignore[arg-type]

    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(images_of(1, seed=1, ndim=self.ndim), batch_size=2)  # type: ignore[arg-type]

    test_dataloader = predict_dataloader = val_dataloader
