"""What the tuner wants to know from inside of a trial: model, first gradients, where weights go.

It travels into the process of a trial as a callback, and answers through a file.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch import Callback, seed_everything
from lightning.pytorch.profilers import PassThroughProfiler, Profiler
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from lightning_opt.core.measure.machine import available_cpus, why_no_bf16
from lightning_opt.core.measure.memory import MemoryLimits
from lightning_opt.core.modules.batches import UnsplittableBatchError, batch_length
from lightning_opt.core.modules.blocks import find_blocks
from lightning_opt.core.modules.compiling import has_compiled_parts
from lightning_opt.core.modules.sharding import local_part
from lightning_opt.gradients.gradient_callback import grad_scale, plain_name
from lightning_opt.kernels.channels_last.convolutions import Convolutions
from lightning_opt.profiling.steps.step_profiler import StepProfiler
from lightning_opt.tuner.account import account

if TYPE_CHECKING:
    import lightning.pytorch as pl

SAMPLED = 4096
"""Elements of each parameter that are looked at, evenly spaced."""

LOOKED_AT = 4
"""Updates of each optimizer whose gradients are kept."""

ACCOUNTED, SECONDS = 64, 2.0
"""Batches, or seconds and at least 8 batches, after which queues of loaders are empty or full."""


class TrialWatch(Callback):
    """Writes facts about the model, its first gradients, and how far its weights have moved.

    Args:
        file: Where to; it is replaced at each power of two of steps.
        reseed: Which other random numbers the model draws, from the first batch on; 0 for its own.

    A StepProfiler of the Trainer says where the first steps go, until that is steady.
    """

    def __init__(self, file: str = "watch.pt", reseed: int = 0) -> None:
        self._file, self._reseed = Path(file), reseed
        self._facts: dict[str, Any] = {}
        self._gradients: list[dict[str, Tensor]] = []
        self._moved: dict[int, dict[str, float]] = {}
        self._start: dict[str, Tensor] = {}
        self._updates: dict[int, int] = {}
        self._batches = 0
        self._begun = self._used = 0.0

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Look at the model before the first step."""
        self._start = {
            name: _sample(parameter)
            for name, parameter in _named(pl_module)
            if parameter.requires_grad and parameter.numel()
        }
        self._facts = describe(trainer, pl_module)

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Look at the first batch."""
        if self._batches == 0:
            if self._reseed:
                seed_everything(torch.initial_seed() % 2**31 + self._reseed, verbose=False)
            try:
                self._facts["samples"] = batch_length(batch)
            except UnsplittableBatchError:
                self._facts["samples"] = 0
            # Callbacks may have changed the loader since the start.
            self._facts["workers"] = getattr(trainer.train_dataloader, "num_workers", 0)
            self._begun, self._used = time.perf_counter(), time.process_time()

    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Optimizer
    ) -> None:
        """Keep samples of the first gradients."""
        update = self._updates[id(optimizer)] = self._updates.get(id(optimizer), -1) + 1
        if update >= LOOKED_AT:
            return
        while len(self._gradients) <= update:
            self._gradients.append({})
        scale = float(grad_scale(trainer, optimizer))
        held = {parameter for group in optimizer.param_groups for parameter in group["params"]}
        for name, parameter in _named(pl_module):
            if parameter in held and parameter.grad is not None and parameter.grad.numel():
                self._gradients[update][name] = _sample(parameter.grad).float() / scale

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
        if self._batches >= 2 and self._batches & (self._batches - 1) == 0:
            profiler: Profiler = trainer.profiler  # type: ignore[attr-defined]
            if isinstance(profiler, StepProfiler):
                self._account(trainer, profiler)
            self._moved[self._batches] = {
                name: float((_sample(parameter) - self._start[name]).float().norm())
                for name, parameter in _named(pl_module)
                if name in self._start
            }
            self._write()

    def _account(self, trainer: pl.Trainer, profiler: StepProfiler) -> None:
        """Say where the steps since the last time went, and end that when it is steady."""
        clock = profiler.measures("fit").clock
        done = self._batches >= ACCOUNTED or time.perf_counter() - self._begun > SECONDS
        steady = self._batches >= 8 and done
        if steady:
            profiler.teardown("fit")
            trainer.profiler = PassThroughProfiler()  # type: ignore[attr-defined]
            if clock.device is not None:
                clock.device.finish()  # waits for the device, once
        window, work = clock.end_window()
        found = account(clock, window, work.steps.count)
        used, self._used = time.process_time() - self._used, time.process_time()
        wall = sum(found.values()) * max(1, work.steps.count) * available_cpus()
        self._facts |= {
            "account": found,
            "busy": used / wall if wall else 0.0,
            "room": MemoryLimits(trainer.strategy.root_device).room(),
            "steady": steady,
        }

    def _write(self) -> None:
        content = {"facts": self._facts, "gradients": self._gradients, "moved": self._moved}
        partial = self._file.with_suffix(".partial")
        torch.save(content, partial)
        partial.replace(self._file)  # whoever reads sees the old or the new one, whole


def _named(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield parameters by the names that they have in a module which nothing wraps."""
    return ((plain_name(name), parameter) for name, parameter in module.named_parameters())


def _sample(values: Tensor) -> Tensor:
    local = local_part(values.detach())
    flat = (local.to_dense() if local.is_sparse else local).flatten()
    return flat[:: max(1, flat.numel() // SAMPLED)].cpu().clone()


def describe(trainer: pl.Trainer, module: pl.LightningModule) -> dict[str, Any]:
    """Return those of the ``Facts`` of the search space that are known at the start."""
    device = trainer.strategy.root_device
    fused = [
        all(group.get("fused") for group in optimizer.param_groups)
        for optimizer in trainer.optimizers
    ]
    return {
        "device": device.type,
        "no_bf16": why_no_bf16(device.type) or "",
        "threads": torch.get_num_threads(),
        "cpus": available_cpus(),
        "blocks": len(find_blocks(module)),
        "convolutions": Convolutions(module).count,
        "fused": bool(fused) and all(fused),
        "automatic": module.automatic_optimization,
        "loader": isinstance(trainer.train_dataloader, DataLoader),
        "eager": trainer.precision == "32-true" and not has_compiled_parts(module),
    }
