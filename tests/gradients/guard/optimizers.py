"""Optimizers as their papers have them, with state outside ``Optimizer.state``."""

from collections.abc import Callable
from typing import Any

import torch
from torch.optim import SGD, Optimizer


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
