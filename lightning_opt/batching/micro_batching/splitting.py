"""Splits batches into parts, and checks on one part whether splitting changes the gradient."""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from lightning_opt.core.measure.exhaustion import is_out_of_memory, recover_memory
from lightning_opt.core.modules.batches import split_into
from lightning_opt.core.modules.patching import replaced
from lightning_opt.core.modules.trial import loss_of, without_side_effects

if TYPE_CHECKING:
    import lightning.pytorch as pl

log = logging.getLogger(__name__)

Pieces: TypeAlias = Sequence[tuple[Any, int]]
"""Parts of a batch, each with its number of samples."""

LOSSES = ("mean_over_samples", "mean_over_tokens", "sum")

TOLERANCE = 1e-3
"""Differences up to this share of the gradient's norm count as rounding."""

TOLERANCE_16_BIT = 5e-2
"""The same limit for parameters of 16 bits."""

CHECKED_SPLITS = frozenset(2**n for n in range(7))
"""Which of the split batches are checked. The first alone is not enough: it may lack padding."""

BATCH_NORM_WARNING = (
    "MicroBatching splits a batch of a model with BatchNorm, whose statistics are now those of "
    "micro-batches: gradients and running statistics differ from those of whole batches. GroupNorm "
    "and LayerNorm do not have this problem."
)


class Splitter:
    """Splits batches and weights the losses of the parts."""

    def __init__(
        self,
        split: Callable[[Any, int], Pieces] | None,
        loss: str,
        count: Callable[[Any], Any] | None,
    ) -> None:
        self._split, self._loss, self._count = split, loss, count

    def split(self, batch: Any, parts: int) -> Pieces:
        if self._split is None:
            return split_into(batch, parts)
        pieces = list(self._split(batch, parts))
        if len(pieces) != parts or any(len(piece) != 2 or piece[1] < 1 for piece in pieces):
            raise ValueError(
                f"split(batch, {parts}) must return {parts} pairs `(part, samples)` with at least "
                f"one sample each, got {len(pieces)}: {[str(piece)[:60] for piece in pieces]}."
            )
        return pieces

    def count_samples(self, batch: Any) -> int:
        """Return the number of samples in a batch; raises as :meth:`split` does."""
        [(_, samples)] = self.split(batch, 1)
        return samples

    def shares(self, pieces: Pieces) -> list[Any]:
        """Return the factor on each part's loss: a number, or a tensor that is never read."""
        if len(pieces) == 1 or self._loss == "sum":
            return [1.0] * len(pieces)
        weights: list[Any] = [samples for _, samples in pieces]
        if self._count is not None:
            weights = [self._count(piece) for piece, _ in pieces]
            weights = [w.detach() if isinstance(w, Tensor) else w for w in weights]
        total = sum(weights[1:], weights[0])
        if not isinstance(total, Tensor) and total == 0:
            return [0.0] * len(pieces)
        return [weight / total for weight in weights]


class SplitCheck:
    """Warns once per model if a micro-batch and its two halves give different gradients.

    The check logs nothing and restores random state, buffers, metrics, counters, gradients and
    parameters. Communication hooks and callbacks do not run. Dropout is off, and so is autocast,
    whose rounding would hide differences.

    Attributes:
        sums: Names of values that are logged as means but are sums over samples.
    """

    def __init__(self, splitter: Splitter) -> None:
        self._splitter = splitter
        self.sums: set[str] = set()
        self._splits = 0
        self._warned = self._logged_reason = False

    def check(
        self, trainer: pl.Trainer, module: pl.LightningModule, batch: Any, parts: int
    ) -> None:
        self._splits += 1
        if self._warned or self._splits not in CHECKED_SPLITS:
            return
        if any(isinstance(m, _BatchNorm) and m.training for m in module.modules()):
            self._warned = True
            rank_zero_warn(BATCH_NORM_WARNING)
            return
        pieces = self._splitter.split(batch, parts)
        if pieces[0][1] == 1 and parts > 1:  # try two samples, which may also fit
            pieces = self._splitter.split(batch, parts // 2)
        piece, samples = pieces[self._splits % len(pieces)]
        try:
            error = self._measure(trainer, module, piece, samples)
        except _CannotCheckError as reason:
            if not self._logged_reason:
                self._logged_reason = True
                log.info("Whether a split changes the gradient could not be checked: %s", reason)
            return
        half = any(p.dtype in (torch.float16, torch.bfloat16) for p in module.parameters())
        if error > (TOLERANCE_16_BIT if half else TOLERANCE):
            self._warned = True
            rank_zero_warn(
                f"MicroBatching changes the gradient of this model: the gradient of {samples} "
                f"samples in two parts is off by {error:.1%}. So the loss does not match "
                "MicroBatching(loss=...). For a mean over tokens, pass loss='mean_over_tokens' and "
                "count, a function of the batch that counts them. For a sum, pass loss='sum'. A "
                "loss that compares samples with each other, such as a contrastive one, cannot be "
                "split without changing it."
            )

    def _measure(
        self, trainer: pl.Trainer, module: pl.LightningModule, piece: Any, samples: int
    ) -> float:
        """Return the relative difference between the gradients of a piece and of its halves."""
        if not isinstance(trainer.strategy, (SingleDeviceStrategy, DDPStrategy)):
            raise _CannotCheckError("parameters are sharded.")
        mixed = trainer.precision.endswith("-mixed")
        if mixed and samples >= 4:  # in float32, half the samples take as much memory
            piece, samples = self._splitter.split(piece, 2)[0]
        if samples < 2:
            raise _CannotCheckError("only one sample fits.")
        try:
            with ExitStack() as stack:
                for layer in module.modules():
                    if isinstance(layer, _DropoutNd):
                        stack.enter_context(replaced(layer, training=False))
                    elif isinstance(layer, (nn.MultiheadAttention, nn.RNNBase)):
                        stack.enter_context(replaced(layer, dropout=0.0))
                if mixed:
                    plugin = trainer.precision_plugin
                    stack.enter_context(replaced(plugin, train_step_context=nullcontext))
                return self._compare(trainer, module, piece)
        except _CannotCheckError:
            raise
        except Exception as error:  # noqa: BLE001 - the batch itself runs next
            ran_out, reason = is_out_of_memory(error), f"{type(error).__name__}: {error}"
        if ran_out:  # outside `except`, whose traceback holds memory
            recover_memory(trainer.strategy.root_device)
        raise _CannotCheckError(reason)

    def _compare(self, trainer: pl.Trainer, module: pl.LightningModule, piece: Any) -> float:
        whole, logged = _gradient(trainer, module, piece)
        size = _norm(whole)
        # The same piece with other random numbers shows whether the loss is random.
        other, _ = _gradient(trainer, module, piece, draw=True)
        noise = _norm([a - b for a, b in zip(whole, other, strict=True)])
        if not size or not math.isfinite(size):
            raise _CannotCheckError(f"the gradient has a norm of {size}.")
        if noise > 0.1 * TOLERANCE * size:
            raise _CannotCheckError("the loss is random.")
        halves = self._splitter.split(piece, 2)
        logged = {name: float(value) for name, value in logged.items()}
        sums = dict.fromkeys(logged, 0.0)
        for (half, _), share in zip(halves, self._splitter.shares(halves), strict=True):
            gradient, values = _gradient(trainer, module, half)
            for remainder, part in zip(whole, gradient, strict=True):
                remainder -= part * share
            for name in sums:
                sums[name] += float(values.get(name, math.nan))
        self.sums.update(
            name
            for name, value in logged.items()
            if value and math.isclose(value, sums[name], rel_tol=TOLERANCE)
        )
        error = _norm(whole) / size
        if not math.isfinite(error):
            raise _CannotCheckError("the gradient of a half is not finite.")
        return error


class _CannotCheckError(Exception):
    pass


def _gradient(
    trainer: pl.Trainer, module: pl.LightningModule, piece: Any, draw: bool = False
) -> tuple[list[Tensor], dict[str, Any]]:
    """Return the gradient and the logged values of a piece, without changing ``Parameter.grad``."""
    parameters = [p for p in module.parameters() if p.requires_grad]
    logged: dict[str, Any] = {}

    def log(name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        if isinstance(value, (int, float, Tensor)):
            logged[name] = value.detach() if isinstance(value, Tensor) else value

    with ExitStack() as stack:
        stack.enter_context(without_side_effects(trainer, module))
        stack.enter_context(replaced(module, log=log))
        stack.enter_context(torch.enable_grad())
        if draw:
            torch.rand((), device=trainer.strategy.root_device)
            torch.rand(())
        loss = loss_of(trainer, module, copy.deepcopy(piece), 0)
        if loss is None:
            raise _CannotCheckError("training_step returned None.")
        gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
    return [g.float() for g in gradients if g is not None], logged


def _norm(tensors: Sequence[Tensor]) -> float:
    return float(torch.stack([tensor.norm() for tensor in tensors]).norm()) if tensors else 0.0
