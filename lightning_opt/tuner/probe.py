"""A callback in a trial's process that records facts, gradients and distances for the tuner."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.utils._pytree import tree_flatten

from lightning_opt.core.measure.machine import available_cpus, why_no_bf16
from lightning_opt.core.modules.batches import samples_in
from lightning_opt.core.modules.blocks import find_blocks
from lightning_opt.core.modules.sharding import local_part
from lightning_opt.gradients.gradient_callback import grad_scale, plain_name
from lightning_opt.kernels.channels_last.channels_last import Convolutions
from lightning_opt.trainer.lightning import BaseCallback, seed_everything

if TYPE_CHECKING:
    import lightning.pytorch as pl

MAX_ELEMENTS = 4096
"""Approximate number of elements recorded per parameter. They are evenly spaced."""

COMPARED_UPDATES = 4
"""Number of updates of each optimizer whose gradients are recorded."""


@dataclass(frozen=True)
class Facts:
    """Facts measured in the process of the baseline.

    Attributes:
        device: ``"cpu"``, ``"cuda"`` or another type of device.
        why_no_bf16: The reason why bfloat16 is slow on the device; empty if it is fast.
        threads: Number of threads that torch uses.
        cpus: Number of CPUs that this process may use.
        blocks: Number of repeated blocks in the model.
        convolutions: Number of 2D and 3D convolutions.
        samples: Number of samples in a batch.
        workers: Number of workers of the loader, or the largest number of several loaders.
    """

    device: str = "cpu"
    why_no_bf16: str = ""
    threads: int = 1
    cpus: int = 1
    blocks: int = 0
    convolutions: int = 0
    samples: int = 0
    workers: int = 0


@dataclass
class Observations:
    """The records of a TrialWatch, and the losses of its run.

    Attributes:
        facts: Facts about the model and the machine.
        gradients: For each of the first updates, sampled elements of each parameter's gradient.
        moved: For each number of steps, the distance of each parameter from its initial value.
        losses: The loss of each step.
    """

    facts: Facts = field(default_factory=Facts)
    gradients: list[dict[str, Tensor]] = field(default_factory=list)
    moved: dict[int, dict[str, float]] = field(default_factory=dict)
    losses: Sequence[float] = ()

    @classmethod
    def read(cls, file: Path, losses: Sequence[float] = ()) -> Observations:
        """Read the file of a TrialWatch. Observations are empty if the file does not exist."""
        if not file.exists():
            return cls()
        content = torch.load(file, weights_only=True)
        return cls(Facts(**content["facts"]), content["gradients"], content["moved"], losses)


class TrialWatch(BaseCallback):
    """Records facts about a run, its first gradients and how far its weights move.

    Args:
        file: The file, written by rank 0 after 2, 4, 8, 16, ... steps.
        reseed: Number added to the random seed at the first batch.
    """

    def __init__(self, file: str | Path, reseed: int = 0) -> None:
        self._file, self._reseed = Path(file), reseed
        self._facts: dict[str, Any] = {}
        self._gradients: list[dict[str, Tensor]] = []
        self._moved: dict[int, dict[str, float]] = {}
        self._initial: dict[str, Tensor] = {}
        self._updates: dict[int, int] = {}
        self._batches = 0

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._initial = {
            name: _sample(parameter)
            for name, parameter in _named_parameters(pl_module)
            if parameter.requires_grad and not is_lazy(parameter) and parameter.numel()
        }
        device = trainer.strategy.root_device.type
        self._facts = {
            "device": device,
            "why_no_bf16": why_no_bf16(device) or "",
            "threads": torch.get_num_threads(),
            "cpus": available_cpus(),
            "blocks": len(find_blocks(pl_module)),
            "convolutions": Convolutions(pl_module).count,
        }

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if self._batches == 0:
            if self._reseed:
                seed_everything(torch.initial_seed() % 2**31 + self._reseed, verbose=False)
            self._facts["samples"] = samples_in(batch, default=0)
            # Callbacks may have changed the loader since the start.
            loaders, _ = tree_flatten(trainer.train_dataloader)
            self._facts["workers"] = max(getattr(loader, "num_workers", 0) for loader in loaders)

    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Optimizer
    ) -> None:
        update = self._updates[id(optimizer)] = self._updates.get(id(optimizer), -1) + 1
        if update >= COMPARED_UPDATES:
            return
        while len(self._gradients) <= update:
            self._gradients.append({})
        scale = float(grad_scale(trainer, optimizer))
        own = {parameter for group in optimizer.param_groups for parameter in group["params"]}
        for name, parameter in _named_parameters(pl_module):
            if parameter in own and parameter.grad is not None and parameter.grad.numel():
                self._gradients[update][name] = _sample(parameter.grad).float() / scale

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any, **kwargs: Any
    ) -> None:
        self._batches += 1
        if self._batches >= 2 and self._batches & (self._batches - 1) == 0:
            self._moved[self._batches] = {
                name: float((_sample(parameter) - self._initial[name]).float().norm())
                for name, parameter in _named_parameters(pl_module)
                if name in self._initial
            }
            if trainer.is_global_zero:
                content = {"facts": self._facts, "gradients": self._gradients, "moved": self._moved}
                unfinished = self._file.with_suffix(".unfinished")
                torch.save(content, unfinished)
                unfinished.replace(self._file)  # so the tuner never reads a partial file


def _named_parameters(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    return ((plain_name(name), parameter) for name, parameter in module.named_parameters())


def _sample(values: Tensor) -> Tensor:
    """Copy evenly spaced elements of this process's part to the CPU."""
    local = local_part(values.detach())
    flat = (local.to_dense() if local.is_sparse else local).flatten()
    return flat[:: max(1, flat.numel() // MAX_ELEMENTS)].cpu().clone()
