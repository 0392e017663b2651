"""Models and callbacks that log, count and record their samples, and can run out of memory."""

from typing import Any

import torch
import torch.distributed as dist
import torchmetrics
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities.types import STEP_OUTPUT
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.utils.data import DataLoader, Dataset

from tests.helpers.trainers import MemoryLogger, quiet_trainer

FEATURES = 6


class Samples(Dataset[Any]):
    """Numbered samples: ``{"id", "x", "y", "name"}``."""

    def __init__(self, count: int) -> None:
        generator = torch.Generator().manual_seed(3)
        self.x = torch.randn(count, FEATURES, generator=generator)
        self.y = torch.randn(count, 1, generator=generator)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"id": index, "x": self.x[index], "y": self.y[index], "name": f"sample {index}"}


class LinearNet(LightningModule):
    def __init__(self, inputs: int = 4, outputs: int = 1, lr: float = 0.1) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.lr = nn.Linear(inputs, outputs), lr

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr)


def run_out(gradient: Tensor) -> None:
    raise torch.OutOfMemoryError("planted in backward")


class Net(LightningModule):
    """An MLP whose step changes every kind of state that a step may change.

    More than ``fits`` samples run out of memory: in ``"forward"``, ``"loss"`` (after metrics, logs
    and counters) or ``"backward"``. A ``norm`` has statistics, and does not affect the output.
    """

    def __init__(
        self, fits: int = 10**9, where: str = "forward", dropout: float = 0.0, norm: bool = False
    ) -> None:
        super().__init__()
        self.fits, self.where = fits, where
        torch.manual_seed(1)
        self.layers = nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, 1))
        self.norm = nn.BatchNorm1d(8) if norm else None
        self.dropout = nn.Dropout(dropout)
        self.error = torchmetrics.MeanSquaredError()
        self.register_buffer("total", torch.zeros(()))
        self.seen: list[int] = []
        self.steps = 0

    def training_step(self, batch: Any, batch_idx: int) -> STEP_OUTPUT:
        x, y = batch["x"], batch.pop("y")  # as many a training_step removes labels
        self.seen += batch["id"].tolist()
        assert batch["name"] == [f"sample {number}" for number in batch["id"].tolist()]
        hidden = self.layers[1](self.layers[0](x))
        if self.norm is not None:
            self.norm(hidden.detach())
        self.fail("forward", x)
        if self.where == "backward" and len(x) > self.fits:
            hidden.register_hook(run_out)  # after the last layer's gradient
        predictions = self.layers[2](self.dropout(hidden))
        loss = nn.functional.mse_loss(predictions, y)
        self.error(predictions.detach(), y)
        self.total += x.detach().sum()
        self.steps += len(x)
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log("error", self.error, on_step=True, on_epoch=True)
        self.log("positive", (y > 0).float().sum(), on_step=True, on_epoch=True, reduce_fx="sum")
        self.log("largest", y.max(), on_epoch=True, reduce_fx="max")
        self.log_dict({"half": 0.5 * loss, "rate": 0.5}, on_step=False, on_epoch=True)
        self.log("weighted", loss, on_step=False, on_epoch=True, batch_size=len(x))
        self.fail("loss", x)
        return {"loss": loss, "predictions": predictions, "rate": 0.5, "mean": predictions.mean()}

    def fail(self, where: str, x: Tensor) -> None:
        if self.where == where and len(x) > self.fits:
            raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: planted")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


def counting_ddp(reductions: list[int], **settings: Any) -> DDPStrategy:
    """Return DDP whose communication hook counts the buckets that it reduces."""

    class Strategy(DDPStrategy):
        def configure_ddp(self) -> None:
            super().configure_ddp()

            def count(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
                reductions.append(1)
                return allreduce_hook(None, bucket)

            self.model.register_comm_hook(None, count)

    return Strategy(**settings)


class SharpnessAware(torch.optim.SGD):
    """Evaluates the loss twice per step: at the weights, and uphill from them."""

    def step(self, closure: Any = None) -> Any:
        loss = closure()
        parameters = [p for group in self.param_groups for p in group["params"]]
        with torch.no_grad():
            moves = [0.1 * p.grad for p in parameters]
            for parameter, move in zip(parameters, moves, strict=True):
                parameter += move
        closure()
        with torch.no_grad():
            for parameter, move in zip(parameters, moves, strict=True):
                parameter -= move
        super().step()
        return loss


class Hooks(Callback):
    """Records the hooks of a step and their arguments."""

    def __init__(self) -> None:
        self.called: list[str] = []
        self.losses: list[float] = []
        self.outputs: list[Any] = []
        self.norms: list[float] = []

    def on_before_zero_grad(self, trainer, pl_module, optimizer):
        self.called.append("zero_grad")

    def on_before_backward(self, trainer, pl_module, loss):
        self.called.append("before")
        self.losses.append(loss.item())

    def on_after_backward(self, trainer, pl_module):
        self.called.append("after")
        self.norms.append(
            sum(p.grad.norm().item() for p in pl_module.parameters() if p.grad is not None)
        )

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        self.called.append("step")

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.called.append("end")
        self.outputs.append(outputs)


def train(
    *callbacks: Callback,
    net: Net | None = None,
    samples: int = 72,
    batch: int = 16,
    **settings: Any,
) -> tuple[Net, Hooks, MemoryLogger]:
    """Fit, with a shorter last batch, and return everything to compare."""
    net = Net() if net is None else net
    hooks, logger = Hooks(), MemoryLogger()
    torch.manual_seed(5)
    quiet_trainer(
        callbacks=[hooks, *callbacks], logger=logger, **{"max_epochs": 2, **settings}
    ).fit(net, DataLoader(Samples(samples), batch_size=batch))
    return net, hooks, logger
