"""Models and data with planted faults of real causes, and optimizers as their papers have them."""

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from torch.utils.data import DataLoader, Dataset

from tests.helpers.trainers import quiet_trainer

FEATURES = 6


def fit(model: Any, *callbacks: Callback, **settings: Any) -> Any:
    quiet_trainer(callbacks=list(callbacks), **settings).fit(model)
    return model


class NumberedBatches(Dataset[Any]):
    """Batches ``(number, inputs, targets)``, without those in ``leave_out``."""

    def __init__(self, count: int, leave_out: Any = (), seed: int = 0, rows: int = 8) -> None:
        generator = torch.Generator().manual_seed(seed)
        inputs = torch.randn(count, rows, FEATURES, generator=generator)
        truth = torch.randn(FEATURES, 1, generator=generator)
        targets = inputs @ truth + 0.1 * torch.randn(count, rows, 1, generator=generator)
        self.batches = [
            (number, inputs[number], targets[number])
            for number in range(count)
            if number not in set(leave_out)
        ]

    def __len__(self) -> int:
        return len(self.batches)

    def __getitem__(self, index: int) -> Any:
        return self.batches[index]


class FaultyNet(LightningModule):
    """Linear, BatchNorm, linear, with planted faults.

    Args:
        faults: The fault of each batch number: ``"nan"`` (a corrupt batch),
            ``"log"`` (the logarithm of a negative number in a layer), ``"inf"`` (an overflowing
            exponential), ``"constant"`` (an infinite loss with a finite gradient), ``"root"`` (a
            finite loss whose gradient is NaN), ``"spike"`` (targets a thousand times too large),
            ``"weight"`` (a weight is NaN from then on).
        optimizer: Class of the optimizer.
        settings: Its arguments.
        rank: The only rank on which faults happen; None for all.
        batches: Number of batches, including those in ``leave_out``.
    """

    def __init__(
        self,
        faults: Mapping[int, str] | None = None,
        optimizer: type[Optimizer] = torch.optim.SGD,
        settings: Mapping[str, Any] | None = None,
        *,
        rank: int | None = None,
        batches: int = 12,
        leave_out: Any = (),
    ) -> None:
        super().__init__()
        self.faults, self.rank = dict(faults or {}), rank
        self.optimizer, self.settings = optimizer, dict(settings or {"lr": 0.02})
        self.data = NumberedBatches(batches, leave_out)
        generator_state = torch.get_rng_state()
        torch.manual_seed(1)
        self.encoder = nn.Linear(FEATURES, 5)
        self.norm = nn.BatchNorm1d(5)
        self.head = nn.Linear(5, 1)
        torch.set_rng_state(generator_state)

    def fault_of(self, number: int) -> str | None:
        mine = self.rank is None or self.rank == self.global_rank
        return self.faults.get(number) if mine else None

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        number, inputs, targets = batch
        fault = self.fault_of(int(number))
        if fault == "nan":
            inputs = inputs.index_fill(0, torch.tensor([1]), float("nan"))
        if fault == "spike":
            targets = 1000 * targets
        if fault == "weight":
            with torch.no_grad():
                self.head.weight.view(-1)[2] = float("nan")
        hidden = torch.relu(self.norm(self.encoder(inputs)))
        if fault == "log":
            hidden = hidden + (-1 - hidden).log()
        if fault == "inf":
            hidden = hidden + (1e4 * (1 + hidden)).exp()
        loss = nn.functional.mse_loss(self.head(hidden), targets)
        if fault == "constant":
            loss = loss + float("inf")
        if fault == "root":
            loss = loss + (0 * self.head.bias).sqrt().sum()
        return loss

    def configure_optimizers(self) -> Any:
        return self.optimizer(self.parameters(), **self.settings)

    def train_dataloader(self) -> Any:
        return DataLoader(self.data, batch_size=None)


class LookaheadStep:
    """Zhang et al. (2019): every three steps weights move back towards slow ones."""

    def step(self: Any, closure: Any = None) -> Any:
        loss = self.optimizer.step(closure)
        self.counter += 1
        if self.counter % 3 == 0:
            with torch.no_grad():
                for parameter in self.param_groups[0]["params"]:
                    slow = self.state[parameter].setdefault("slow", parameter.clone())
                    parameter.copy_(slow.lerp_(parameter, 0.5))
        return loss


class Lookahead(LookaheadStep, Optimizer):
    def __init__(self, params: Any, lr: float = 0.02) -> None:
        self.optimizer, self.counter = SGD(params, lr=lr, momentum=0.9), 0
        super().__init__(self.optimizer.param_groups, {})
        self.param_groups = self.optimizer.param_groups


class BareLookahead(LookaheadStep, Optimizer):
    """Does not call ``Optimizer.__init__``, as some public versions."""

    def __init__(self, params: Any, lr: float = 0.02) -> None:
        self.optimizer, self.counter = SGD(params, lr=lr, momentum=0.9), 0
        self.param_groups, self.defaults = self.optimizer.param_groups, {}
        self.state, self.zero_grad = self.optimizer.state, self.optimizer.zero_grad


class SAM(Optimizer):
    """Foret et al. (2021): a second evaluation at weights that are moved along the gradient."""

    def __init__(self, params: Any, lr: float = 0.02, rho: float = 0.05) -> None:
        super().__init__(params, {"lr": lr, "rho": rho})
        self.base = SGD(self.param_groups, momentum=0.9)

    def step(self, closure: Callable[[], Any]) -> Any:  # type: ignore[override]
        evaluate = torch.enable_grad()(closure)
        loss = evaluate()
        (group,) = self.param_groups
        with torch.no_grad():
            norm = torch.cat([p.grad.flatten() for p in group["params"]]).norm()
            before = [parameter.clone() for parameter in group["params"]]
            for parameter in group["params"]:
                parameter.add_(parameter.grad, alpha=group["rho"] / float(norm))
            evaluate()
            for parameter, value in zip(group["params"], before, strict=True):
                parameter.copy_(value)
            self.base.step()
        return loss


def optimizer_state(module: LightningModule) -> list[Any]:
    return [copy.deepcopy(optimizer.state_dict()) for optimizer in module.trainer.optimizers]


def all_finite(module: nn.Module) -> bool:
    return all(bool(torch.isfinite(value).all()) for value in module.state_dict().values())
