"""Models of several benchmarks."""

from __future__ import annotations

import warnings
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader


class Regression(L.LightningModule):
    """Any network, trained to return zero."""

    def __init__(self, network: nn.Module, batch: Tensor, fused: bool | None = None) -> None:
        super().__init__()
        self.network, self.batch, self.fused = network, batch, fused

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.network(batch).float().square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-4, fused=self.fused)


def forty_tensor_mlp(device: str = "cpu") -> Regression:
    """Twenty linear layers of 64: 40 tensors, about 0.8 ms per step on one thread."""
    layers = [layer for _ in range(20) for layer in (nn.Linear(64, 64), nn.ReLU())]
    return Regression(nn.Sequential(*layers), torch.randn(32, 64, device=device)).to(device)


def ten_million_transformer(device: str = "cpu") -> Regression:
    """Three encoder layers of width 512: 9.5 million parameters, 36 tensors."""
    layer = nn.TransformerEncoderLayer(
        512, 8, 2048, dropout=0.0, batch_first=True, norm_first=True, activation="gelu"
    )
    encoder = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
    return Regression(encoder, torch.randn(4, 64, 512, device=device)).to(device)


def quiet_trainer(device: str = "cpu", **settings: Any) -> L.Trainer:
    """Return a Trainer of one process that prints, logs and saves nothing."""
    return L.Trainer(
        **{
            "accelerator": "gpu" if device.startswith("cuda") else "cpu",
            "devices": 1,
            "logger": False,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            **settings,
        }
    )


def fit_two_steps(module: Regression, device: str) -> L.Trainer:
    """Train for two steps, which creates the optimizer state, and return the Trainer."""
    trainer = quiet_trainer(device, max_steps=2)
    batch = module.batch.cpu()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(module, DataLoader(torch.cat([batch, batch]), batch_size=len(batch)))
    # Lightning has moved the module and the state of its optimizer to the CPU.
    module.to(device)
    module.batch = module.batch.to(device)
    trainer.optimizers[0].load_state_dict(trainer.optimizers[0].state_dict())
    return trainer
