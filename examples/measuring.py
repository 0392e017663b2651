"""Shared by the example scripts: a quiet Trainer, and a record of each step."""

from __future__ import annotations

import logging
import time
import warnings
from collections.abc import Sequence
from statistics import median
from typing import Any

import lightning as L
from torch import Tensor


class Record(L.Callback):
    """Records loss and time of each training batch.

    Attributes:
        losses: The loss of each batch.
        seconds: The time of each batch, including the optimizer's step.
    """

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.seconds: list[float] = []

    def on_train_batch_start(self, *_: Any) -> None:
        self._start = time.perf_counter()

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *_: Any) -> None:
        # This waits for the device. Lightning has divided the loss by the batches of the window.
        self.losses.append(float(outputs["loss"]) * trainer.accumulate_grad_batches)
        self.seconds.append(time.perf_counter() - self._start)

    def step_losses(self, batches: int = 1) -> list[float]:
        """Return the mean loss of each optimizer step of ``batches`` batches."""
        whole = len(self.losses) // batches * batches
        return [sum(self.losses[i : i + batches]) / batches for i in range(0, whole, batches)]

    def step_ms(self, batches: int = 1, skip: int = 3) -> float:
        """Return the median milliseconds of an optimizer step, without the first ``skip`` steps."""
        whole = len(self.seconds) // batches * batches
        steps = [sum(self.seconds[i : i + batches]) for i in range(0, whole, batches)]
        return 1e3 * median(steps[skip:] or steps)


def quiet_trainer(callbacks: Sequence[L.Callback] = (), **settings: Any) -> L.Trainer:
    """Return a Trainer on one device, by default without output, logger and checkpoints."""
    quiet: dict[str, Any] = {
        "accelerator": "auto",
        "devices": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_model_summary": False,
        "enable_progress_bar": False,
        "num_sanity_val_steps": 0,
        "log_every_n_steps": 1,
    }
    return L.Trainer(callbacks=list(callbacks), **(quiet | settings))


def largest_difference(losses: Sequence[float], reference: Sequence[float]) -> float:
    """Return the largest relative difference of two runs' losses, step by step."""
    return max(abs(a - b) / abs(b) for a, b in zip(losses, reference, strict=True))


def same_weights(first: L.LightningModule, second: L.LightningModule) -> bool:
    """Return whether all weights and buffers are bit-identical."""
    mine, others = first.state_dict(), second.state_dict()
    return mine.keys() == others.keys() and all(
        bool((value == others[name]).all()) for name, value in mine.items()
        if isinstance(value, Tensor)
    )  # fmt: skip


def silence_advice() -> None:
    """Silence Lightning's advice about the machine and toy data."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", message=".*does not have many workers")
    warnings.filterwarnings("ignore", message=".*LeafSpec", category=FutureWarning)
    warnings.filterwarnings("ignore", message=".*have no `val_dataloader`")
