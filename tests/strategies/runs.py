"""Models and runs for the tests of strategies, in each process of ``processes.launch``."""

import os
import tempfile
import warnings
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_opt.strategies.compression.compressed_ddp import CompressedDDPStrategy
from lightning_opt.strategies.compressors import TopK
from tests.helpers.trainers import quiet_trainer

SIZES = (40, 700, 3, 1500, 260)
"""Elements of the parameters: several buckets at the bucket size below."""

SMALL_BUCKETS = 0.004  # MiB

SHORT_WAIT = timedelta(seconds=30)
"""For tests in which a rank dies: gloo's all-to-all may miss it until the wait times out."""


def gradient(step: int, rank: int, numel: int) -> Tensor:
    """Return the gradient of one rank at one step, with elements of different scales."""
    generator = torch.Generator().manual_seed(1000 * step + 17 * rank + numel)
    return torch.randn(numel, generator=generator) * torch.linspace(0.1, 2.0, numel)


class Ledger(LightningModule):
    """A loss whose known gradient does not depend on the weights.

    With SGD at a learning rate of 1, the weights are minus the sum of the applied mean gradients.

    Args:
        skip: Whether a parameter is unused, by step, rank and the parameter's index.
        bad: Step, rank and parameter's index at which the gradient is infinite.
        window: Backward passes per optimizer step.
    """

    def __init__(
        self,
        skip: Callable[[int, int, int], bool] | None = None,
        bad: tuple[int, int, int] | None = None,
        window: int = 1,
    ) -> None:
        super().__init__()
        self.weights = nn.ParameterList([torch.zeros(numel) for numel in SIZES])
        self.skip, self.bad, self.window = skip, bad, window

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        step, rank = int(batch), self.global_rank
        loss = torch.zeros(())
        for index, weight in enumerate(self.weights):
            if self.skip is not None and self.skip(step, rank, index):
                continue
            factor = gradient(step, rank, weight.numel()).to(weight.dtype)
            if self.bad == (step, rank, index):
                factor[0] = torch.inf
            loss = loss + self.window * (weight.flatten() * factor).sum()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1.0)


class LedgerByHand(Ledger):
    """Two optimizers, stepped in turn, with the other's parameters switched off meanwhile."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        for number, optimizer in enumerate(self.optimizers()):  # type: ignore[arg-type]
            self.toggle_optimizer(optimizer)
            optimizer.zero_grad()
            loss = sum(
                (weight * gradient(int(batch), self.global_rank, weight.numel())).sum()
                for weight in list(self.weights)[number::2]
            )
            self.manual_backward(loss)
            optimizer.step()
            self.untoggle_optimizer(optimizer)

    def configure_optimizers(self) -> Any:
        weights = list(self.weights)
        return [torch.optim.SGD(weights[number::2], lr=1.0) for number in (0, 1)]


def expected(steps: Sequence[int], world: int, model: Ledger) -> list[Tensor]:
    """The account that an exact reduction would leave, in float64."""
    accounts = []
    for index, numel in enumerate(SIZES):
        account = torch.zeros(numel, dtype=torch.float64)
        for step in steps:
            for rank in range(world):
                if model.skip is None or not model.skip(step, rank, index):
                    account -= gradient(step, rank, numel).double() / world
        accounts.append(account)
    return accounts


def fit(
    model: LightningModule,
    strategy: Any,
    batches: Any = None,
    *,
    ckpt_path: Any = None,
    scaler: torch.amp.GradScaler | None = None,
    **settings: Any,
) -> Trainer:
    """Train; ``batches`` is a range of step numbers or a loader."""
    loader = DataLoader(list(batches), batch_size=None) if isinstance(batches, range) else batches
    if scaler is not None:
        settings["plugins"] = [MixedPrecision("16-mixed", "cpu", scaler=scaler)]
    settings = {"limit_val_batches": 0, **settings}
    trainer = quiet_trainer(strategy=strategy, devices=dist_world(), **settings)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "lr_scheduler.step")
        trainer.fit(model, loader, ckpt_path=ckpt_path)
    return trainer


def dist_world() -> int:
    return int(os.environ["LOCAL_WORLD_SIZE"])


class KeptResiduals(CompressedDDPStrategy):
    """Stores the strategy's state of a checkpoint at the end of the fit."""

    state: dict[str, Any]

    def on_train_end(self) -> None:
        super().on_train_end()
        self.state = state_of(self.lightning_module.trainer)  # type: ignore[union-attr]

    @property
    def kept(self) -> dict[str, Tensor]:
        return self.state["residuals"]


def compressed(compressor: Any = None, **settings: Any) -> KeptResiduals:
    """Return a strategy that compresses several small buckets after three steps."""
    settings = {"warmup_steps": 3, "ramp_steps": 0, "bucket_cap_mb": SMALL_BUCKETS, **settings}
    return KeptResiduals(compressor or TopK(0.05), **settings)


def state_of(trainer: Any) -> dict[str, Any]:
    """Return the strategy's state of a checkpoint written now. All ranks must call it."""
    with tempfile.TemporaryDirectory() as folder:
        path = trainer.strategy.broadcast(f"{folder}/now.ckpt")
        trainer.save_checkpoint(path)
        saved = torch.load(path, weights_only=True)
        trainer.strategy.barrier()  # before rank 0 deletes the folder
    state: dict[str, Any] = saved[CompressedDDPStrategy.checkpoint_key]
    return state


class State(Callback):
    """Stores the state at the start, or after a batch and the callbacks before this one."""

    def __init__(self, batch: int | None = None) -> None:
        self.batch = batch

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        if self.batch is None:
            self.state = state_of(trainer)

    def on_train_batch_end(self, trainer: Any, *arguments: Any) -> None:
        if arguments[-1] == self.batch:
            self.state = state_of(trainer)


def of_all_ranks(value: Tensor) -> list[Tensor]:
    everywhere = [torch.empty_like(value) for _ in range(dist.get_world_size())]
    dist.all_gather(everywhere, value)
    return everywhere


def same_on_all_ranks(module: nn.Module) -> bool:
    """Return whether all ranks have the same bits in weights and buffers."""
    own = torch.cat([one.detach().double().flatten() for one in module.state_dict().values()])
    own = own.view(torch.uint8)
    return all(torch.equal(own, other) for other in of_all_ranks(own))


class SaveAtEnd(Callback):
    def __init__(self, path: str) -> None:
        self.path = path

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        trainer.save_checkpoint(self.path)
        trainer.save_checkpoint(self.path + ".weights", weights_only=True)


def assert_nothing_is_lost(model: Ledger, strategy: KeptResiduals, accounts: Any) -> None:
    """Assert that applied gradients and residuals add up to those of an exact reduction."""
    largest = 0.0
    for index, (weight, account) in enumerate(zip(model.weights, accounts, strict=True)):
        rest = strategy.kept[f"weights.{index}"]
        torch.testing.assert_close(
            weight.detach().double().flatten() - rest, account, rtol=0, atol=2e-4
        )
        largest = max(largest, rest.abs().max().item())
    assert largest > 1e-3  # the test is not vacuous
    assert same_on_all_ranks(model)
