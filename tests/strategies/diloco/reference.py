"""DiLoCo as published, in float64 and in one process, as a reference."""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer


def simulate(  # noqa: C901 - one algorithm from top to bottom
    model: nn.Module,
    loss_of: Callable[[nn.Module, int, int], Tensor],
    make_optimizer: Callable[[nn.Module], Optimizer],
    *,
    replicas: int,
    steps: int,
    sync_every: int,
    outer_lr: float,
    outer_momentum: float,
    fragments: Sequence[Sequence[str]] | None = None,
    delay: int = 0,
    nan_at: tuple[int, int] | None = None,
) -> dict[str, Tensor]:
    """Return the mean of all replicas' weights after the last step.

    Args:
        loss_of: The loss of a model, at a step and for a replica.
        make_optimizer: The inner optimizer.
        fragments: Names of the parameters of each fragment.
        delay: Steps from sending to merging.
        nan_at: Step and replica after which its weights are NaN.
        (the others): As in the strategy.
    """
    model = model.double()
    names = [name for name, _ in model.named_parameters()]
    fragments = fragments or [names]
    local = [copy.deepcopy(model) for _ in range(replicas)]
    inner = [make_optimizer(one) for one in local]
    outer = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
    settings = {"lr": outer_lr, "momentum": outer_momentum, "nesterov": outer_momentum > 0}
    optimizers = [SGD([outer[name] for name in part], **settings) for part in fragments]
    sent: dict[int, tuple[int, list[dict[str, Tensor]]]] = {}

    def weights_of(replica: int) -> dict[str, Tensor]:
        return {name: p.detach().clone() for name, p in local[replica].named_parameters()}

    @torch.no_grad()
    def merge(number: int) -> None:
        _, then = sent.pop(number)
        sound = [n for n, w in enumerate(then) if all(bool(v.isfinite().all()) for v in w.values())]
        for name in fragments[number]:
            outer[name].grad = sum(outer[name] - then[n][name] for n in sound) / len(sound)
        optimizers[number].step()
        for replica, model in enumerate(local):
            parameters = dict(model.named_parameters())
            for name in fragments[number]:
                progress = parameters[name] - then[replica][name]
                parameters[name].copy_(outer[name] + progress)
            if replica not in sound:
                for name, parameter in parameters.items():
                    parameter.copy_(outer[name])
                inner[replica].state.clear()

    for step in range(1, steps + 1):
        for replica, model in enumerate(local):
            inner[replica].zero_grad()
            loss_of(model, step - 1, replica).backward()
            inner[replica].step()
            if nan_at == (step, replica):
                with torch.no_grad():
                    for parameter in model.parameters():
                        parameter.fill_(torch.nan)
        for number in [number for number, (due, _) in sent.items() if due == step]:
            merge(number)
        for number in range(len(fragments)):
            if (step - (number + 1) * sync_every // len(fragments)) % sync_every == 0:
                sent[number] = (step + delay, [weights_of(r) for r in range(replicas)])
                if delay == 0:
                    merge(number)
    for number in list(sent):
        merge(number)
    final = [weights_of(replica) for replica in range(replicas)]
    return {name: sum(w[name] for w in final) / replicas for name in names}


def assert_equals_simulation(
    found: nn.Module, model: nn.Module, loss_of: Any, make_optimizer: Any, **settings: Any
) -> None:
    """Assert that a trained model has the weights of :func:`simulate` for two replicas."""
    expected = simulate(model, loss_of, make_optimizer, **{"replicas": 2, **settings})
    for name, weight in found.named_parameters():
        torch.testing.assert_close(weight.detach(), expected[name], rtol=0, atol=1e-12)
