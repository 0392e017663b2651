"""A model with state that a repeated step would change, and backends that fail on purpose."""

import copy
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.backends.debugging import aot_eager
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric

from tests.helpers.models import assert_same_weights, loader_of, weights_of
from tests.helpers.trainers import MemoryLogger, quiet_trainer, warnings_of

QUIET = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning:torch"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
]
"""Warnings of torch's compiler."""


class Block(nn.Module):
    """Draws random numbers and writes buffers."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(width, width), nn.BatchNorm1d(width)
        self.dropout = nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(torch.tanh(self.norm(self.linear(x))))


class Net(LightningModule):
    """Equal blocks; a metric, logged values and a counter."""

    def __init__(self, blocks: int = 2, steps: int = 4, batch_size: int = 4) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.stem = nn.Linear(6, 6)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.head = nn.Linear(6, 1)
        self.mean = MeanMetric()
        self.steps, self.batch_size, self.calls = steps, batch_size, 0

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.calls += 1
        loss = nn.functional.mse_loss(self(batch[0]), batch[1])
        self.mean(loss.detach())
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        self.log("mean", self.mean)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", nn.functional.mse_loss(self(batch[0]), batch[1]), sync_dist=True)

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self(batch[0])

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)

    def train_dataloader(self) -> DataLoader[Any]:
        return loader_of(self.steps, self.batch_size)

    def val_dataloader(self) -> DataLoader[Any]:
        return loader_of(2, self.batch_size, seed=1)

    predict_dataloader = test_dataloader = val_dataloader
    test_step = validation_step


class Breaking(Net):
    """Two graphs, with random numbers and buffers in both."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[0](x)
        torch._dynamo.graph_break()
        return self.head(self.blocks[1](x))


class Varying(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step([part[: 2 + batch_idx] for part in batch], batch_idx)


def train(*callbacks: Callback, model: Any = None, **settings: Any) -> dict[str, Any]:
    """Train from one seed and return everything that compilation must not change."""
    model = Net() if model is None else model
    logger = MemoryLogger()
    torch.manual_seed(2)
    trainer = quiet_trainer(
        callbacks=list(callbacks), logger=logger, **{"max_epochs": 2, **settings}
    )
    trainer.fit(model)
    records = [
        (step, {k: v for k, v in metrics.items() if "/" not in k})
        for step, metrics in logger.records
    ]
    progress = copy.deepcopy(trainer.fit_loop.epoch_loop.automatic_optimization.optim_progress)
    records = [(step, m) for step, m in records if m.keys() - {"epoch"}]
    return {
        "weights": weights_of(model),
        "drawn": torch.rand(3),
        "logged": records,
        "calls": getattr(model, "calls", None),
        "steps": trainer.global_step,
        "progress": progress.state_dict(),
        "logger": logger,
        "model": model,
    }


def assert_same(actual: dict[str, Any], expected: dict[str, Any], **tolerance: float) -> None:
    """Compare two runs, bit by bit unless tolerances are given."""
    assert_same_weights(actual["weights"], expected["weights"], **tolerance)
    exact = {"rtol": 0.0, "atol": 0.0, **tolerance}
    for (step, metrics), (other_step, other) in zip(
        actual["logged"], expected["logged"], strict=True
    ):
        assert step == other_step
        torch.testing.assert_close(metrics, other, **exact)
    torch.testing.assert_close(actual["drawn"], expected["drawn"], rtol=0, atol=0)
    for name in ("calls", "steps", "progress"):
        assert actual[name] == expected[name], name


messages_of = partial(warnings_of, words="CompileModel: ")


# --- backends -----------------------------------------------------------------------------------


def fails(graph: Any, inputs: Any) -> Any:
    raise RuntimeError("planted in the compiler")


def fails_in_backward(graph: Any, inputs: Any) -> Any:
    return aot_autograd(fw_compiler=_unchanged, bw_compiler=fails)(graph, inputs)


def breaks_in_backward(graph: Any, inputs: Any) -> Any:
    """Compile both graphs; the backward one raises when it runs."""
    return aot_autograd(fw_compiler=_unchanged, bw_compiler=_broken)(graph, inputs)


def out_of_memory(graph: Any, inputs: Any) -> Any:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.")


def on_rank_0(backend: Any) -> Any:
    """Return a backend that fails on one rank alone."""

    def either(graph: Any, inputs: Any) -> Any:
        return (backend if dist.get_rank() == 0 else aot_eager)(graph, inputs)

    return either


class FailsLater:
    """Compiles the first ``graphs`` graphs."""

    def __init__(self, graphs: int) -> None:
        self.left = graphs

    def __call__(self, graph: Any, inputs: Any) -> Any:
        self.left -= 1
        return aot_eager(graph, inputs) if self.left >= 0 else fails(graph, inputs)


def _unchanged(graph: Any, inputs: Any) -> Any:
    return graph.forward


def _broken(graph: Any, inputs: Any) -> Any:
    from functorch.compile import make_boxed_func

    def run(*args: Any) -> Any:
        raise RuntimeError("planted in compiled code")

    return make_boxed_func(run)
