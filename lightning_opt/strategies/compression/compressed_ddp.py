"""Compressed data-parallel training as a Lightning strategy."""

from __future__ import annotations

from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import LBFGS, Optimizer

from lightning_opt.core.arguments import at_least, fraction
from lightning_opt.core.loggers import log_scalars
from lightning_opt.core.report import Report
from lightning_opt.core.schedule import Schedule
from lightning_opt.core.sharding import is_dtensor
from lightning_opt.strategies.compression.choosing.auto import LOOK, AutoChoice
from lightning_opt.strategies.compression.choosing.cost_model import LATE_MARGIN_FOR_ADAM
from lightning_opt.strategies.compression.choosing.measurements import Scheme
from lightning_opt.strategies.compression.choosing.ramp import Ramp, default_steps
from lightning_opt.strategies.compression.codecs.compressors import (
    Compressor,
    Quantize,
    Threshold,
    TopK,
)
from lightning_opt.strategies.compression.exchange.momentum import check_optimizers
from lightning_opt.strategies.compression.exchange.two_stage import is_staged
from lightning_opt.strategies.compression.hook import CompressedReduction, reduce_bucket

CHECKPOINT_KEY = "lightning_opt.compressed_ddp"
"""Where a checkpoint keeps what the ranks had not yet sent."""

COMPRESSORS = ("auto", "topk", "threshold", "int8", "int4")

FALLBACKS = ("auto", "never", "always")

TOO_SPARSE_FOR_ADAM = 0.002


class CompressedDDPStrategy(DDPStrategy):
    """DDP that sends a hundredth of the bytes, or a quarter or an eighth of them.

    For networks that are slow against the model: 1 to 25 Gbit/s between machines. What is not sent
    in a step is kept on the rank and added to the next step's gradient (error feedback), so that
    nothing is lost, only late. All replicas stay bit-identical. Works with gloo on CPUs and NCCL on
    GPUs, accumulation, mixed precision, several optimizers, and whatever comes after the reduction,
    such as clipping.

    Compression costs processor time, which a fast network does not give back. So the warm-up
    measures the network, the backward pass and the compressors, and gradients are compressed only
    if that is predicted to save a tenth of a step; after a while the choice is compared with the
    uncompressed steps, and taken back if it does not pay. What was chosen is logged once, and
    :meth:`describe` tells more. ``fallback="never"`` compresses whatever the network is.

    If some rank's gradient holds a NaN or an infinity, all ranks get NaN for the whole bucket, so
    that a loss scaler or a guard skips the step on all of them, and no residual keeps any of it.

    Logged every ``every_n_steps`` optimizer steps, as means over the steps since the last time:

    ======================= ====================================================================
    ``comm/bytes``          bytes that this rank sends in a step, by the collectives' own count
    ``comm/ratio``          how many times more an uncompressed ring all-reduce would send
    ``comm/selected``       share of elements in the latest messages
    ``comm/residual_norm``  L2 norm of what this rank still has to send
    ``comm/seconds``        time of a step during which a bucket was on its way, decoding included
    ``comm/mode``           how most elements went: 0 uncompressed, 1 quantised, 2 threshold, 3
                            Top-K, 4 another compressor, 5 bfloat16
    ======================= ====================================================================

    A checkpoint keeps the mean of the ranks' residuals, as many numbers as there are parameters;
    it is taken up again at any number of ranks.

    Args:
        compressor: ``"topk"``, ``"threshold"``, ``"int8"``, ``"int4"``, an object such as
            ``Quantize(bits=8, block=256)``, or ``"auto"`` for what is the fastest of bfloat16,
            int8, int4 and Top-K, bucket by bucket. Top-K, by any name, must save a quarter of a
            step, and half with Adam.
        ratio: Share of the elements that Top-K sends; not used by the others.
        error_feedback: Keep what is not sent for the next step. Without it accuracy suffers; that
            is what this switch is there to show.
        warmup_steps: First backward passes that are not compressed: at least 2, or 3 with
            ``static_graph``, until DDP has settled how it arranges the gradients.
        ramp_steps: Steps after these in which Top-K goes from a quarter of the elements to
            ``ratio``, each stage sending a quarter of the one before. Early gradients change fast,
            and a late one does harm. None for half of the run, at most ``30 / ratio`` steps;
            ``10 / ratio`` where the run's length is not known.
        fallback: ``"auto"`` sends uncompressed where that is faster, ``"never"`` compresses in any
            case, ``"always"`` never compresses, to compare with.
        examine_every_n_steps: Backward passes from one look at the network to the next, unless
            there is nothing to choose from.
        sparse_stages_from: Number of ranks from which on Top-K travels in two stages: as many bytes
            for any number of ranks, but selected a second time.
        momentum_correction: Momentum to apply before compression instead of in the optimizer, which
            must then have none. Uncompressed, it is the momentum of :class:`torch.optim.SGD`.
        every_n_steps: Optimizer steps from one report to the next.
        process_group_backend: ``"gloo"``, ``"nccl"``, or None for what fits the device.
        **kwargs: What :class:`~lightning.pytorch.strategies.DDPStrategy` and
            :class:`~torch.nn.parallel.DistributedDataParallel` take.

    Raises:
        ValueError: For an unknown compressor, a ratio outside (0, 1], too few warm-up steps, a
            communication hook besides this one, or ``momentum_correction`` outside [0, 1), without
            error feedback or with ``find_unused_parameters``; in ``setup`` for LBFGS, sharded
            parameters, a backend that does not fit, or an optimizer with momentum besides
            ``momentum_correction``.

    Example:
        >>> import lightning as L
        >>> import lightning_opt as lo
        >>> strategy = lo.CompressedDDPStrategy("topk", ratio=0.01, static_graph=True)
        >>> trainer = L.Trainer(strategy=strategy, accelerator="cpu", devices=2, logger=False)
    """

    def __init__(
        self,
        compressor: str | Compressor = "topk",
        ratio: float = 0.01,
        error_feedback: bool = True,
        warmup_steps: int = 10,
        ramp_steps: int | None = None,
        fallback: Literal["auto", "never", "always"] = "auto",
        examine_every_n_steps: int = 500,
        sparse_stages_from: int = 32,
        momentum_correction: float | None = None,
        every_n_steps: int = 50,
        process_group_backend: str | None = None,
        **kwargs: Any,
    ) -> None:
        for name in ("ddp_comm_hook", "ddp_comm_state", "ddp_comm_wrapper"):
            if kwargs.get(name) is not None:
                raise ValueError(
                    f"CompressedDDPStrategy brings its own communication hook, so {name} cannot be "
                    "given. Use lightning.pytorch.strategies.DDPStrategy for a hook of your own."
                )
        super().__init__(process_group_backend=process_group_backend, **kwargs)
        self.compressor = resolve_compressor(compressor, ratio)
        self.error_feedback = error_feedback
        layout_steps = 3 if kwargs.get("static_graph") else 2
        self.warmup_steps = at_least("warmup_steps", warmup_steps, layout_steps)
        self.ramp_steps = None if ramp_steps is None else at_least("ramp_steps", ramp_steps, 0)
        length = default_steps(self.compressor) if self.ramp_steps is None else self.ramp_steps
        self._ramp = Ramp(self.compressor, length)
        if fallback not in FALLBACKS:
            raise ValueError(
                f"fallback must be one of {', '.join(map(repr, FALLBACKS))}, got {fallback!r}."
            )
        self.fallback = fallback
        self.schemes = schemes_of(compressor, self.compressor, fallback)
        self._first_choice = max(warmup_steps, layout_steps + LOOK)
        self.examine_every_n_steps = at_least("examine_every_n_steps", examine_every_n_steps, 1)
        self.sparse_stages_from = at_least("sparse_stages_from", sparse_stages_from, 2)
        self.momentum_correction = momentum_correction
        if momentum_correction is not None:
            fraction("momentum_correction", momentum_correction)
            _check_momentum(error_feedback, kwargs)
        self._schedule = Schedule(every_n_steps)
        self._optimizer_steps = 0
        self._reduction: CompressedReduction | None = None
        self._auto: AutoChoice | None = None
        self._resumed: dict[str, Any] | None = None

    def compressor_at(self, step: int) -> Compressor | None:
        """Return how backward pass number ``step`` (the first is 0) is compressed.

        That is, where there is nothing to choose from.
        """
        step -= self.warmup_steps
        return None if step < 0 or self.fallback == "always" else self._ramp.at(step)

    def on_train_start(self) -> None:
        """Settle the length of the ramp, now that the length of the run is known."""
        super().on_train_start()
        module = self.lightning_module
        assert module is not None
        if self.ramp_steps is None:
            planned = float(module.trainer.estimated_stepping_batches)
            # Ranks may have different numbers of batches.
            self._ramp.steps = default_steps(self.compressor, self.broadcast(planned))

    def describe(self) -> Report | None:
        """Return what was measured and chosen; None before that, and where there is no choice."""
        return None if self._auto is None else self._auto.report()

    def setup_environment(self) -> None:
        """Check the backend, then connect the processes."""
        backend = self._get_process_group_backend()
        if self.root_device.type == "cpu" and (
            "gloo" not in backend or not dist.is_gloo_available()
        ):
            raise ValueError(
                f"Compressed DDP on CPUs needs the process group backend 'gloo', got {backend!r}. "
                "Leave process_group_backend out, with a torch that was built with gloo."
            )
        super().setup_environment()

    def _register_ddp_hooks(self) -> None:
        # Lightning registers hooks on CUDA only; gloo takes them as well.
        model = self.model
        assert isinstance(model, DistributedDataParallel)
        module = self.lightning_module
        assert module is not None
        if any(map(is_dtensor, module.parameters())):
            raise ValueError(
                "Compressed DDP needs whole parameters on every rank, but this model's are sharded "
                "(DTensor). Use it without FSDP or tensor parallelism, or use their strategies "
                "without compression."
            )
        if isinstance(self.compressor, TopK):
            # Refuses a k above the model now, one above a bucket at the first compressed step.
            self.compressor.capacity(sum(parameter.numel() for parameter in module.parameters()))
        momentum = self.momentum_correction
        sparse = any(getattr(part, "sparse", False) for part in module.modules())
        if momentum is not None and sparse:
            raise ValueError(
                "momentum_correction does not work with sparse gradients. Use sparse=False in "
                "embeddings, or leave it out."
            )
        if self.world_size == 1 and momentum is None:
            return  # there is nobody to send to
        may_skip = model.find_unused_parameters and not model.static_graph
        if len(self.schemes) > 1 and self.world_size > 1:
            self._auto = AutoChoice(
                self.schemes,
                first=self._first_choice,
                every=self.examine_every_n_steps,
                staged=partial(
                    is_staged,
                    world=self.world_size,
                    sparse_from=self.sparse_stages_from,
                    may_skip=may_skip,
                ),
                ramp=self._ramp,
            )
        self._reduction = CompressedReduction(
            {parameter: name for name, parameter in module.named_parameters()},
            self.compressor_at if self.world_size > 1 else _uncompressed,
            error_feedback=self.error_feedback,
            loss_scale=self._loss_scale,
            may_skip=may_skip,
            auto=self._auto,
            sparse_stages_from=self.sparse_stages_from,
            momentum=momentum,
        )
        if self._resumed is not None:
            self._reduction.load_state_dict(self._resumed)
            self._resumed = None
        model.register_comm_hook(self._reduction, reduce_bucket)

    def setup_optimizers(self, trainer: Any) -> None:
        """Make the optimizers, and look whether compression suits them."""
        super().setup_optimizers(trainer)
        for optimizer in self.optimizers:
            if isinstance(optimizer, LBFGS):
                raise ValueError(
                    "Compressed DDP does not work with torch.optim.LBFGS: it evaluates the "
                    "gradient several times within one step and needs it exact. Use strategy='ddp'."
                )
        if self.momentum_correction is not None:
            check_optimizers(self.optimizers)
        adam = any("adam" in type(optimizer).__name__.lower() for optimizer in self.optimizers)
        if adam and self._auto is not None:
            self._auto.late_margin = LATE_MARGIN_FOR_ADAM
        ratio = self.compressor.ratio if isinstance(self.compressor, TopK) else 1.0
        if adam and self.fallback != "always" and ratio <= TOO_SPARSE_FOR_ADAM:
            rank_zero_warn(
                f"Sending {ratio:.2%} of the gradients with an Adam optimizer is known to lose "
                "accuracy: most elements then look as if they were zero for hundreds of steps, and "
                "the second moments decay. Use ratio=0.01, or SGD with momentum."
            )

    def _loss_scale(self) -> float:
        scaler = getattr(self.precision_plugin, "scaler", None)
        return 1.0 if scaler is None else float(scaler.get_scale())

    def optimizer_step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Take the step, and log what was sent when that is due."""
        output = super().optimizer_step(optimizer, *args, **kwargs)
        self._optimizer_steps += 1
        if self._reduction is not None and self._schedule.is_due(self._optimizer_steps):
            module = self.lightning_module
            assert module is not None
            values = self._reduction.read()
            log_scalars(module.trainer, {f"comm/{key}": value for key, value in values.items()})
        return output

    def save_checkpoint(self, checkpoint: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        """Save a checkpoint with what the ranks have not yet sent. All ranks take part."""
        # A checkpoint of weights alone is no place to resume from.
        if self._reduction is not None and "optimizer_states" in checkpoint:
            checkpoint[CHECKPOINT_KEY] = self._reduction.state_dict()
        super().save_checkpoint(checkpoint, *args, **kwargs)

    def load_checkpoint(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Load a checkpoint, and keep the residuals for when the model is wrapped."""
        checkpoint: dict[str, Any] = super().load_checkpoint(*args, **kwargs)
        self._resumed = checkpoint.get(CHECKPOINT_KEY)
        module = self.lightning_module
        fitting = module is not None and module.trainer.state.fn == TrainerFn.FITTING
        velocities = (self._resumed or {}).get("velocities")
        if fitting and self._resumed is None:
            rank_zero_warn(
                "This checkpoint was written without compressed DDP, so there is nothing to resume "
                f"that was not yet sent. Compression begins after {self.warmup_steps} steps."
            )
        elif fitting and self.momentum_correction is not None and not velocities:
            rank_zero_warn(
                "This checkpoint was written without momentum_correction, so the momentum begins "
                "anew. An optimizer's own momentum in the checkpoint is not used."
            )
        return checkpoint

    def teardown(self) -> None:
        """Let go of the model and the residuals."""
        if self._reduction is not None:
            self._reduction.close()
            self._reduction = None
        super().teardown()


def _uncompressed(step: int) -> None:
    """Return that a step is not compressed."""


def _check_momentum(error_feedback: bool, arguments: dict[str, Any]) -> None:
    if not error_feedback:
        raise ValueError("momentum_correction needs error_feedback=True.")
    if arguments.get("find_unused_parameters") and not arguments.get("static_graph"):
        raise ValueError(
            "momentum_correction cannot be used with find_unused_parameters=True: a rank does not "
            "know whether the others used a parameter, and so whether its velocity goes on. Leave "
            "one of them out, or use static_graph=True."
        )


def resolve_compressor(compressor: str | Compressor, ratio: float) -> Compressor:
    """Return the compressor that a name stands for.

    Raises:
        ValueError: For an unknown name or a ratio outside (0, 1].
    """
    named = TopK(ratio)  # checks the ratio, whoever uses it
    if isinstance(compressor, Compressor):
        return compressor
    if compressor in ("topk", "auto"):
        return named
    if compressor == "threshold":
        return Threshold()
    if compressor in ("int8", "int4"):
        return Quantize(bits=8 if compressor == "int8" else 4)
    raise ValueError(
        f"compressor must be one of {', '.join(map(repr, COMPRESSORS))} or a Compressor such as "
        f"TopK(ratio=0.01), got {compressor!r}."
    )


def schemes_of(name: str | Compressor, compressor: Compressor, fallback: str) -> list[Scheme]:
    """Return what there is to choose from, the gentlest for the gradients first.

    Args:
        name: What the user has asked for.
        compressor: What that stands for; for ``"auto"`` the harshest.
        fallback: See :class:`CompressedDDPStrategy`.
    """
    if fallback == "always":
        return [None]
    dense: list[Scheme] = [None] if fallback == "auto" else []
    between: list[Scheme] = []
    if name == "auto":
        between = [torch.bfloat16, Quantize(bits=8), Quantize(bits=4)]
    return [*dense, *between, compressor]
