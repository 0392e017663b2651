"""Compressed data-parallel training as a Lightning strategy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Optimizer

from lightning_opt.core.arguments import check_at_least, check_one_of
from lightning_opt.core.measure.reading import Schedule
from lightning_opt.core.numerics.norms import parameters_of
from lightning_opt.core.output.loggers import log_scalars
from lightning_opt.core.output.report import Report
from lightning_opt.strategies.compression.buckets import clip_locally
from lightning_opt.strategies.compression.choice import AutoChoice, Ramp, Scheme
from lightning_opt.strategies.compression.exchange import all_reduce_mean
from lightning_opt.strategies.compression.hook import CompressedReduction
from lightning_opt.strategies.compressors import Compressor, Quantize, Threshold, TopK
from lightning_opt.strategies.own_exchange import OwnExchangeStrategy, OwnHookStrategy
from lightning_opt.trainer.lightning import is_overridden
from lightning_opt.trainer.run_callback import RunCallback, raise_if_lbfgs


class CompressedDDPStrategy(OwnExchangeStrategy):
    """DDP that sends compressed gradients: from half to 1/164 of the bytes.

    For networks that are slow relative to the model: 1 to 10 Gbit/s between machines. The unsent
    rest of a gradient (the residual) stays on the rank and is added to the next step's gradient
    (error feedback), so nothing is lost, but some of it is sent late. All replicas stay
    bit-identical. It works with gloo on CPUs and NCCL on GPUs, accumulation, mixed precision and
    several optimizers.

    A named compressor is always used. ``"auto"`` tries each scheme for 8 steps after the warm-up,
    and chooses once: uncompressed, bfloat16, int8, int4 or, if all optimizers are SGD and nothing
    clips reduced gradients, Top-K. It chooses the least compressed scheme that no stronger one
    beats by 10% of a step (Top-K: 25%). The choice is logged, :meth:`describe` returns the step
    times, and a resumed run keeps the choice.

    If a guard or a loss scaler skips a step, the residual does not change. If any rank's
    gradient has a NaN or an infinity, all ranks get NaN for the whole bucket, so all of them skip
    the step.

    With Top-K and Threshold, gradients are clipped before they enter the residual: with
    ``Trainer(gradient_clip_val=c)`` each of N ranks clips each bucket at ``c / sqrt(N)``, and the
    sum is clipped once more. Adam with either is experimental: late elements arrive as one large
    sum, which disturbs the second moments.

    Logged every ``every_n_steps`` optimizer steps, with bytes as means over the steps in between:

    ======================= ====================================================================
    ``comm/bytes``          computed bytes that this rank sends per step
    ``comm/ratio``          bytes of an uncompressed ring all-reduce, relative to ``comm/bytes``
    ``comm/selected``       share of elements in the latest messages
    ``comm/residual_norm``  L2 norm of this rank's residual
    ``comm/seconds``        time in the latest step with any bucket in flight, decoding included; on
                            a GPU by the GPU's clock
    ``comm/mode``           how the latest step was sent: 0 uncompressed, 1 quantized, 2 threshold,
                            3 Top-K, 4 another compressor, 5 bfloat16
    ======================= ====================================================================

    A checkpoint keeps the mean of the ranks' residuals, one number per parameter element, and can
    be resumed with any number of ranks.

    Args:
        compressor: ``"topk"``, ``"threshold"``, ``"int8"``, ``"int4"``, an object such as
            ``Quantize(bits=8, block=256)``, or ``"auto"``.
        ratio: Share of the elements that Top-K sends; the others ignore it.
        error_feedback: Keep the residual. False is for comparison: accuracy suffers.
        warmup_steps: Number of uncompressed first backward passes: at least 2, or 3 with
            ``static_graph``, because DDP rearranges its buckets after the first ones.
        ramp_steps: Steps after the warm-up in which Top-K's share falls from 25% to ``ratio``, by a
            factor of 4 per stage. Early gradients change fast, so sending them late does harm. None
            for half of the run, at most ``30 / ratio`` steps.
        every_n_steps: Optimizer steps between reports.
        **kwargs: Arguments of :class:`~lightning.pytorch.strategies.DDPStrategy` and
            :class:`~torch.nn.parallel.DistributedDataParallel`. On a CPU, ``bucket_cap_mb`` is 8
            for 8 or 4 bits unless you give another.

    Raises:
        ValueError: For an unknown compressor, a ratio outside (0, 1], too few warm-up steps, or
            another communication hook; in ``setup`` for LBFGS, sharded parameters, or if a callback
            or a ``configure_gradient_clipping`` clips reduced gradients with Top-K or Threshold.

    Example:
        >>> import lightning as L
        >>> import lightning_opt as lo
        >>> strategy = lo.CompressedDDPStrategy("topk", ratio=0.01, static_graph=True)
        >>> trainer = L.Trainer(strategy=strategy, accelerator="cpu", devices=2, logger=False)
    """

    title = "compressed DDP"
    checkpoint_key = "lightning_opt.compressed_ddp"

    def __init__(
        self,
        compressor: str | Compressor = "topk",
        ratio: float = 0.01,
        error_feedback: bool = True,
        warmup_steps: int = 10,
        ramp_steps: int | None = None,
        every_n_steps: int = 50,
        **kwargs: Any,
    ) -> None:
        self.compressor = resolve_compressor(compressor, ratio)
        super().__init__(**kwargs)
        self.chooses = compressor == "auto"
        self.error_feedback = error_feedback
        layout_steps = 3 if kwargs.get("static_graph") else 2
        self.warmup_steps = check_at_least("warmup_steps", warmup_steps, layout_steps)
        if ramp_steps is not None:
            check_at_least("ramp_steps", ramp_steps, 0)
        self._ramp = Ramp(self.compressor, ramp_steps)
        self._schedule = Schedule(every_n_steps)
        self._optimizer_steps = 0
        self._updated = False
        self._reduction: CompressedReduction | None = None
        self._auto: AutoChoice | None = None

    def _scheme_at(self, step: int) -> Scheme:
        if self._auto is None:
            return None if step < self.warmup_steps else self._ramp.next()
        scheme = self._auto.begin_step()
        is_chosen = self._auto.choice is not None and scheme is self.compressor
        return self._ramp.next() if is_chosen else scheme

    def on_train_start(self) -> None:
        """Set the length of the ramp, now that the length of the run is known."""
        super().on_train_start()
        planned = float(self._module.trainer.estimated_stepping_batches)
        # Ranks may have different numbers of batches.
        self._ramp.set_length(self.broadcast(planned))

    def describe(self) -> Report | None:
        """Return the step times and the choice of ``"auto"``; None before the choice."""
        return None if self._auto is None else self._auto.report()

    def configure_ddp(self) -> None:
        """Wrap the model. With 8 or 4 bits on a CPU, small buckets overlap sending and encoding."""
        if isinstance(self.compressor, Quantize) and self.root_device.type == "cpu":
            self._ddp_kwargs.setdefault("bucket_cap_mb", 8)
        super().configure_ddp()

    def _register_ddp_hooks(self) -> None:
        # Lightning registers hooks on CUDA only, but gloo supports them too.
        model = self.model
        assert isinstance(model, DistributedDataParallel)
        self.raise_if_sharded()
        self._auto, self._ramp.taken = None, 0
        if self.world_size == 1:
            return  # nothing to exchange
        schemes: list[Scheme] = [self.compressor]
        if self.chooses:
            schemes = [None, torch.bfloat16, Quantize(bits=8), Quantize(bits=4), self.compressor]
            self._auto = AutoChoice(schemes, self.warmup_steps, self.root_device)
        self._reduction = CompressedReduction(
            {parameter: name for name, parameter in self._module.named_parameters()},
            schemes,
            self._scheme_at,
            error_feedback=self.error_feedback,
            loss_scale=self._loss_scale,
            clip=self._clip,
            may_skip=model.find_unused_parameters and not model.static_graph,
        )
        self._undo.callback(setattr, self, "_reduction", None)
        self._undo.callback(self._reduction.close)
        model.register_comm_hook(self._reduction, CompressedReduction.reduce)

    def setup_optimizers(self, trainer: Any) -> None:
        """Create the optimizers, and check them and the callbacks."""
        super().setup_optimizers(trainer)
        raise_if_lbfgs("Compressed DDP", self.optimizers)
        clipping = [
            type(callback).__name__
            for callback in trainer.callbacks
            if isinstance(callback, RunCallback) and callback.rescales_gradients
        ]
        if is_overridden("configure_gradient_clipping", self.lightning_module):
            clipping.append(f"{type(self.lightning_module).__name__}.configure_gradient_clipping")
        only_sgd = all(isinstance(optimizer, SGD) for optimizer in self.optimizers)
        if self._auto is not None and (clipping or not only_sgd):
            self._auto.schemes.pop()  # Top-K, whose late gradients harm Adam and clipping
        if self._reduction is not None and not self.chooses and self.compressor.late and clipping:
            raise ValueError(
                f"{clipping[0]} clips reduced gradients, but {self.compressor} sends part of an "
                "outlier in later steps, so clipping cannot remove it. Use "
                "Trainer(gradient_clip_val=...), which clips before compression, or 'ddp_int8'."
            )
        if self._reduction is not None:
            if self._resumed is not None:
                self._load_state(self._resumed)
            for optimizer in self.optimizers:
                self._undo.callback(optimizer.register_step_post_hook(self._after_update).remove)
        self._resumed = None

    def _loss_scale(self) -> Tensor:
        scaler = getattr(self.precision_plugin, "scaler", None)
        one = torch.ones((), device=self.root_device)
        return one if scaler is None else scaler.scale(one)  # get_scale() would wait

    def _clip(self, gradient: Tensor, scale: Tensor) -> None:
        trainer = self._module.trainer
        bound, algorithm = trainer.gradient_clip_val, trainer.gradient_clip_algorithm
        if bound:
            clip_locally(gradient, scale * bound, algorithm or "norm", self.world_size)

    def _after_update(self, optimizer: Optimizer, *_: Any) -> None:
        """Record whether the optimizer's step applied any gradient."""
        parameters = parameters_of(optimizer)
        self._updated = any(parameter.grad is not None for parameter in parameters)
        # Fused optimizers skip the update if `found_inf` is positive.
        found_inf = getattr(optimizer, "found_inf", None)
        if found_inf is not None and self._reduction is not None:
            self._reduction.skip(parameters, found_inf)

    def optimizer_step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Take the step, record whether it was applied, and log if a report is due."""
        self._updated = False
        output = super().optimizer_step(optimizer, *args, **kwargs)
        self._optimizer_steps += 1
        if self._reduction is not None:
            if not self._updated:
                self._reduction.skip(parameters_of(optimizer))
            if self._schedule.is_due(self._optimizer_steps):
                log_scalars(self._module.trainer, self._reduction.read())
        return output

    def state_to_save(self) -> dict[str, Any] | None:
        """Return the residuals and the choice."""
        if self._reduction is None:
            return None
        choice = None if self._auto is None else self._auto.name
        return {**self._reduction.state_dict(), "choice": choice, "ramped": self._ramp.taken}

    def _load_state(self, state: Mapping[str, Any]) -> None:
        assert self._reduction is not None
        self._reduction.load_state_dict(state)
        self._ramp.taken = state.get("ramped", 0)
        if self._auto is not None:
            self._auto.restore(state.get("choice"))

    def load_checkpoint(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Load a checkpoint. Residuals are restored now, or when the optimizers are created."""
        checkpoint = super().load_checkpoint(*args, **kwargs)
        if self._reduction is not None:  # during a run, for example by a learning-rate finder
            self._load_state(self._resumed or {})
            self._resumed = None
        return checkpoint

    def reset_residuals(self) -> None:
        """Discard the residuals, after weights have been restored."""
        if self._reduction is not None:
            self._reduction.reset()


class HookedDDPStrategy(OwnHookStrategy):
    """DDP that sends gradients in a half-precision dtype, with gloo too.

    Args:
        hook: ``"fp16"`` or ``"bf16"``: the dtype that gradients are sent in.
        **kwargs: Arguments of :class:`~lightning.pytorch.strategies.DDPStrategy` and
            :class:`~torch.nn.parallel.DistributedDataParallel`.

    Raises:
        ValueError: For an unknown hook, or another communication hook.
    """

    def __init__(self, hook: Literal["fp16", "bf16"] = "fp16", **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.hook = check_one_of("hook", hook, ("fp16", "bf16"))

    def _register_ddp_hooks(self) -> None:
        model = self.model
        assert isinstance(model, DistributedDataParallel)
        dtype = torch.float16 if self.hook == "fp16" else torch.bfloat16
        model.register_comm_hook(
            dtype, lambda dtype, bucket: all_reduce_mean(bucket.buffer(), dtype)
        )


def resolve_compressor(compressor: str | Compressor, ratio: float) -> Compressor:
    """Return the compressor of this name; for ``"auto"``, the strongest.

    Raises:
        ValueError: For an unknown name or a ratio outside (0, 1].
    """
    sparse = TopK(ratio)  # checks the ratio
    named: dict[object, Compressor] = {
        "auto": sparse,
        "topk": sparse,
        "threshold": Threshold(),
        "int8": Quantize(bits=8),
        "int4": Quantize(bits=4),
    }
    if isinstance(compressor, Compressor):
        return compressor
    if compressor not in named:
        raise ValueError(
            f"compressor must be one of {', '.join(map(repr, named))} or a Compressor such as "
            f"TopK(ratio=0.01), got {compressor!r}."
        )
    return named[compressor]
