"""Whether splitting a batch leaves its gradient as it is: tried once, on a part that fits."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from lightning_opt.core.exhaustion import is_out_of_memory, let_go
from lightning_opt.core.preserve import replaced
from lightning_opt.core.trial import loss_of, without_a_trace

if TYPE_CHECKING:
    from lightning_opt.batching.micro_batching.closure import Workshop

TOLERANCE = 1e-3
"""Share of the gradient's norm by which summing in another order does not make it differ."""

TOLERANCE_16_BIT = 5e-2


def split_error(
    shop: Workshop, pieces: Sequence[tuple[Any, int]], halve: Any, batch_idx: int = 0
) -> float | None:
    """Return how far the gradient of a micro-batch is from that of its halves, as a share of it.

    Nothing is logged, and random numbers, buffers, metrics, counters, gradients and parameters are
    afterwards as before; communication hooks and callbacks do not see it. Layers of dropout are off
    meanwhile.

    Args:
        shop: Of the run.
        pieces: The micro-batches, of which the first is tried.
        halve: Splits one in two.
        batch_idx: For ``training_step``.

    Returns:
        The share, or None where that cannot be told: one sample alone, sharded parameters, a loss
        that is random, or too little memory.
    """
    piece, samples = pieces[0]
    module, strategy = shop.module, shop.trainer.strategy
    normed = any(isinstance(m, _BatchNorm) and m.training for m in module.modules())
    if samples < 2 or normed or not isinstance(strategy, (SingleDeviceStrategy, DDPStrategy)):
        return None
    error: float | None = None
    failed = False
    try:
        with ExitStack() as stack:
            _keep_parameters(shop.parameters, stack)
            for layer in module.modules():
                _switch_dropout_off(layer, stack)
            error = _measure(shop, piece, halve, batch_idx)
    except Exception as trouble:  # noqa: BLE001 - the run's own step comes next
        failed = is_out_of_memory(trouble)
    if failed:
        let_go(shop.device)  # outside `except`, where the traceback holds it
    return error


def is_too_far(error: float, precision: str) -> bool:
    """Return whether rounding does not explain it."""
    return error > (TOLERANCE_16_BIT if "16" in precision else TOLERANCE)


def _measure(shop: Workshop, piece: Any, halve: Any, batch_idx: int) -> float | None:
    whole = _gradient(shop, piece, batch_idx)
    size = _norm(whole)
    # With other random numbers, and otherwise the same.
    other = _gradient(shop, piece, batch_idx, draw=True)
    noise = _norm([a - b for a, b in zip(whole, other, strict=True)])
    if not size or not is_finite(size) or noise > 0.1 * TOLERANCE * size:
        return None
    halves = halve(piece)
    weights = [count if shop.weigh is None else shop.weigh(half) for half, count in halves]
    total = sum(weights[1:], weights[0])
    for (half, _), weight in zip(halves, weights, strict=True):
        for rest, part in zip(whole, _gradient(shop, half, batch_idx), strict=True):
            rest -= part * (weight / total)
    error = _norm(whole) / size
    return error if is_finite(error) else None


def _gradient(shop: Workshop, piece: Any, batch_idx: int, draw: bool = False) -> list[Tensor]:
    """Return the gradient of a copy, without touching ``Parameter.grad`` or calling its hooks."""
    parameters = [p for p in shop.parameters if p.requires_grad]
    with without_a_trace(shop.trainer, shop.module), torch.enable_grad():
        if draw:
            torch.rand((), device=shop.device)
            torch.rand(())
        loss = loss_of(shop.trainer, shop.module, copy.deepcopy(piece), batch_idx)
        if loss is None:
            raise ValueError("There is no loss.")
        found = torch.autograd.grad(loss, parameters, allow_unused=True)
    return [g.float() for g in found if g is not None]


def _norm(tensors: Sequence[Tensor]) -> float:
    return float(torch.stack([tensor.norm() for tensor in tensors]).norm()) if tensors else 0.0


def is_finite(number: float) -> bool:
    """Return whether it is neither infinite nor NaN."""
    return number - number == 0


def _keep_parameters(parameters: Sequence[nn.Parameter], stack: ExitStack) -> None:
    """Put parameters back that ``training_step`` itself changes, such as a teacher's."""
    for parameter in parameters:
        stack.callback(_put_back, parameter, parameter.detach().clone(), parameter._version)


def _put_back(parameter: nn.Parameter, copied: Tensor, version: int) -> None:
    if parameter._version != version:
        parameter.data.copy_(copied)


def _switch_dropout_off(layer: nn.Module, stack: ExitStack) -> None:
    if isinstance(layer, _DropoutNd):
        stack.enter_context(replaced(layer, training=False))
    elif isinstance(layer, (nn.MultiheadAttention, nn.RNNBase)):
        stack.enter_context(replaced(layer, dropout=0.0))
