"""DDP's reduction of gradients that are there already, apart from the backward pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from lightning.pytorch.overrides.distributed import prepare_for_backward
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lightning_opt.core.modules.patching import replaced


def expect_backward(model: DistributedDataParallel, outputs: Any) -> None:
    """Have DDP reduce gradients in the backward pass that follows, as after a forward pass.

    Args:
        model: DDP's wrapper.
        outputs: What the pass begins with; unused parameters are found from it.
    """
    with replaced(model, require_backward_grad_sync=True):
        prepare_for_backward(model, outputs)


@contextmanager
def noted_order(model: DistributedDataParallel) -> Iterator[list[nn.Parameter]]:
    """Note in which order parameters get their gradients, if DDP still waits to hear it.

    After its first reduction it sorts its buckets by that, once and for all.
    """
    order: list[nn.Parameter] = []
    with ExitStack() as stack:
        if not getattr(model, "_has_rebuilt_buckets", False):
            for parameter in model.parameters():
                if parameter.requires_grad:
                    handle = parameter.register_post_accumulate_grad_hook(order.append)
                    stack.callback(handle.remove)
        yield order


def reduce_gradients(model: DistributedDataParallel, order: Sequence[nn.Parameter]) -> None:
    """Reduce every ``Parameter.grad`` through DDP's reducer, with its communication hooks.

    The reducer acts where autograd adds to a gradient. So a backward pass adds zeros, which take no
    memory, to one parameter after the other. Hooks of the parameters' own are left out: they have
    seen the gradient.

    Args:
        model: DDP's wrapper, whose last forward and backward passes ran under ``no_sync``.
        order: Of parameters; those that are not in it come last, the last one first.
    """
    rest = [p for p in reversed(list(model.parameters())) if all(p is not own for own in order)]
    parameters = [p for p in (*order, *rest) if p.requires_grad and p.grad is not None]
    if not parameters:
        return
    carrier = torch.zeros((), device=parameters[0].device, requires_grad=True)
    loss: Tensor = carrier
    add_zero: Callable[..., Tensor] = _AddZero.apply
    for parameter in reversed(parameters):
        loss = add_zero(loss, parameter)
    expect_backward(model, loss)
    with ExitStack() as stack:
        for parameter in parameters:
            _without_hooks(parameter, stack)
        loss.backward()


class _AddZero(torch.autograd.Function):
    """An identity whose backward pass gives a parameter a gradient of zeros."""

    @staticmethod
    def forward(ctx: Any, carrier: Tensor, parameter: nn.Parameter) -> Tensor:
        ctx.gradient = parameter.grad
        return carrier.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        own = ctx.gradient
        if own.is_sparse:
            return gradient, torch.zeros_like(own)
        return gradient, torch.zeros((), dtype=own.dtype, device=own.device).expand(own.shape)


def _without_hooks(parameter: nn.Parameter, stack: ExitStack) -> None:
    for name in ("_backward_hooks", "_post_accumulate_grad_hooks"):
        hooks = getattr(parameter, name, None)
        if hooks:
            stack.callback(hooks.update, dict(hooks))
            hooks.clear()
