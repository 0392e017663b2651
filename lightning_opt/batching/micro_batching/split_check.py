"""Whether splitting a batch leaves its gradient as it is: tried on a part that fits."""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Sequence
from contextlib import ExitStack, nullcontext
from typing import Any

import torch
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from lightning_opt.batching.micro_batching.closure import Workshop, split_with
from lightning_opt.core.measure.exhaustion import is_out_of_memory, recover_memory
from lightning_opt.core.modules.patching import replaced
from lightning_opt.core.modules.trial import loss_of, without_side_effects

log = logging.getLogger(__name__)

TOLERANCE = 1e-3
"""Share of the gradient's norm by which summing in another order does not make it differ."""

TOLERANCE_16_BIT = 5e-2
"""The same where parameters themselves have 16 bits."""

TRIED = frozenset(2**n for n in range(7))
"""Which of the batches that are split are tried: the first may be one without padding."""

BATCH_NORM = (
    "MicroBatching splits a batch of a model with BatchNorm, whose statistics are now those of "
    "micro-batches: gradients and running statistics differ from those of whole batches. GroupNorm "
    "and LayerNorm do not have this problem."
)


class SplitCheck:
    """Warns, once a model, if the gradient of a micro-batch is not that of its halves.

    Nothing is logged, and random numbers, buffers, metrics, counters, gradients and parameters are
    afterwards as before; communication hooks and callbacks do not see it. Layers of dropout are off
    meanwhile, and so is autocast, of which the rounding would hide what is looked for.

    Attributes:
        sums: Names of values that are logged as means and have been found to be sums over samples.
    """

    def __init__(self) -> None:
        self.sums: set[str] = set()
        self._splits = 0
        self._told = self._excused = False

    def look(self, shop: Workshop, batch: Any, parts: int) -> None:
        """Look, if it is time, at a batch that is about to be split. The same on all ranks."""
        self._splits += 1
        if self._told or self._splits not in TRIED:
            return
        if any(isinstance(m, _BatchNorm) and m.training for m in shop.module.modules()):
            self._told = True
            rank_zero_warn(BATCH_NORM)
            return
        pieces = split_with(shop.split, batch, parts)
        if pieces[0][1] == 1 and parts > 1:
            pieces = split_with(shop.split, batch, parts // 2)  # a pair of samples may fit as well
        piece, samples = pieces[self._splits % len(pieces)]
        try:
            error = _measure(shop, piece, samples)
        except _CannotTellError as reason:
            if not self._excused:
                self._excused = True
                log.info("Whether a split changes the gradient could not be checked: %s", reason)
            return
        halves = any(p.dtype in (torch.float16, torch.bfloat16) for p in shop.parameters)
        if error > (TOLERANCE_16_BIT if halves else TOLERANCE):
            self._told = True
            rank_zero_warn(
                f"MicroBatching changes the gradient of this model: that of {samples} samples in "
                f"two parts is off by {error:.1%}. So the loss is not what MicroBatching(loss=...) "
                "says. Is it a mean over tokens? Then give loss='mean_over_tokens' and count, a "
                "function of the batch that counts them. Is it a sum? loss='sum'. A loss that "
                "compares samples with each other, such as a contrastive one, cannot be split "
                "without changing it."
            )


class _CannotTellError(Exception):
    """Why two halves cannot be compared with the whole."""


def _measure(shop: Workshop, piece: Any, samples: int) -> float:
    """Return how far the gradient of a piece is from that of its halves, as a share of it."""
    if not isinstance(shop.trainer.strategy, (SingleDeviceStrategy, DDPStrategy)):
        raise _CannotTellError("parameters are sharded.")
    mixed = shop.trainer.precision.endswith("-mixed")
    if mixed and samples >= 4:  # in float32 half of it takes as much memory
        piece, samples = split_with(shop.split, piece, 2)[0]
    if samples < 2:
        raise _CannotTellError("one sample is all that fits.")
    try:
        with ExitStack() as stack:
            for layer in shop.module.modules():
                _switch_dropout_off(layer, stack)
            if mixed:
                plugin = shop.trainer.precision_plugin
                stack.enter_context(replaced(plugin, train_step_context=nullcontext))
            return _compare(shop, piece)
    except _CannotTellError:
        raise
    except Exception as trouble:  # noqa: BLE001 - the run's own step comes next
        failed, reason = is_out_of_memory(trouble), f"{type(trouble).__name__}: {trouble}"
    if failed:
        recover_memory(shop.device)  # outside `except`, where the traceback holds it
    raise _CannotTellError(reason)


def _compare(shop: Workshop, piece: Any) -> float:
    whole, logged = _gradient(shop, piece)
    size = _norm(whole)
    # With other random numbers, and otherwise the same.
    other, _ = _gradient(shop, piece, draw=True)
    noise = _norm([a - b for a, b in zip(whole, other, strict=True)])
    if not size or not math.isfinite(size):
        raise _CannotTellError(f"the gradient has a norm of {size}.")
    if noise > 0.1 * TOLERANCE * size:
        raise _CannotTellError("the loss is random.")
    halves = split_with(shop.split, piece, 2)
    logged = {name: float(value) for name, value in logged.items()}
    sums = dict.fromkeys(logged, 0.0)
    for (half, _), share in zip(halves, shop.shares(halves), strict=True):
        gradient, values = _gradient(shop, half)
        for rest, part in zip(whole, gradient, strict=True):
            rest -= part * share
        for name in sums:
            sums[name] += float(values.get(name, math.nan))
    shop.sums.update(
        name
        for name, value in logged.items()
        if value and math.isclose(value, sums[name], rel_tol=TOLERANCE)
    )
    error = _norm(whole) / size
    if not math.isfinite(error):
        raise _CannotTellError("the gradient of a half is not finite.")
    return error


def _gradient(
    shop: Workshop, piece: Any, draw: bool = False
) -> tuple[list[Tensor], dict[str, Any]]:
    """Return the gradient of a copy, and what was logged, without touching ``Parameter.grad``."""
    parameters = [p for p in shop.parameters if p.requires_grad]
    logged: dict[str, Any] = {}

    def log(name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        if isinstance(value, (int, float, Tensor)):
            logged[name] = value

    with ExitStack() as stack:
        stack.enter_context(without_side_effects(shop.trainer, shop.module))
        stack.enter_context(replaced(shop.module, log=log))
        stack.enter_context(torch.enable_grad())
        if draw:
            torch.rand((), device=shop.device)
            torch.rand(())
        loss = loss_of(shop.trainer, shop.module, copy.deepcopy(piece), 0)
        if loss is None:
            raise _CannotTellError("training_step returned None.")
        found = torch.autograd.grad(loss, parameters, allow_unused=True)
    return [g.float() for g in found if g is not None], logged


def _norm(tensors: Sequence[Tensor]) -> float:
    return float(torch.stack([tensor.norm() for tensor in tensors]).norm()) if tensors else 0.0


def _switch_dropout_off(layer: nn.Module, stack: ExitStack) -> None:
    if isinstance(layer, _DropoutNd):
        stack.enter_context(replaced(layer, training=False))
    elif isinstance(layer, (nn.MultiheadAttention, nn.RNNBase)):
        stack.enter_context(replaced(layer, dropout=0.0))
