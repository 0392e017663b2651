"""The callback that watches gradients and reports issues."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from torch.optim import Optimizer

from lightning_opt.core.arguments import check_positive
from lightning_opt.core.measure.reading import Schedule
from lightning_opt.core.numerics.norms import parameters_of
from lightning_opt.core.output.loggers import log_scalars
from lightning_opt.core.output.report import Report, Verdict
from lightning_opt.gradients.gradient_callback import GradientCallback, loss_scale
from lightning_opt.gradients.health.diagnosis import CRITICAL, Issue
from lightning_opt.gradients.health.layer_stats import LayerStats, group_layers
from lightning_opt.gradients.health.measures import ActivationWatch
from lightning_opt.gradients.health.optimizer_health import OptimizerHealth

if TYPE_CHECKING:
    import lightning.pytorch as pl

log = logging.getLogger(__name__)


class HealthSummary(NamedTuple):
    """The state of a run's gradients.

    ``status`` is ``"healthy"``, ``"warning"`` or ``"critical"``.
    """

    status: str
    sentence: str

    def __str__(self) -> str:
        return f"{self.status}: {self.sentence}"


def layer_rows(layers: Sequence[LayerStats], issues: Sequence[Issue]) -> list[dict[str, Any]]:
    """Return one row per layer, the layers of the worst issue first."""
    affected = [place for issue in issues for place in (issue.place, *issue.others)]
    rank = {place: number for number, place in reversed(list(enumerate(affected)))}
    rows = []
    for layer in sorted(layers, key=lambda layer: rank.get(layer.name, len(affected))):
        state = ", ".join(i.type for i in issues if layer.name in (i.place, *i.others))
        rows.append(
            {
                "layer": layer.name,
                "elements": sum(p.numel for p in layer.parameters),
                "rms": layer.flow if layer.trained else None,
                "max": layer.max,
                "zeros": None if layer.zeros is None else f"{layer.zeros:.1%}",
                "update": layer.update,
                "noise": layer.noise if layer.trained else None,
                "state": state or ("ok" if layer.trained else layer.parameters[0].status),
            }
        )
    return rows


class GradientHealth(GradientCallback):
    """Watches gradients, and reports issues with their layer and advice.

    Norms are measured at every step, stay on the device, and are shared with clipping. A report
    measures more, and reads everything to the host at once. Measurements are compared with the
    run's own history and with the other layers. Most findings must recur in several reports. Put
    this callback before callbacks that change gradients, so that it measures the original ones.

    ================== ========================================================================
    issue              raised when
    ================== ========================================================================
    ``nan``, ``inf``   gradients of a step were not finite; overflows that a loss scaler skips
                       are only counted, and become an issue after 20 in a row
    ``exploding``      median of the total norm above ``exploding``, or grown by this factor
                       since earlier reports; critical if it grew tenfold or is 1,000 times
                       ``exploding``
    ``vanishing``      RMS of a layer below ``vanishing`` and below 1/1000 of the largest RMS
    ``dead``           all gradients of a layer exactly zero for three reports
    ``bottleneck``     RMS drops more than 100-fold from one layer to the next
    ``stale``          a trainable parameter gets no gradient
    ================== ========================================================================

    Logged with every report (``health/<index>/...`` with several optimizers):

    ======================== ==================================================================
    ``health/norm``          median of the total norm since the last report
    ``health/peak_norm``     maximum of the total norm since the last report
    ``health/noise``         median over layers of the norm's standard deviation over steps / mean
    ``health/update``        median over layers of the update-to-weight ratio
    ``health/zeros``         share of gradient elements that are exactly zero
    ``health/smallest_rms``  smallest RMS of any layer
    ``health/largest_rms``   largest RMS of any layer
    ``health/nonfinite``     steps so far whose gradients were NaN or infinite
    ``health/overflows``     steps so far that the loss scaler skipped
    ``health/critical``      number of critical issues
    ``health/warnings``      number of other issues
    ======================== ==================================================================

    Args:
        every_n_steps: Optimizer steps between reports, at least 1.
        exploding: Total norm above which gradients explode, above 0.
        vanishing: RMS below which gradients may vanish, above 0.
        activations: Also check module outputs, to name the module and the batch of the first NaN.
            This costs about one more pass over all activations per batch, and a second read per
            report.

    Raises:
        ValueError: In ``__init__`` for arguments out of range; in ``setup`` under DeepSpeed, in
            ``on_fit_start`` for LBFGS.

    Example:
        >>> import lightning as L
        >>> import lightning_opt as lo
        >>> health = lo.GradientHealth(every_n_steps=100)
        >>> trainer = L.Trainer(callbacks=[health, lo.AdaptiveClipping()], logger=False)
        >>> print(health.summary())
        healthy: no report yet, after 0 steps

    References:
        Schneider, Dangel and Hennig (2021), *Cockpit: A Practical Debugging Tool for the Training
        of Deep Neural Networks*. Glorot and Bengio (2010), *Understanding the difficulty of
        training deep feedforward neural networks*.
    """

    def __init__(
        self,
        every_n_steps: int = 50,
        exploding: float = 100.0,
        vanishing: float = 1e-7,
        activations: bool = False,
    ) -> None:
        super().__init__()
        self.exploding = check_positive("exploding", exploding)
        self.vanishing = check_positive("vanishing", vanishing)
        self._schedule = Schedule(every_n_steps)
        self._watch_activations, self._activations = activations, ActivationWatch()
        self._records: dict[int, OptimizerHealth] = {}

    def reset_for_model(self, pl_module: pl.LightningModule) -> None:
        """Reset the history."""
        self._records = {}

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Add the hooks. The validation sanity check has run by now."""
        if self._watch_activations and not self._activations.watch(pl_module):
            log.warning("GradientHealth(activations=True) cannot watch a compiled model.")

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Start to watch activations."""
        self._activations.start_batch(trainer.current_epoch, batch_idx)

    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Optimizer
    ) -> None:
        """Measure the norms, and more if a report is due."""
        index, step = self.measure(trainer, optimizer)
        if index not in self._records:
            self._records[index] = OptimizerHealth(self.exploding, self.vanishing)
        record = self._records[index]
        record.observe(step)
        if self._schedule.is_due(record.steps):
            record.measure(step)

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any, **kwargs: Any) -> None:
        """Complete the reports that were started in this batch."""
        self._activations.end_batch()
        due = [index for index, record in self._records.items() if record.pending is not None]
        if due:
            found = self._activations.take(scaled=loss_scale(trainer) is not None)
            for index in due:
                if self._complete(trainer, index, found):
                    found = ()  # one optimizer reports the finding in activations
                prefix = "health/" if len(trainer.optimizers) == 1 else f"health/{index}/"
                scalars = self._records[index].scalars()
                log_scalars(trainer, {prefix + key: value for key, value in scalars.items()})

    def _complete(self, trainer: pl.Trainer, index: int, extra: tuple[Issue, ...] = ()) -> bool:
        record = self._records[index]
        known = {(issue.type, issue.severity) for issue in record.issues}
        own = set(parameters_of(trainer.optimizers[index]))
        parameters = {name: p for p, name in self.names.items() if p in own}
        is_scaled = loss_scale(trainer) is not None
        is_nonfinite = record.complete(parameters, scaled=is_scaled, extra=extra)
        for issue in record.issues:
            if (issue.type, issue.severity) not in known and trainer.is_global_zero:
                level = logging.WARNING if issue.severity == CRITICAL else logging.INFO
                log.log(level, "GradientHealth, step %d: %s %s", record.steps, issue, issue.advice)
        return is_nonfinite

    def summary(self) -> HealthSummary:
        """Return the status at the last report (healthy, warning or critical) and a sentence."""
        records, issues = self._records.values(), self.issues
        steps = max((record.steps for record in records), default=0)
        nonfinite = sum(record.nonfinite for record in records)
        if issues:
            worst = issues[0]
            rest = f"; {len(issues) - 1} more" if len(issues) > 1 else ""
            sentence = f"{worst.type} at {worst.where}: {worst.detail}{rest}"
            return HealthSummary(worst.severity, sentence)
        if nonfinite:
            sentence = f"no issue now, but {nonfinite} of {steps} steps had non-finite gradients"
            return HealthSummary("warning", sentence)
        if not any(record.reported_step for record in records):
            return HealthSummary("healthy", f"no report yet, after {steps} steps")
        return HealthSummary("healthy", f"no issue in {steps} steps")

    @property
    def issues(self) -> list[Issue]:
        """The issues at the last report, critical ones first."""
        issues = [issue for record in self._records.values() for issue in record.issues]
        return sorted(issues, key=lambda issue: issue.severity != CRITICAL)

    @property
    def layers(self) -> list[LayerStats]:
        """The measurements of each layer at the last report, in the order of registration."""
        layers = [layer for record in self._records.values() for layer in record.layers]
        return group_layers(own for layer in layers for own in layer.parameters)

    def diagnose(self) -> list[Verdict]:
        """Return the worst issue, for the doctor."""
        if self.issues:
            worst = self.issues[0]
            lost = float(worst.severity == CRITICAL)
            return [Verdict("gradients", "look", f"{worst}", worst.advice, gain=lost)]
        if not any(record.reported_step for record in self._records.values()):
            finding = "GradientHealth has made no report yet."
            return [Verdict("gradients", "unknown", finding, "Train longer, or report more often.")]
        status, sentence = self.summary()
        finding = f"GradientHealth: {sentence}."
        if status == "healthy":
            return [Verdict("gradients", "ok", finding)]
        return [Verdict("gradients", "look", finding, "NonFiniteGuard() skips such steps.")]

    def report(self, top: int | None = 10) -> Report:
        """Return a table of the worst layers at the last report, and the issues as notes.

        Each row has a layer's gradient RMS over non-zero elements, largest magnitude, share of
        zeros, update-to-weight ratio, noise (deviation of the norm over steps divided by its mean)
        and issues.

        Args:
            top: Number of rows; None for all.
        """
        rows = layer_rows(self.layers, self.issues)
        notes = [f"{issue} -> {issue.advice}" for issue in self.issues]
        if top is not None and len(rows) > top:
            notes.append(f"The worst {top} of {len(rows)} layers; report(top=None) shows all.")
        return Report(f"Gradient health: {self.summary()}", rows[:top], notes)

    def series(self) -> dict[str, list[list[float]]]:
        """Return for each layer a list of ``[step, gradient RMS]``, one entry per report."""
        entries = [entry for record in self._records.values() for entry in record.timeline]
        names = dict.fromkeys(name for entry in reversed(entries) for name in entry["flow"])
        return {
            f"layers/{name}": [[e["step"], e["flow"][name]] for e in entries if name in e["flow"]]
            for name in names
        }

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Diagnose the steps since the last report."""
        for index, record in self._records.items():
            record.release()  # a pending report would need a collective
            if record.has_unreported_nonfinite() or (record.steps and not record.reported_step):
                self._complete(trainer, index)

    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        """Diagnose the last steps, which may explain the exception, and release the model."""
        try:
            if self.names:
                self.on_train_end(trainer, pl_module)
        except RuntimeError as error:  # reading a failed device raises
            log.debug("GradientHealth could not read the last steps: %s", error)
        finally:
            self.release(trainer)

    def release(self, trainer: pl.Trainer) -> None:
        """Remove the hooks and drop references to the model."""
        super().release(trainer)
        self._activations.stop()
        for record in self._records.values():
            record.release()

    def state_dict(self) -> dict[str, Any]:
        """Return the state of each optimizer, as plain types. Waits for the device."""
        return {str(index): record.state_dict() for index, record in self._records.items()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the result of :meth:`state_dict`."""
        self._records = {}
        for index, state in state_dict.items():
            record = self._records[int(index)] = OptimizerHealth(self.exploding, self.vanishing)
            record.load_state_dict(state)
