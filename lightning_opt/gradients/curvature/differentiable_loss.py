"""Recompute the training loss so that it is twice differentiable, without side effects."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from lightning_opt.core.measure.exhaustion import is_out_of_memory
from lightning_opt.core.modules.batches import UnsplittableBatchError, cut, read_batch
from lightning_opt.core.modules.compiling import run_eagerly
from lightning_opt.core.modules.lazy import raise_if_lazy
from lightning_opt.core.modules.patching import replaced
from lightning_opt.core.modules.sharding import Groups, reduce_over
from lightning_opt.core.modules.trial import copy_batch, loss_of, without_side_effects
from lightning_opt.trainer.lightning import DeepSpeedStrategy, FSDPStrategy, ModelParallelStrategy
from lightning_opt.trainer.run_callback import raise_if_dataloader_iter

if TYPE_CHECKING:
    import lightning.pytorch as pl


def check_run(owner: str, trainer: pl.Trainer, module: pl.LightningModule) -> None:
    """Raise if second derivatives of the loss cannot be computed. Call it in ``setup``."""
    if isinstance(trainer.strategy, (DeepSpeedStrategy, FSDPStrategy, ModelParallelStrategy)):
        raise ValueError(
            f"{owner} does not work with {type(trainer.strategy).__name__}: sharded parameters are "
            "gathered for one backward pass and gone in the second. Use one device or DDP."
        )
    if not module.automatic_optimization:
        raise ValueError(
            f"{owner} does not work with manual optimisation, where training_step returns no loss "
            "to differentiate. Use automatic optimisation, or hessian_diagonal in training_step."
        )
    raise_if_dataloader_iter(owner, module, "whose loss can be computed again.")
    if trainer.precision.startswith(("bf16-true", "16-true", "transformer-engine")):
        raise ValueError(
            f"{owner} needs weights in float32, and precision is {trainer.precision!r}. Second "
            "derivatives lose their digits in half precision; use 'bf16-mixed' or '16-mixed'."
        )


def check_parameters(owner: str, module: nn.Module) -> None:
    """Raise if a gradient is sparse or complex. Call it in ``on_fit_start``."""
    for name, parameter in module.named_parameters():
        if parameter.is_complex():
            raise ValueError(
                f"{owner} needs real parameters, and {name!r} is {parameter.dtype}. Keep its real "
                "and imaginary parts as real parameters (torch.view_as_complex joins them)."
            )
    for name, part in module.named_modules():
        if isinstance(part, (nn.Embedding, nn.EmbeddingBag)) and part.sparse:
            raise ValueError(
                f"{owner} needs dense gradients, and those of {name!r} are sparse. Use "
                "sparse=False there."
            )


@contextmanager
def twice_differentiable_loss(
    owner: str,
    trainer: pl.Trainer,
    module: pl.LightningModule,
    batch: Any,
    batch_idx: int,
    fraction: float,
) -> Iterator[Tensor | None]:
    """Yield the loss of a part of the batch with its graph, and restore all state afterwards.

    The loss is computed without autocast, DDP and compilation, and with an attention kernel that
    has a second derivative. It is None if ``training_step`` returns None.

    The part is the first ``fraction`` of the samples, rounded down, at least one. The whole batch
    is used, with a warning, if it cannot be split (a graph, for example), or if the step fails on
    the part (BatchNorm needs two samples). ``owner`` is the callback's name.

    Raises:
        ValueError: If a lazy layer has no weights yet.
        RuntimeError: If the loss cannot be differentiated twice inside the context.
    """
    raise_if_lazy(owner, module)  # only now: a sanity check may initialize lazy weights
    part, why = batch, f"those of type {type(batch).__name__} cannot be split into samples"
    if fraction < 1:
        with suppress(UnsplittableBatchError):
            reading = read_batch(batch)
            samples = max(1, int(fraction * reading.samples + 1e-9))  # 1/49 * 98 is below 2
            part = cut(batch, 0, samples, reading.lists)
    with ExitStack() as stack:
        stack.enter_context(without_side_effects(trainer, module))
        stack.enter_context(torch.enable_grad())
        stack.enter_context(sdpa_kernel(SDPBackend.MATH))  # other kernels have no second derivative
        stack.enter_context(run_eagerly())  # compiled graphs have no second derivative
        plugin = trainer.precision_plugin
        context = partial(_without_autocast, plugin.train_step_context, module.device.type)
        with replaced(plugin, train_step_context=context):
            loss = None
            if part is not batch:
                try:
                    loss = loss_of(trainer, module, copy_batch(part), batch_idx)
                except Exception as error:  # noqa: BLE001 - raised again if all of the batch fails
                    part, why = batch, f"the step failed with a part of one ({error})"
            if part is batch:
                loss = loss_of(trainer, module, copy_batch(batch), batch_idx)
                if fraction < 1:
                    advice = "Set fraction=1.0 to silence this warning."
                    rank_zero_warn(f"{owner} uses whole batches: {why}. {advice}")
        try:
            yield loss
        except RuntimeError as error:
            if is_out_of_memory(error):
                raise
            raise RuntimeError(
                f"{owner} could not differentiate the loss twice: {error} Replace the operator by "
                "one with a second derivative (a fused or custom kernel often has none), or remove "
                "the callback."
            ) from error


@contextmanager
def _without_autocast(context: Callable[[], Any], device: str) -> Iterator[None]:
    with context(), torch.autocast(device, enabled=False):
        yield


def mean_over_ranks(parts: list[Tensor], groups: Groups) -> list[Tensor]:
    """Return the mean of each tensor over ranks, by one all-reduce."""
    if not groups:
        return parts
    flat = reduce_over(torch.cat([part.float().flatten() for part in parts]), groups)
    flat /= dist.get_world_size(groups[0])
    own = flat.split([part.numel() for part in parts])
    return [mean.view_as(part) for mean, part in zip(own, parts, strict=True)]
