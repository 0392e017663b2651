"""The callback that divides gradients by an average of the Hessian's diagonal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_opt.core.arguments import (
    check_at_least,
    check_between,
    check_fraction,
    check_positive,
    check_share,
)
from lightning_opt.core.measure.reading import Schedule
from lightning_opt.core.modules.sharding import step_groups
from lightning_opt.core.modules.trial import copy_batch
from lightning_opt.core.numerics.scalars import Scalar
from lightning_opt.core.output.loggers import log_scalars
from lightning_opt.core.output.report import Report
from lightning_opt.gradients.curvature.differentiable_loss import (
    check_parameters,
    check_run,
    mean_over_ranks,
    twice_differentiable_loss,
)
from lightning_opt.gradients.curvature.hessian import hessian_product, sample_diagonal
from lightning_opt.gradients.gradient_callback import GradientCallback, plain_name

if TYPE_CHECKING:
    import lightning.pytorch as pl

NAME = "CurvaturePreconditioner"
MIN_WEIGHT_SUM, MAX_FACTOR = 1e-30, 1e30


class DiagonalPreconditioner:
    """Divides gradients by the averaged diagonal, and bounds the result.

    The arguments are those of :class:`CurvaturePreconditioner`. A non-finite gradient stays
    non-finite, so that a guard or a loss scaler detects it.
    """

    def __init__(self, beta: float, power: float, damping: float, clip: float | None) -> None:
        self.beta = check_fraction("beta", beta)
        self.power = check_between("power", power, 0.0, 1.0)
        self.damping = check_positive("damping", damping)
        self.clip = None if clip is None else check_positive("clip", clip)
        self._average: dict[str, Tensor] = {}
        self._weight_sum: dict[str, Tensor] = {}
        self._factors: dict[str, Tensor] = {}

    @torch.no_grad()
    def update(self, diagonal: Mapping[str, Tensor]) -> None:
        """Add an estimate by parameter name if it is finite. Never waits for the device."""
        estimates = [part.float() for part in diagonal.values()]
        finite = torch.stack([torch.isfinite(part).all() for part in estimates]).all()
        share = 1.0 - self.beta
        for name, new in zip(diagonal, estimates, strict=True):
            # A loaded average is on the host.
            old = self._average.get(name, torch.zeros_like(new)).to(new.device)
            weight_sum = self._weight_sum.get(name, new.new_zeros(())).to(new.device)
            # `where` is needed because NaN times a weight of zero is NaN.
            self._average[name] = old.lerp(torch.where(finite, new, old), share)
            self._weight_sum[name] = weight_sum.lerp(torch.where(finite, 1.0, weight_sum), share)
        self._factors = {}

    @torch.no_grad()
    def apply(self, names: Sequence[str], gradients: Sequence[Tensor], scale: Scalar = 1.0) -> None:
        """Precondition ``gradients`` in place. ``scale`` is the loss scale in them.

        A gradient without an estimate is only clamped.
        """
        for name, gradient in zip(names, gradients, strict=True):
            if not gradient.numel():
                continue  # an empty tensor has no largest magnitude
            bound = self.clip
            if bound is not None:
                # 0 times infinity makes the bound NaN. A finite bound would hide the infinity.
                bound = bound * scale + 0.0 * torch.linalg.vector_norm(gradient, torch.inf)
            if name in self._average:
                if name not in self._factors:
                    self._factors[name] = self._factor(name, gradient)
                gradient.mul_(self._factors[name])
            if bound is not None:
                gradient.clamp_(-bound, bound)

    def average(self) -> dict[str, Tensor]:
        """Return the bias-corrected average by name, in float32."""
        return {name: self._corrected(name) for name in self._average}

    def _corrected(self, name: str) -> Tensor:
        return self._average[name] / self._weight_sum[name].clamp_min(MIN_WEIGHT_SUM)

    def _factor(self, name: str, like: Tensor) -> Tensor:
        divisor = self._corrected(name).abs_().pow_(self.power).add_(self.damping)
        factor = divisor.reciprocal_().clamp_max_(MAX_FACTOR)
        return torch.where(self._weight_sum[name] > 0, factor, 1.0).to(like)

    def state_dict(self) -> dict[str, Any]:
        return {"average": dict(self._average), "mass": dict(self._weight_sum)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._average, self._weight_sum = dict(state_dict["average"]), dict(state_dict["mass"])
        self._factors = {}


class CurvaturePreconditioner(GradientCallback):
    r"""Divides gradients by an average of the Hessian's diagonal before each optimizer step.

    Every ``every_n_steps`` steps the loss of a part of the training batch is differentiated twice,
    which gives one unbiased estimate of the diagonal (Hutchinson's estimator). Every step uses the
    exponential average :math:`h` of the estimates:

    .. math:: g \leftarrow \mathrm{clip}\left(g / (|h|^p + d), \pm c\right).

    With SGD this is a diagonal Newton step. Steep and flat directions move at the same rate, so
    retune the learning rate: at 1, a step reaches the minimum along each axis. Optimizers that
    divide by the size of the gradient (Adam, AdamW) undo most of the effect.

    The extra pass restores random state, BatchNorm statistics, metrics and logs. It runs in float32
    without autocast or loss scale. Under DDP each rank uses its own batch and signs, and one
    all-reduce averages the estimates. The callback stores two tensors of the size of the
    parameters. During the extra pass it also holds the graph of a double backward pass.

    Logged every ``log_every_n_steps`` steps:

    ========================== =================================================================
    ``precondition/curvature`` mean of :math:`|h|` over all elements
    ``precondition/negative``  share of the elements whose :math:`h` is negative
    ``precondition/clipped``   share of the gradient's elements at the bound
    ========================== =================================================================

    Args:
        every_n_steps: Optimizer steps between estimates, at least 1, from the first step on.
        beta: Decay of the average, in [0, 1).
        power: :math:`p`, in [0, 1]: 1 is a Newton step along each axis, 0.5 divides by the
            square root.
        damping: :math:`d`, above 0.
        clip: :math:`c`, above 0: the largest change of an element per step at a learning rate of 1;
            None for no bound. Flat and noisy directions reach it, and then move as in sign descent.
        fraction: Share of the batch's samples used for the estimate, above 0 and at most 1.
        log_every_n_steps: Steps between logged values, at least 1.

    Raises:
        ValueError: In ``__init__`` for settings out of range; in ``setup`` under FSDP, DeepSpeed
            and ModelParallelStrategy, with manual optimisation, and with half-precision weights;
            in ``on_fit_start`` for LBFGS, complex weights and embeddings with sparse gradients.
        RuntimeError: At the first step, if an operator has no second derivative.

    References:
        Liu, H., Li, Z., Hall, D., Liang, P. and Ma, T. (2024). Sophia: a scalable stochastic
        second-order optimizer for language model pre-training. ICLR.

        Yao, Z., Gholami, A., Shen, S., Mustafa, M., Keutzer, K. and Mahoney, M. (2021). AdaHessian:
        an adaptive second order optimizer for machine learning. AAAI.

    Example:
        >>> import lightning as L
        >>> import lightning_opt as lo
        >>> trainer = L.Trainer(callbacks=[lo.CurvaturePreconditioner()], logger=False)
    """

    rescales_gradients = True

    def __init__(
        self,
        every_n_steps: int = 10,
        beta: float = 0.99,
        power: float = 1.0,
        damping: float = 1e-8,
        clip: float | None = 1.0,
        fraction: float = 0.25,
        log_every_n_steps: int = 50,
    ) -> None:
        super().__init__()
        self._preconditioner = DiagonalPreconditioner(beta, power, damping, clip)
        self.every_n_steps = check_at_least("every_n_steps", every_n_steps, 1)
        self.fraction = check_share("fraction", fraction)
        self._schedule = Schedule(check_at_least("log_every_n_steps", log_every_n_steps, 1))
        self._steps = 0
        self._latest: dict[str, float] = {}
        self._batch: tuple[Any, int] | None = None

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Check strategy, precision and optimisation mode."""
        super().setup(trainer, pl_module, stage)
        if stage == "fit":
            check_run(NAME, trainer, pl_module)

    def reset_for_model(self, pl_module: pl.LightningModule) -> None:
        """Reset the average."""
        self._steps, self._latest = 0, {}
        self._preconditioner.load_state_dict({"average": {}, "mass": {}})

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Check the parameters."""
        super().on_fit_start(trainer, pl_module)
        check_parameters(NAME, pl_module)

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Copy the batch for the estimate: ``training_step`` may change it."""
        if self._steps % self.every_n_steps == 0:
            self._batch = (copy_batch(batch), batch_idx)

    def on_train_batch_end(self, *args: Any, **kwargs: Any) -> None:
        """Drop the batch."""
        self._batch = None

    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Optimizer
    ) -> None:
        """Estimate the diagonal if it is due, then precondition the gradients."""
        gradients, scale = self.collect(trainer, optimizer)
        if not gradients.tensors:
            return  # `training_step` returned no loss, or a guard skips the step
        if self._steps % self.every_n_steps == 0:
            self._estimate(trainer, pl_module)
        self._steps += 1
        names = [self.names[parameter] for parameter in gradients.parameters]
        self._preconditioner.apply(names, gradients.tensors, scale)
        if self._schedule.is_due(self._steps):
            self._latest = self._measure(gradients.tensors, scale)
            log_scalars(trainer, {f"precondition/{k}": v for k, v in self._latest.items()})

    def _estimate(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        params = {
            self.names.get(p, plain_name(name)): p  # pruning renames parameters in mid-run
            for name, p in module.named_parameters()
            if p.requires_grad
        }
        assert self._batch is not None
        # Seeded by the step, so that a resumed run draws the same signs.
        seed = self._steps // self.every_n_steps * trainer.world_size + trainer.global_rank
        generator = torch.Generator(module.device).manual_seed(seed)
        with twice_differentiable_loss(NAME, trainer, module, *self._batch, self.fraction) as loss:
            product = hessian_product(loss, list(params.values()))
            sample = sample_diagonal(product, list(params.values()), generator)
            has_loss = sample[0].new_tensor(loss is not None)
            del product, loss
        *mean, share = mean_over_ranks([*sample, has_loss], step_groups(trainer))
        # `update` ignores the NaN of a step in which no rank has a loss.
        estimate = [torch.where(share > 0, part, torch.nan) for part in mean]
        self._preconditioner.update(dict(zip(params, estimate, strict=True)))

    def _measure(self, tensors: list[Tensor], scale: Any) -> dict[str, float]:
        averages = self._preconditioner.average().values()
        count = sum(part.numel() for part in averages)
        mean_curvature = torch.stack([part.abs().sum() for part in averages]).sum() / count
        negative = torch.stack([(part < 0).sum() for part in averages]).sum() / count
        measured = {"curvature": float(mean_curvature), "negative": float(negative)}
        if self._preconditioner.clip is not None:
            bound = self._preconditioner.clip * scale
            clipped = torch.stack([(part.abs() >= bound).sum() for part in tensors]).sum()
            measured["clipped"] = float(clipped) / sum(part.numel() for part in tensors)
        return measured

    def report(self) -> Report:
        """Return the number of steps and estimates, and the latest logged values."""
        estimates = -(-self._steps // self.every_n_steps)
        return Report(NAME, [{"steps": self._steps, "estimates": estimates, **self._latest}])

    def release(self, trainer: pl.Trainer) -> None:
        """Drop references to model and batch."""
        super().release(trainer)
        self._batch = None

    def state_dict(self) -> dict[str, Any]:
        """Return the number of steps and the averages."""
        return {"steps": self._steps, **self._preconditioner.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the result of :meth:`state_dict`."""
        self._steps = int(state_dict["steps"])
        self._preconditioner.load_state_dict(state_dict)
