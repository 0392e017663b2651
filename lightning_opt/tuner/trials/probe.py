"""What the tuner wants to know from inside of a trial: about the model, and what its updates move.

It travels into the process of a trial as a callback, and answers through a file.
"""

from __future__ import annotations

import json
import statistics
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch import Callback
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_opt.core.blocks import find_blocks
from lightning_opt.core.cpus import available_cpus
from lightning_opt.core.splitting import UnsplittableBatchError, batch_length

if TYPE_CHECKING:
    import lightning.pytorch as pl

SAMPLED = 1024
"""Elements of each parameter that are looked at, evenly spaced."""


class TrialWatch(Callback):
    """Writes facts about the model at the start, and at powers of two of steps what has moved.

    Args:
        file: Where to; a JSON object that is replaced each time.
    """

    def __init__(self, file: str = "watch.json") -> None:
        self._file = Path(file)
        self._facts: dict[str, Any] = {}
        self._start: dict[str, Tensor] = {}
        self._batches = 0
        self._begun, self._ended = 0.0, 0.0
        self._waits: list[float] = []
        self._busy: list[float] = []

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Write what is known before the first step."""
        self._start = {
            name: _sample(parameter)
            for name, parameter in pl_module.named_parameters()
            if parameter.requires_grad and parameter.numel()
        }
        self._facts = describe(trainer, pl_module)
        self._write()

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Read the clock: waiting for data ends here."""
        self._begun = time.perf_counter()
        if self._batches == 0:
            try:
                self._facts["samples"] = batch_length(batch)
            except UnsplittableBatchError:
                self._facts["samples"] = 0
        else:
            self._waits.append(self._begun - self._ended)

    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Write, at powers of two from the second batch on."""
        self._batches += 1
        self._busy.append(time.perf_counter() - self._begun)
        if self._waits and self._batches & (self._batches - 1) == 0:
            # Medians: between blocks of steps the trial also waits for its turn.
            wait, busy = statistics.median(self._waits), statistics.median(self._busy)
            self._facts["wait"] = wait / (wait + busy)
            self._facts.setdefault("moved", {})[str(self._batches)] = [
                name
                for name, parameter in pl_module.named_parameters()
                if name in self._start and not torch.equal(_sample(parameter), self._start[name])
            ]
            self._write()
            del self._waits[:], self._busy[:]
        self._ended = time.perf_counter()

    def _write(self) -> None:
        partial = self._file.with_suffix(".partial")
        partial.write_text(json.dumps(self._facts))
        partial.replace(self._file)  # whoever reads sees the old or the new one, whole


def _sample(parameter: Tensor) -> Tensor:
    local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
    flat = local.detach().flatten()
    return flat[:: max(1, flat.numel() // SAMPLED)].cpu().clone()


def describe(trainer: pl.Trainer, module: pl.LightningModule) -> dict[str, Any]:
    """Return those of the ``Facts`` of the search space that are known at the start."""
    device = trainer.strategy.root_device
    loader = trainer.train_dataloader
    fused = [
        all(group.get("fused") for group in optimizer.param_groups)
        for optimizer in trainer.optimizers
    ]
    convolutions = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose2d, nn.ConvTranspose3d)
    return {
        "device": device.type,
        "device_name": _device_name(device),
        "bf16": device.type != "cuda" or torch.cuda.is_bf16_supported(including_emulation=False),
        "threads": torch.get_num_threads(),
        "cpus": available_cpus(),
        "blocks": len(find_blocks(module)),
        "convolutions": sum(isinstance(part, convolutions) for part in module.modules()),
        "optimizers": [type(optimizer).__name__ for optimizer in trainer.optimizers],
        "fused": bool(fused) and all(fused),
        "automatic": module.automatic_optimization,
        "loader": isinstance(loader, DataLoader),
    }


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
