"""Tells during training what is wrong with the gradients, where, and what to do about it."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from torch.optim import Optimizer

from lightning_opt.core.arguments import positive
from lightning_opt.core.measure.schedule import Schedule
from lightning_opt.core.numerics.norms import parameters_of
from lightning_opt.core.output.figures import save_at_end
from lightning_opt.core.output.loggers import log_scalars
from lightning_opt.core.output.report import Report
from lightning_opt.core.output.verdicts import Verdict
from lightning_opt.gradients.forward_order import ForwardOrder
from lightning_opt.gradients.gradient_callback import GradientCallback
from lightning_opt.gradients.health.activations import ActivationWatch
from lightning_opt.gradients.health.issues import CRITICAL, Issue
from lightning_opt.gradients.health.optimizer_health import OptimizerHealth
from lightning_opt.gradients.health.plot import draw_health
from lightning_opt.gradients.health.report import HealthSummary, layer_rows, summarise
from lightning_opt.gradients.health.vitals import ROOT, LayerVitals, group_layers, unheld_vitals
from lightning_opt.gradients.loss_scale import loss_scale
from lightning_opt.gradients.names import plain_name

if TYPE_CHECKING:
    import lightning.pytorch as pl
    from matplotlib.figure import Figure

log = logging.getLogger(__name__)

FIGURE = "gradient_health.png"


class GradientHealth(GradientCallback):
    """Watches gradients, and reports in plain words what is wrong, where, and what to do about it.

    The norms of every step stay on the device, and are shared with clipping. A report step measures
    more, and reads everything back to the host at once. Issues are judged against the run's own
    history and the other layers, and most must be seen in several reports. Put it before callbacks
    that change gradients, so that it sees the originals.

    ================== ========================================================================
    issue              raised when
    ================== ========================================================================
    ``nan``, ``inf``   gradients of a step were not finite; overflows that a loss scaler skips
                       are counted, and become an issue after 20 in a row
    ``exploding``      median of the total norm above ``exploding``, or that many times what the
                       run had before; critical if it grew tenfold, is 1,000 times
                       ``exploding``, or grows 100-fold from the loss to the inputs. A single
                       spike is a warning
    ``vanishing``      RMS of a layer below ``vanishing`` and a thousandth of the largest layer's
    ``dead``           all gradients of a layer exactly zero for three reports
    ``bottleneck``     RMS drops more than 100-fold from one layer to the next
    ``imbalance``      an update-to-weight ratio above 0.01 and 100 times the median; or 99% of the
                       squared norm in one layer, at 100 times the median RMS
    ``stale``          a parameter to be trained has no gradient
    ================== ========================================================================

    Logged with every report (``health/<index>/...`` with several optimizers):

    ======================== ==================================================================
    ``health/norm``          median of the total norm since the last report
    ``health/peak_norm``     the largest of them
    ``health/noise``         median over layers: deviation of the norm over steps, over its mean
    ``health/update``        median over layers of the update-to-weight ratio
    ``health/zeros``         share of gradient elements that are exactly zero
    ``health/smallest_rms``  RMS of the layer with the smallest one, and
    ``health/largest_rms``   of that with the largest
    ``health/nonfinite``     steps so far whose gradients were NaN or infinite
    ``health/overflows``     steps so far that the loss scaler skipped
    ``health/critical``      issues that are critical, and
    ``health/warnings``      that are not
    ======================== ==================================================================

    Args:
        every_n_steps: Optimizer steps from one report to the next, at least 1. There is a report
            every 1,024 steps at least.
        exploding: Total norm from which gradients explode, above 0.
        vanishing: RMS below which they may vanish, above 0.
        activations: Also look at module outputs: names the module that made the first NaN, with
            its batch. Costs about as much as one more pass over all activations at each batch, and
            a second read a report.
        figure: Where the figure goes at the end of ``fit``: True for ``gradient_health.png`` in the
            logger's directory if there is a logger, a path, or None or False for nowhere.
            TensorBoard gets it too.

    Raises:
        ValueError: In ``__init__`` for arguments out of range; in ``setup`` under DeepSpeed, in
            ``on_fit_start`` for LBFGS.

    Example:
        >>> import lightning as L
        >>> import lightning_opt as lo
        >>> health = lo.GradientHealth(every_n_steps=100)
        >>> trainer = L.Trainer(callbacks=[health, lo.AdaptiveClipping()], logger=False)
        >>> print(health.summary())
        healthy: nothing was found yet; no report in 0 steps

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
        figure: bool | str | None = True,
    ) -> None:
        super().__init__()
        self.exploding = positive("exploding", exploding)
        self.vanishing = positive("vanishing", vanishing)
        self._schedule = Schedule(every_n_steps)
        self._figure = figure
        self._order = ForwardOrder()
        self._look_inside, self._activations = activations, ActivationWatch()
        self._records: dict[int, OptimizerHealth] = {}
        self._outside: list[LayerVitals] = []
        self._reported = False  # in this fit: a run without a report gets no figure

    def reset_for_model(self, pl_module: pl.LightningModule) -> None:
        """Forget the history of another model."""
        self._records, self._outside = {}, []

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Put on the hooks; the sanity check of validation, which is over, must not be seen."""
        self._reported = False
        self._order.watch(pl_module)
        if self._look_inside and not self._activations.watch(pl_module):
            log.warning("GradientHealth(activations=True) cannot look into a compiled model.")

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Begin to look at activations."""
        self._activations.start_batch(trainer.current_epoch, batch_idx)

    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Optimizer
    ) -> None:
        """Take in one step's norms, and measure more if a report is due."""
        index, step = self.measure(trainer, optimizer)
        if index not in self._records:
            self._records[index] = OptimizerHealth(self.exploding, self.vanishing)
        record = self._records[index]
        record.observe(step)
        if self._schedule.is_due(record.steps) or record.is_full:
            record.measure(step)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any, **kwargs: Any
    ) -> None:
        """Report, if this batch's step was measured."""
        self._activations.end_batch()
        due = [index for index, record in self._records.items() if record.measured is not None]
        if due:
            self._reported = True
            scaled = loss_scale(trainer) is not None
            self._order.stop()
            extra = self._activations.take(scaled=scaled)
            for index in due:
                self._complete(trainer, pl_module, index, extra)
                prefix = "health/" if len(trainer.optimizers) == 1 else f"health/{index}/"
                scalars = self._records[index].scalars()
                log_scalars(trainer, {prefix + key: value for key, value in scalars.items()})

    def _complete(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        index: int,
        extra: tuple[Issue, ...] = (),
    ) -> None:
        held = {p for optimizer in trainer.optimizers for p in parameters_of(optimizer)}
        self._outside = group_layers(unheld_vitals(pl_module, held), self._places())
        record = self._records[index]
        known = {(issue.type, issue.severity) for issue in record.issues}
        parameters = {
            self.names[parameter]: parameter
            for parameter in parameters_of(trainer.optimizers[index])
            if parameter in self.names
        }
        scaled = loss_scale(trainer) is not None
        record.complete(parameters, self._places(), scaled=scaled, extra=extra)
        for issue in record.issues:
            if (issue.type, issue.severity) not in known and trainer.is_global_zero:
                level = logging.WARNING if issue.severity == CRITICAL else logging.INFO
                log.log(level, "GradientHealth, step %d: %s %s", record.steps, issue, issue.advice)

    def _places(self) -> dict[str, int]:
        return {plain_name(name) or ROOT: place for name, place in self._order.places().items()}

    def summary(self) -> HealthSummary:
        """Return one word (healthy, warning or critical) and a sentence, as of the last report."""
        steps = max((record.steps for record in self._records.values()), default=0)
        reports = sum(bool(record.reported_step) for record in self._records.values())
        nonfinite = sum(record.nonfinite for record in self._records.values())
        return summarise(self.issues, steps, reports, nonfinite)

    @property
    def issues(self) -> list[Issue]:
        """What is wrong as of the last report, the worst first."""
        issues = [issue for record in self._records.values() for issue in record.issues]
        return sorted(issues, key=lambda issue: issue.severity != CRITICAL)

    @property
    def layers(self) -> list[LayerVitals]:
        """What was measured of each layer at the last report, in forward order."""
        parts = [*(record.layers for record in self._records.values()), self._outside]
        return group_layers(
            (own for layers in parts for layer in layers for own in layer.parameters),
            self._places(),
        )

    def diagnose(self) -> list[Verdict]:
        """Return the worst of what was found."""
        summary, issues = self.summary(), self.issues
        if issues:
            return [Verdict("gradients", "look", f"{issues[0]}", issues[0].advice)]
        if not any(record.reported_step for record in self._records.values()):
            finding = "GradientHealth has made no report yet."
            return [Verdict("gradients", "unknown", finding, "Train longer, or report more often.")]
        finding = f"{summary.sentence[0].upper()}{summary.sentence[1:]}."
        if summary.status == "healthy":
            return [Verdict("gradients", "ok", finding)]
        return [Verdict("gradients", "look", finding, "NonFiniteGuard() skips such steps.")]

    def report(self, top: int | None = 10) -> Report:
        """Return a table of the worst layers with the issues below it, as of the last report.

        One row a layer: gradient RMS over its non-zero elements, largest magnitude, share of zeros,
        update-to-weight ratio, noise (deviation of its norm over steps, relative to the mean), and
        what is wrong with it.

        Args:
            top: How many rows; None for all.
        """
        rows = layer_rows(self.layers, self.issues)
        notes = [f"{issue} -> {issue.advice}" for issue in self.issues]
        if top is not None and len(rows) > top:
            notes.append(f"The worst {top} of {len(rows)}; report(top=None) has all.")
        return Report(f"Gradient health: {self.summary()}", rows[:top], notes)

    def figure(self) -> Figure:
        """Return a matplotlib figure of the gradient flow by layer and over time.

        Raises:
            ImportError: Without matplotlib, which the extra ``plots`` brings.
        """
        timelines = {index: record.timeline for index, record in self._records.items()}
        limits = (self.exploding, self.vanishing)
        return draw_health(self.summary(), self.issues, self.layers, timelines, *limits)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Look at the steps since the last report, and save the figure."""
        self._finish(trainer, pl_module)
        save_at_end(self.figure, self._reported and self._figure, trainer, FIGURE)

    def _finish(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        for index, record in self._records.items():
            record.release()  # a report that was not completed would need all ranks
            if record.pending_nonfinite() or (record.steps and not record.reported_step):
                self._complete(trainer, pl_module, index)

    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        """Look at the last steps, which may say why, and let go of the model."""
        try:
            if self.names:
                self._finish(trainer, pl_module)
        except RuntimeError as error:  # a device that has failed cannot be read any more
            log.debug("GradientHealth could not read the last steps: %s", error)
        finally:
            self.release(trainer)

    def release(self, trainer: pl.Trainer) -> None:
        """Let go of the model."""
        super().release(trainer)
        self._order.stop()
        self._activations.stop()
        for record in self._records.values():
            record.release()

    def state_dict(self) -> dict[str, Any]:
        """Return what was seen of each optimizer, as plain types. Waits for the device."""
        return {str(index): record.state_dict() for index, record in self._records.items()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned."""
        self._records = {}
        for index, state in state_dict.items():
            record = self._records[int(index)] = OptimizerHealth(self.exploding, self.vanishing)
            record.load_state_dict(state)
