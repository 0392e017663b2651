"""Optimizers as their papers have them, with state outside ``Optimizer.state``."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer


class Evaluating(Optimizer):
    """Evaluates the loss, then calls ``update``."""

    def step(self, closure: Any = None) -> Any:
        loss = None if closure is None else torch.enable_grad()(closure)()
        with torch.no_grad():
            self.update()
        return loss

    def update(self) -> None:
        raise NotImplementedError

    def trained(self) -> list[tuple[dict[str, Any], nn.Parameter, Tensor]]:
        return [
            (g, p, p.grad) for g in self.param_groups for p in g["params"] if p.grad is not None
        ]


class Counting(Evaluating):
    """Counts its steps in the object, as StableSPAM does (Huang et al. 2025)."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr})
        self.total_steps = 0

    def update(self) -> None:
        self.total_steps += 1
        for group, parameter, gradient in self.trained():
            parameter.sub_(gradient, alpha=group["lr"] / self.total_steps)


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


class SAM(Evaluating):
    """Foret et al. (2021): a second evaluation at weights that are moved along the gradient."""

    def __init__(self, params: Any, lr: float = 0.02, rho: float = 0.05) -> None:
        super().__init__(params, {"lr": lr, "rho": rho})
        self.base = SGD(self.param_groups, momentum=0.9)

    def step(self, closure: Callable[[], Any]) -> Any:  # type: ignore[override]
        evaluate = torch.enable_grad()(closure)
        loss = evaluate()
        with torch.no_grad():
            norm = torch.stack([gradient.norm() for *_, gradient in self.trained()]).norm()
            before = [(parameter, parameter.clone()) for _, parameter, _ in self.trained()]
            for group, parameter, gradient in self.trained():
                parameter.add_(gradient, alpha=group["rho"] / float(norm))
            evaluate()
            for parameter, value in before:
                parameter.copy_(value)
            self.base.step()
        return loss
