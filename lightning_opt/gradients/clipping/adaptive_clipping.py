"""Adaptive gradient clipping for any Lightning Trainer."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any

from torch.optim import Optimizer

from lightning_opt.core.measure.reading import Schedule
from lightning_opt.core.output.loggers import log_scalars
from lightning_opt.core.output.report import Report, Verdict
from lightning_opt.gradients.clipping.gradient_clipper import ClipTally, resolve_rule
from lightning_opt.gradients.clipping.norm_rules import ClippingRule
from lightning_opt.gradients.gradient_callback import GradientCallback
from lightning_opt.trainer.lightning import FSDPStrategy

if TYPE_CHECKING:
    import lightning.pytorch as pl

OFTEN = 0.3
"""Share of clipped steps, tensors or units above which clipping counts as frequent."""


class AdaptiveClipping(GradientCallback):
    """Clips gradients before each optimizer step, at a threshold learned from the run.

    A fixed ``gradient_clip_val`` must be found for each model, and is wrong for most of a run,
    because norms shrink by orders of magnitude. This callback learns the usual norm and clips
    larger ones. It uses the true norm: without the fp16 loss scale (also with fused optimizers),
    over all shards under DDP, FSDP and tensor parallelism. It clips once per accumulation window
    and separately for each optimizer, also under manual optimisation. A NaN or infinite norm enters
    no statistic. Its gradients stay unchanged, so that the loss scaler or a guard finds them.

    On an accelerator the host never waits for the device between reports.

    Logged every ``every_n_steps`` steps (with several optimizers as ``clip/<index>/...``):

    ====================== =====================================================================
    ``clip/norm``          total gradient norm before clipping
    ``clip/threshold``     threshold, for rules on the total norm
    ``clip/coefficient``   factor on the gradients; the smallest if there are several
    ``clip/fraction``      share of steps, tensors or units clipped, depending on the rule
    ``clip/nonfinite``     steps so far with a NaN or infinite norm
    ====================== =====================================================================

    Args:
        rule: ``"robust"``, ``"fixed_norm"``, ``"fixed_value"``, ``"mean_std"``, ``"percentile"``,
            ``"zclip"``, ``"unit_wise"``, ``"per_parameter"``, or a rule object such as
            ``ZClip(z=3.0)`` to change its settings.
        every_n_steps: Steps from one report to the next, at least 1.

    Raises:
        ValueError: In ``__init__`` for an unknown rule; in ``setup`` if the Trainer clips too
            (``gradient_clip_val``), under DeepSpeed, and for ``UnitWise`` under FSDP1, whose flat
            shards have no units; in ``on_fit_start`` for LBFGS.

    Example:
        >>> import lightning as L
        >>> import lightning_opt as lo
        >>> trainer = L.Trainer(callbacks=[lo.AdaptiveClipping()], logger=False)
    """

    rescales_gradients = True

    def __init__(self, rule: str | ClippingRule = "robust", every_n_steps: int = 50) -> None:
        super().__init__()
        self.rule = resolve_rule(rule)
        self._schedule = Schedule(every_n_steps)
        self._tallies: dict[int, ClipTally] = {}

    @cached_property  # Lightning reads it at every hook
    def state_key(self) -> str:
        """The callback's key in checkpoints. It contains the rule: each has its own state."""
        return self._generate_state_key(rule=repr(self.rule))

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Raise if the Trainer clips too, or if the rule does not work with the strategy."""
        super().setup(trainer, pl_module, stage)
        if stage != "fit":
            return
        if trainer.gradient_clip_val:
            raise ValueError(
                "AdaptiveClipping and Trainer(gradient_clip_val="
                f"{trainer.gradient_clip_val!r}) would clip twice. Remove gradient_clip_val; "
                "for a fixed bound use AdaptiveClipping(rule=FixedNorm(max_norm)) or FixedValue."
            )
        if self.rule.needs_whole_tensors and isinstance(trainer.strategy, FSDPStrategy):
            raise ValueError(
                f"{type(self.rule).__name__} needs each gradient in its own shape, but "
                "FSDPStrategy (FSDP1) flattens them. Use a rule on the total norm, such as "
                "'robust', or FSDP2 through ModelParallelStrategy."
            )

    def reset_for_model(self, pl_module: pl.LightningModule) -> None:
        """Reset the statistics and counts."""
        self._tallies = {}

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Pass the model to the rule."""
        super().on_fit_start(trainer, pl_module)
        self.rule.attach(pl_module)

    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Optimizer
    ) -> None:
        """Clip the gradients of one optimizer."""
        index, step = self.measure(trainer, optimizer)
        if not step.gradients.tensors:
            return  # `training_step` returned no loss, or a guard skips the step
        tally = self._tallies.get(index)
        if tally is None:
            tally = self._tallies[index] = ClipTally(self.rule)
        tally.apply(self.rule, step)
        self._measurements.clear()  # the gradients may have changed
        if self._schedule.is_due(tally.steps):
            prefix = "clip/" if len(trainer.optimizers) == 1 else f"clip/{index}/"
            log_scalars(trainer, {prefix + key: value for key, value in tally.read().items()})

    def diagnose(self) -> list[Verdict]:
        """Return whether clipping is frequent."""
        shares = [tally.read()["fraction"] for tally in self._tallies.values() if tally.last]
        if not shares:
            finding = "AdaptiveClipping has not seen a step yet."
            return [Verdict("clipping", "unknown", finding, "Call doctor() after training.")]
        finding = f"AdaptiveClipping clips {max(shares):.1%} of the time."
        if max(shares) <= OFTEN:
            return [Verdict("clipping", "ok", finding)]
        advice = "Clipping this often sets the step size: raise the bound, or use rule='robust'."
        return [Verdict("clipping", "look", finding, advice)]

    def report(self) -> Report:
        """Return one row per optimizer: steps, clipped share, latest norm and threshold."""
        rows = []
        for index, tally in sorted(self._tallies.items()):
            rows.append({"optimizer": index, "steps": tally.steps, **tally.read()})
        return Report(f"AdaptiveClipping({self.rule!r})", rows)

    def release(self, trainer: pl.Trainer) -> None:
        """Drop references to the model."""
        self.rule.detach()
        super().release(trainer)

    def state_dict(self) -> dict[str, Any]:
        """Return the rule's state and counts per optimizer, as plain types."""
        return {index: tally.state_dict() for index, tally in self._tallies.items()}  # type: ignore[misc]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the result of :meth:`state_dict`."""
        self._tallies = {}
        for index, state in state_dict.items():
            tally = self._tallies[int(index)] = ClipTally(self.rule)
            tally.load_state_dict(state)
