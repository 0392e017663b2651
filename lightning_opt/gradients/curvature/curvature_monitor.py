"""The callback that measures trace and largest eigenvalue of the Hessian."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.optim import SGD, Optimizer

from lightning_opt.core.arguments import check_at_least, check_positive, check_share
from lightning_opt.core.measure.reading import Schedule
from lightning_opt.core.modules.sharding import Groups, step_groups
from lightning_opt.core.output.loggers import log_scalars
from lightning_opt.core.output.report import Report
from lightning_opt.gradients.curvature.differentiable_loss import (
    check_parameters,
    check_run,
    mean_over_ranks,
    twice_differentiable_loss,
)
from lightning_opt.gradients.curvature.hessian import (
    Product,
    estimate_trace,
    hessian_product,
    largest_eigenvalue,
)
from lightning_opt.trainer.run_callback import RunCallback

if TYPE_CHECKING:
    import lightning.pytorch as pl

NAME = "CurvatureMonitor"


class CurvatureMonitor(RunCallback):
    r"""Measures trace and largest eigenvalue of the training loss's Hessian.

    The largest eigenvalue is the sharpness. Gradient descent with learning rate :math:`\eta` and
    momentum :math:`\mu` is stable along a direction while its curvature stays below the edge of
    stability, :math:`2 (1 + \mu) / \eta`. The sharpness of many networks rises to this edge and
    stays near it (Cohen et al. 2021). ``curvature/edge`` is the sharpness as a share of the edge.
    It is logged for SGD only: the edge of an adaptive optimizer depends on its preconditioner.

    A measurement uses a part of one training batch before its step, in float32. Under DDP the parts
    of all ranks are combined. Random state, BatchNorm statistics, metrics and logs are restored
    afterwards.

    Logged every ``every_n_steps`` steps:

    ========================= ==================================================================
    ``curvature/sharpness``   largest eigenvalue
    ``curvature/residual``    distance from it within which a true eigenvalue lies
    ``curvature/trace``       trace, by Hutchinson's estimator
    ``curvature/trace_error`` standard error of the trace
    ``curvature/edge``        sharpness as a share of the edge of stability (SGD only)
    ========================= ==================================================================

    Args:
        every_n_steps: Steps between measurements, at least 1. The first one is at the first step.
        fraction: Share of the batch's samples, above 0 and at most 1.
        n_samples: Number of random vectors for the trace, at least 2.
        max_iterations: Maximum number of products with the Hessian for the eigenvalue.
        tolerance: Relative residual at which the eigenvalue is accepted.

    Raises:
        ValueError: In ``__init__`` for settings out of range; in ``setup`` in the same cases as
            :class:`CurvaturePreconditioner`; in ``on_fit_start`` for complex weights and embeddings
            with sparse gradients.
        ValueError: At the first measurement, if a lazy layer has no weights yet.
        RuntimeError: At the first measurement, if an operator has no second derivative.

    References:
        Cohen, J., Kaur, S., Li, Y., Kolter, J. Z. and Talwalkar, A. (2021). Gradient descent on
        neural networks typically occurs at the edge of stability. ICLR.

    Example:
        >>> import lightning as L
        >>> import lightning_opt as lo
        >>> trainer = L.Trainer(callbacks=[lo.CurvatureMonitor(every_n_steps=200)], logger=False)
    """

    def __init__(
        self,
        every_n_steps: int = 200,
        fraction: float = 0.25,
        n_samples: int = 4,
        max_iterations: int = 20,
        tolerance: float = 0.05,
    ) -> None:
        self._schedule = Schedule(every_n_steps)
        self.fraction = check_share("fraction", fraction)
        self.n_samples = check_at_least("n_samples", n_samples, 2)
        self.max_iterations = check_at_least("max_iterations", max_iterations, 1)
        self.tolerance = check_positive("tolerance", tolerance)
        self._measured_step: int | None = None
        self.history: list[dict[str, float]] = []
        """One entry per measurement, with its ``step``."""

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Check strategy, precision and optimisation mode."""
        super().setup(trainer, pl_module, stage)
        if stage == "fit":
            check_run(NAME, trainer, pl_module)

    def reset_for_model(self, pl_module: pl.LightningModule) -> None:
        """Reset the history."""
        self.history = []

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Check the parameters."""
        check_parameters(NAME, pl_module)
        self._measured_step = None

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Measure the curvature if a measurement is due."""
        step = trainer.global_step
        # With accumulation several batches belong to one step.
        if step == self._measured_step or not self._schedule.is_due(step):
            return
        self._measured_step = step
        measured = self._measure(trainer, pl_module, batch, batch_idx)
        if measured:
            measured |= edge_of(measured["sharpness"], trainer.optimizers[0])
            self.history.append({"step": float(step), **measured})
            log_scalars(trainer, {f"curvature/{key}": value for key, value in measured.items()})

    def _measure(
        self, trainer: pl.Trainer, module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> dict[str, float]:
        params = [parameter for parameter in module.parameters() if parameter.requires_grad]
        # All ranks draw the same vectors, because they multiply the same averaged Hessian.
        generator = torch.Generator(module.device).manual_seed(trainer.global_step)
        context = twice_differentiable_loss(NAME, trainer, module, batch, batch_idx, self.fraction)
        groups = step_groups(trainer)
        with context as loss:
            # Whether any rank has a loss. NCCL takes tensors on the GPU only.
            if not mean_over_ranks([params[0].new_tensor([loss is not None])], groups)[0]:
                return {}
            product = _averaged_over_ranks(hessian_product(loss, params), groups)
            trace = estimate_trace(product, params, self.n_samples, generator)
            limits = self.max_iterations, self.tolerance
            top = largest_eigenvalue(product, params, *limits, generator)
            del product, loss
        # Reading the trace waits for the device; each Lanczos iteration has waited already.
        return {
            "sharpness": top.value,
            "residual": top.residual,
            "trace": trace.value.item(),
            "trace_error": trace.standard_error.item(),
        }

    def report(self) -> Report:
        """Return one row per measurement."""
        return Report(NAME, self.history)

    def state_dict(self) -> dict[str, Any]:
        """Return the history."""
        return {"history": [dict(entry) for entry in self.history]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the result of :meth:`state_dict`."""
        self.history = [dict(entry) for entry in state_dict["history"]]


def _averaged_over_ranks(product: Product, groups: Groups) -> Product:
    return lambda vectors: mean_over_ranks(product(vectors), groups)


def edge_of(sharpness: float, optimizer: Optimizer) -> dict[str, float]:
    """Return the sharpness as a share of the edge of stability; empty if the edge is unknown.

    It is known for SGD with one parameter group, without Nesterov momentum.
    """
    groups = optimizer.param_groups
    if not isinstance(optimizer, SGD) or len(groups) > 1 or groups[0]["nesterov"]:
        return {}
    group = groups[0]
    damped = 1.0 - group["dampening"] if group["momentum"] else 1.0
    return {"edge": sharpness * float(group["lr"]) * damped / (2.0 * (1.0 + group["momentum"]))}
