"""A quiet Trainer, records of what it logs, and a callback that records gradient norms."""

import functools
import inspect
import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from lightning.fabric.utilities import registry
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers.logger import Logger
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.strategies import FSDPStrategy
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.optim import Optimizer

# Otherwise each Trainer reads the metadata of every installed package.
registry.entry_points = functools.cache(registry.entry_points)


def _without_weights_only(fit: Callable[..., None]) -> Callable[..., None]:
    """Wrap a ``fit`` of older Lightning, which always loads whole checkpoints."""

    @functools.wraps(fit)
    def older(*args: Any, weights_only: bool | None = None, **settings: Any) -> None:
        fit(*args, **settings)

    return older


if "weights_only" not in inspect.signature(Trainer.fit).parameters:  # before Lightning 2.6
    Trainer.fit = _without_weights_only(Trainer.fit)  # type: ignore[method-assign]


def quiet_trainer(**settings: Any) -> Trainer:
    """Return a Trainer on one CPU process for one epoch, without output, logger or checkpoints.

    Args:
        settings: Trainer arguments; they replace the defaults above.
    """
    return Trainer(
        **{
            "accelerator": "cpu",
            "devices": 1,
            "max_epochs": 1,
            "logger": False,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "num_sanity_val_steps": 0,
            "log_every_n_steps": 1,
            "use_distributed_sampler": False,
            **settings,
        }
    )


def fit(model: LightningModule, *callbacks: Callback, **settings: Any) -> Trainer:
    """Train a model, and return its :func:`quiet_trainer`."""
    trainer = quiet_trainer(callbacks=list(callbacks), **settings)
    trainer.fit(model)
    return trainer


def loss_scaling(init_scale: float, growth_interval: int = 2000) -> MixedPrecision:
    """Return Lightning's plugin for float16 with a loss scaler, on a CPU."""
    scaler = torch.amp.GradScaler("cpu", init_scale=init_scale, growth_interval=growth_interval)
    return MixedPrecision("16-mixed", "cpu", scaler)


class FSDPOnCPU(FSDPStrategy):
    """Lightning's FSDP1 without its check for an accelerator."""

    def _setup_model(self, model: nn.Module) -> nn.Module:
        return FullyShardedDataParallel(
            model,
            sharding_strategy=self.sharding_strategy,
            mixed_precision=self.mixed_precision_config,
            device_id=torch.device("cpu"),
            **self.kwargs,
        )


def warnings_of(function: Callable[[], Any], words: str = "") -> tuple[Any, list[str]]:
    """Return the result of a function, and the texts of its warnings that contain ``words``."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = function()
    texts = [str(warning.message) for warning in caught]
    return result, [text for text in texts if words in text]


@contextmanager
def logged_warnings() -> Iterator[list[str]]:
    """Yield the warnings that lightning_opt logs in this process, where there is no caplog."""
    messages: list[str] = []
    handler, logger = logging.Handler(logging.WARNING), logging.getLogger("lightning_opt")
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    try:
        yield messages
    finally:
        logger.removeHandler(handler)


class MemoryLogger(Logger):
    """Keeps logged metrics in memory.

    Attributes:
        records: Step and metrics of each call.
        images: Names of the images.
    """

    def __init__(self) -> None:
        super().__init__()
        self.records: list[tuple[int | None, dict[str, float]]] = []
        self.images: list[str] = []

    @property
    def experiment(self) -> "MemoryLogger":
        return self

    def add_image(self, name: str, image: Any) -> None:
        self.images.append(name)

    @property
    def name(self) -> str:
        return "memory"

    @property
    def version(self) -> int:
        return 0

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        pass

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.records.append((step, dict(metrics)))

    def series(self, key: str) -> list[float]:
        return [metrics[key] for _, metrics in self.records if key in metrics]


class SaveAt(Callback):
    """Writes a checkpoint after an optimizer step, the first of which is 1."""

    def __init__(self, file: Any, step: int) -> None:
        self.file, self.step = file, step

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if trainer.global_step == self.step:
            trainer.save_checkpoint(self.file)


class LossScales(Callback):
    """Records the loss scale at the start and after each step."""

    def __init__(self) -> None:
        self.start, self.seen = 0.0, list[float]()

    def on_train_start(self, trainer: Any, *_: Any) -> None:
        self.start = trainer.precision_plugin.scaler.get_scale()

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self.seen.append(trainer.precision_plugin.scaler.get_scale())


class GradientSpy(Callback):
    """Records the total gradient norm of each optimizer's parameters in float64.

    Its position among the callbacks decides whether it sees gradients before or after another.

    Attributes:
        norms: One norm per step, by the optimizer's index.
    """

    def __init__(self) -> None:
        self.norms: dict[int, list[float]] = {}

    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer
    ) -> None:
        index = [id(own) for own in trainer.optimizers].index(id(optimizer))
        gradients = [
            parameter.grad.detach().double().flatten()
            for group in optimizer.param_groups
            for parameter in group["params"]
            if parameter.grad is not None
        ]
        self.norms.setdefault(index, []).append(torch.cat(gradients).norm().item())
