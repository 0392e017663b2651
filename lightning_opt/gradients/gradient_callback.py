"""The seam between Lightning and the gradients: true, whole, and measured once a step."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightning.pytorch.strategies import DeepSpeedStrategy
from torch import Tensor
from torch.optim import Optimizer

from lightning_opt.core.modules.sharding import Groups, flat_parameter_groups
from lightning_opt.core.numerics.norms import (
    GradientNorms,
    Gradients,
    GradientStep,
    collect_gradients,
    measure_norms,
    parameters_of,
)
from lightning_opt.core.numerics.scalars import Scalar
from lightning_opt.gradients.loss_scale import grad_scale
from lightning_opt.gradients.names import plain_name
from lightning_opt.trainer.refusals import refuse_lbfgs
from lightning_opt.trainer.run_callback import RunCallback

if TYPE_CHECKING:
    import lightning.pytorch as pl


class GradientCallback(RunCallback):
    """A callback that reads or changes gradients in ``on_before_optimizer_step``.

    What differs between strategies, precisions and optimizers is answered here, so that no
    subclass asks which of them it runs under.

    Attributes:
        names: The model's parameters by name; empty outside of a fit.
        withheld: The optimizers, by index, whose update of this step a subclass leaves out. Those
            behind it then find no gradients.
        barriers: Where only the device knows whether an update is left out, what is added to the
            norm for those behind: infinity if it is, else 0.

    Raises:
        ValueError: In ``setup`` under DeepSpeed, which keeps gradients in buffers of its own; in
            ``on_fit_start`` for LBFGS, which evaluates the loss several times a step.
    """

    process_only = ("_ahead",)

    def __init__(self) -> None:
        self.names: dict[Tensor, str] = {}
        self.withheld: set[int] = set()
        self.barriers: dict[int, Scalar] = {}
        self._flat: dict[Tensor, Groups] = {}
        self._ahead: list[GradientCallback] = []
        self._neighbour: GradientCallback | None = None
        self._measured: dict[int, tuple[tuple[int, ...], GradientNorms]] = {}

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Refuse strategies under which gradients cannot be reached."""
        super().setup(trainer, pl_module, stage)
        if stage == "fit" and isinstance(trainer.strategy, DeepSpeedStrategy):
            raise ValueError(
                f"{type(self).__name__} does not work with the DeepSpeed strategy: DeepSpeed keeps "
                "gradients in its own buffers, so no callback can read or change them. Use "
                "DeepSpeed's own settings (such as gradient_clipping in its config), or the "
                "strategies 'ddp', 'fsdp' or ModelParallelStrategy."
            )

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Learn the names and shards of the parameters, and who stands in front."""
        refuse_lbfgs(type(self).__name__, trainer.optimizers)
        GradientCallback.release(self, trainer)
        self.names = {held: plain_name(name) for name, held in pl_module.named_parameters()}
        for index, optimizer in enumerate(trainer.optimizers):
            for place, held in enumerate(parameters_of(optimizer)):
                # An optimizer may hold parameters that are not the module's.
                self.names.setdefault(held, f"optimizer_{index}.{place}")
        # FSDP1's outermost unit wraps the module, and holds what no unit within takes.
        self._flat = flat_parameter_groups(trainer.model or pl_module)
        before = self.in_front(trainer)
        self._ahead = [other for other in before if isinstance(other, GradientCallback)]
        self._neighbour = self._ahead[-1] if self._ahead and before[-1] is self._ahead[-1] else None

    def in_front(self, trainer: pl.Trainer) -> list[pl.Callback]:
        """Return the callbacks of the run that come before this one."""
        callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]
        return callbacks[: callbacks.index(self)] if self in callbacks else []

    def release(self, trainer: pl.Trainer) -> None:
        """Let go of the model."""
        self.names, self._flat, self._ahead, self._neighbour = {}, {}, [], None
        self.withheld, self.barriers, self._measured = set(), {}, {}

    def collect(self, trainer: pl.Trainer, optimizer: Optimizer) -> tuple[int, Gradients, Scalar]:
        """Return the optimizer's index, its gradients, and what they are multiplied with."""
        index = next(i for i, own in enumerate(trainer.optimizers) if own is optimizer)
        if any(index in other.withheld for other in self._ahead):
            return index, Gradients([], [], []), 1.0
        gradients = collect_gradients(parameters_of(optimizer), self._flat)
        return index, gradients, grad_scale(trainer, optimizer)

    def measure(self, trainer: pl.Trainer, optimizer: Optimizer) -> tuple[int, GradientStep]:
        """Return the optimizer's index and its gradients with their norms.

        What the callback of ours directly in front has measured is taken over if nothing was
        written since. A callback of somebody else's in between may have changed anything.
        """
        index, gradients, scale = self.collect(trainer, optimizer)
        state = gradients.state()
        known = self._neighbour._measured.pop(index, None) if self._neighbour else None
        if known is None or known[0] != state:
            known = (state, measure_norms(gradients, grad_scale=scale))
        self._measured[index] = known
        norms = known[1]
        for other in self._ahead:
            if index in other.barriers:
                norms = GradientNorms(norms.per_tensor, norms.total + other.barriers[index])
        return index, GradientStep(gradients, norms, scale, self.names)
