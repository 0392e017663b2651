"""A guard against steps with a NaN, an infinity or a spike."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from lightning_opt.core.arguments import check_at_least, check_positive
from lightning_opt.core.measure.reading import DelayedReads, Schedule
from lightning_opt.core.modules.sharding import is_dtensor, reads_are_free, step_groups
from lightning_opt.core.output.loggers import log_scalars
from lightning_opt.core.output.report import Report, Verdict
from lightning_opt.gradients.gradient_callback import GradientCallback, loss_scale
from lightning_opt.gradients.guard.detector import SPIKES, Detection, Detector, mean_loss
from lightning_opt.gradients.guard.escalation import Escalation, Policy, UpdateControl
from lightning_opt.gradients.guard.events import (
    KINDS,
    MAX_EVENTS,
    RESPONSES,
    DamageDetector,
    Event,
    StepRecord,
    describe,
    record_events,
)
from lightning_opt.gradients.guard.snapshot import BufferBackup, Snapshot
from lightning_opt.trainer.run_callback import RunCallback

if TYPE_CHECKING:
    import lightning.pytorch as pl

MAX_RESTORES = 3
"""Maximum restores of one snapshot. A run that needs more makes no progress."""


class NonFiniteGuard(GradientCallback):
    """Skips steps that would ruin the weights; if faults persist, reacts more strongly or stops.

    A step has a fault if a loss (of any batch, on any rank) or the gradient is NaN or infinite.
    With ``spike``, a value far above the usual level is a fault too. Weights, optimizer state and
    small buffers (BatchNorm) stay exactly as before the step. ``global_step`` and learning-rate
    schedulers advance, as they do when Lightning skips a step in fp16.

    The response depends on the number of consecutive faults of the optimizer:

    1. Every fault: the step is skipped.
    2. ``backoff_after`` faults: the learning rate is multiplied by ``lr_backoff`` during updates
       only; schedulers and loggers see the usual rate. It recovers over 100 good steps.
    3. ``rollback_after`` faults, with ``policy="rollback"``: model, optimizers, schedulers and loss
       scaler are restored from a snapshot in host memory. The learning rate is reduced again. The
       data loader is not reset, so the batches before the rollback are not repeated.
    4. ``max_consecutive`` faults: the run stops with an error that explains the reason.

    Skipping cannot repair a NaN weight: it triggers response 3 at once, or 4 if there is no
    snapshot. Spikes stop a run only with ``policy="raise"``. Spikes that persist after response 3
    are accepted as the usual level.

    All ranks decide together, with one all-gather of two numbers per step. Each replica of
    ``DiLoCoStrategy`` decides alone, and loads the shared weights after a rollback. With fused
    Adam, AdamW, SGD or Adagrad on an accelerator the host never waits: the device skips the step,
    and responses 2 to 4 come two steps later. Other optimizers cost one small read per step.

    Under the fp16 loss scaler, a non-finite gradient with a finite loss is an overflow, which the
    scaler handles. It is a fault only if the loss scale is already below 1.

    Put it before :class:`AdaptiveClipping`, which then ignores skipped steps. Hooks and other
    callbacks can still read the gradients of a skipped step.

    Logged at faults and every ``every_n_steps`` optimizer steps:

    ===================== ======================================================================
    ``guard/skipped``     steps skipped so far because of faults
    ``guard/consecutive`` current consecutive faults; the maximum over optimizers
    ``guard/overflows``   overflows under the loss scaler so far
    ``guard/lr_scale``    factor on the learning rates; the minimum over optimizers
    ``guard/rollbacks``   snapshots restored so far
    ===================== ======================================================================

    Args:
        policy: ``"skip"`` uses responses 1, 2 and 4; ``"rollback"`` uses all; ``"raise"`` skips the
            step and stops at the first fault.
        max_consecutive: Consecutive faults at which the run stops, at least 1.
        spike: A loss or a gradient norm is a spike if its logarithm lies this many deviations above
            the mean (see :class:`Robust`); 6 is conservative. None detects no spikes. Losses of 0
            and below have no logarithm and are never spikes.
        lr_backoff: Factor in (0, 1]; 1 leaves the learning rate alone.
        snapshot_every_n_steps: Good batches between snapshots, at least 1. Only used with
            ``policy="rollback"``.
        backoff_after: Consecutive faults at which the learning rate is reduced.
        rollback_after: Consecutive faults at which the snapshot is restored, below
            ``max_consecutive``.
        every_n_steps: Steps between logged values, at least 1.

    Raises:
        ValueError: For arguments out of range; when the run starts, under DeepSpeed or for LBFGS.
        RuntimeError: In ``setup`` if it comes after ``AdaptiveClipping``.
        FloatingPointError: During training, on all ranks, when the guard stops the run.

    Example:
        >>> import lightning as L
        >>> import lightning_opt as lo
        >>> guard = lo.NonFiniteGuard(policy="rollback", spike=6.0)
        >>> trainer = L.Trainer(callbacks=[guard, lo.AdaptiveClipping()], logger=False)
    """

    def __init__(
        self,
        policy: Policy = "skip",
        max_consecutive: int = 10,
        spike: float | None = None,
        lr_backoff: float = 0.5,
        snapshot_every_n_steps: int = 100,
        backoff_after: int = 3,
        rollback_after: int = 6,
        every_n_steps: int = 50,
    ) -> None:
        super().__init__()
        self.escalation = Escalation(
            policy, backoff_after, rollback_after, max_consecutive, lr_backoff
        )
        self.spike = None if spike is None else check_positive("spike", spike)
        check_at_least("snapshot_every_n_steps", snapshot_every_n_steps, 1)
        self.snapshot_every_n_steps = snapshot_every_n_steps
        self._schedule = Schedule(every_n_steps)
        # Spikes are accepted as the usual level only if they persist after a rollback.
        self._detector = Detector(self.spike, patience=rollback_after + 3)
        self._steps = 0
        self._controls: list[UpdateControl] = []
        self.events: list[Event] = []
        """The newest 1000 faults, oldest first, each a plain ``dict``.

        ``step`` is ``trainer.global_step`` before the skipped update. ``batch_idx`` is the batch
        with the non-finite loss, else the step's last batch. ``ranks`` lists the ranks whose own
        loss is not finite. ``parameters`` names at most ten of the ``parameters_total`` tensors
        with bad gradients. Spikes list the three largest gradients, and ``nonfinite_weight`` lists
        non-finite weights and buffers.
        """
        self._reset_run(None)

    def _reset_run(self, buffers: BufferBackup | None) -> None:
        # Batch index and loss of each backward pass since the last batch with a step.
        self._losses: list[tuple[int | None, Tensor]] = []
        self._batch_idx: int | None = None
        self._faults: list[StepRecord] = []
        self._delayed: DelayedReads[tuple[Detection, StepRecord]] = DelayedReads()
        self._stepped = self._log_due = False
        self._good_batches = self._restores = 0
        self._damage = DamageDetector()
        self._snapshot = Snapshot()
        self._buffers = buffers

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Raise if a callback before this one changes gradient norms."""
        super().setup(trainer, pl_module, stage)
        for other in self.callbacks_before(trainer) if stage == "fit" else []:
            if isinstance(other, RunCallback) and other.rescales_gradients:
                raise RuntimeError(  # a preset would catch a ValueError and drop its guard
                    f"NonFiniteGuard must come before {type(other).__name__} in "
                    "Trainer(callbacks=[...]): otherwise it changes spikes before the guard "
                    "measures them. A preset's trainer_kwargs(callbacks=[...]) sorts them."
                )

    def reset_for_model(self, pl_module: pl.LightningModule) -> None:
        """Reset counts, history and events."""
        self.escalation.reset()
        self._steps, self.events = 0, []

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Find the parameters and patch the optimizers' ``step``."""
        super().on_fit_start(trainer, pl_module)
        self._patch_optimizers(trainer.optimizers)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Back up the loaded buffers, and take a snapshot or check the weights."""
        self._reset_run(BufferBackup(pl_module))
        if self.escalation.policy == "rollback":
            self._respond(trainer, pl_module)
        else:
            self._find_damage(trainer, pl_module)

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Record the batch's index, patch new optimizers, and back up the buffers."""
        self._batch_idx = batch_idx
        if [control.optimizer for control in self._controls] != trainer.optimizers:
            self._patch_optimizers(trainer.optimizers)
            if self.escalation.policy == "rollback":
                self._respond(trainer, pl_module)
        if self._buffers is not None and not self._losses:
            self._buffers.restore_or_save(False)

    def on_before_backward(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, loss: Tensor
    ) -> None:
        """Record the loss of each backward pass. It stays on its device."""
        loss = loss.detach()
        if is_dtensor(loss):
            loss = loss.full_tensor()  # type: ignore[attr-defined]
        self._losses.append((self._batch_idx, loss if loss.ndim == 0 else loss.sum()))

    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Optimizer
    ) -> None:
        """Decide whether to skip this update."""
        index, step = self.measure(trainer, optimizer)
        losses = list(self._losses)
        groups = step_groups(trainer)
        if not losses and not step.gradients.tensors and not groups:
            return  # `training_step` returned None
        state = self.escalation.state(index)
        # Looks at a parameter, because this rank may have no gradients.
        first = next((one for group in optimizer.param_groups for one in group["params"]), None)
        on_host = first is None or reads_are_free(first.device)
        scale = loss_scale(trainer)
        # Reading the scale is free on a CPU.
        known_scale = scale.item() if on_host and scale is not None else scale
        detection = self._detector.detect(
            mean_loss(trainer, [loss for _, loss in losses], known_scale, read=on_host),
            step.norms.total if on_host else torch.as_tensor(step.norms.total),
            state["history"],
            loss_scale=known_scale,
            reduce_on=trainer.strategy.root_device,
            groups=groups,
        )
        position = (trainer.global_step, trainer.current_epoch, index)
        record = StepRecord(*position, losses, step.gradients.parameters, step.norms)
        if not on_host and self._controls[index].skips_on_device():
            assert isinstance(detection.code, Tensor)
            self._delayed.push(detection.code[None], (detection, record))
            self._count_delayed(self._delayed.due())
        else:
            detection = detection.on_host(float(detection.code))
            self._count_step(detection, record)
        self.barriers[index] = detection.barrier
        if self._buffers is not None and detection.fault is not False:
            self._buffers.restore_or_save(detection.fault)
        self._controls[index].prepare(detection.skip, state["lr_scale"])
        self._steps += 1
        self._stepped = True
        self._log_due = self._log_due or self._schedule.is_due(self._steps)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any, **kwargs: Any
    ) -> None:
        """Respond to faults or take a snapshot. Optimizers and schedulers have stepped by now."""
        if not self._stepped:
            return
        self._stepped, self._losses = False, []
        log_due, self._log_due = self._log_due, False
        self.barriers.clear()
        for control in self._controls:
            control.reset()
        if self._faults:
            self._respond(trainer, pl_module)
            return
        self._good_batches += 1
        snapshot_due = self._good_batches >= self.snapshot_every_n_steps
        if self.escalation.policy == "rollback" and snapshot_due:
            self._count_delayed(self._delayed.flush())
            self._good_batches -= len(self._faults)
            self._respond(trainer, pl_module)
        if log_due:
            log_scalars(trainer, self.escalation.scalars())

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Read the last fault codes from the device, and respond."""
        self._count_delayed(self._delayed.flush())
        if self._faults:
            self._respond(trainer, pl_module)

    def _patch_optimizers(self, optimizers: list[Optimizer]) -> None:
        for control in self._controls:
            control.release()
        self._controls = [UpdateControl(optimizer) for optimizer in optimizers]

    def _count_step(self, detection: Detection, record: StepRecord) -> None:
        """Count a step whose detection is on the host. If it has a fault, keep its record."""
        assert record.optimizer is not None
        kind = detection.kind
        action = self.escalation.record(record.optimizer, kind, overflow=bool(detection.skip))
        if kind is not None and action is not None:
            record.kind, record.action = kind, action
            record.loss, record.norm = float(detection.loss), float(detection.norm)
            self._faults.append(record)

    def _count_delayed(
        self, reads: Iterator[tuple[list[float], tuple[Detection, StepRecord]]]
    ) -> None:
        """Count earlier steps, now that the device's fault codes have been read."""
        for (code,), (detection, record) in reads:
            self._count_step(detection.on_host(code), record)

    def _respond(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Respond to the worst fault, or take a snapshot. All ranks call it at the same step."""
        damaged = self._find_damage(trainer, pl_module)
        faults, self._faults = self._faults, []
        if not faults and not damaged:
            tensors = self._tensors(pl_module)
            self._restores, self._good_batches = 0, self.snapshot_every_n_steps
            if not any(map(is_lazy, tensors.values())):  # otherwise wait for the first good step
                self._snapshot.take(trainer, tensors)
                self._good_batches = 0
            return
        if damaged:
            # A weight may have become NaN between steps, without a recorded fault.
            faults = faults or [StepRecord(trainer.global_step, trainer.current_epoch)]
            faults[-1].kind, faults[-1].action = "nonfinite_weight", "rollback"
        if not self._snapshot or self._restores >= MAX_RESTORES:
            for fault in faults:
                if fault.action == "rollback":
                    fault.action = "skip" if fault.kind in SPIKES else "raise"
        worst = max(faults, key=lambda fault: list(RESPONSES).index(fault.action))
        if worst.action == "rollback":
            self._snapshot.restore(trainer, self._tensors(pl_module))
            self.escalation.record_rollback()
            self._restores += 1
            self._good_batches = 0
            self._delayed.clear()  # pending codes belong to the replaced weights
        log_scalars(trainer, self.escalation.scalars())
        events = record_events(trainer, faults, self.names, damaged, is_first=not self.events)
        self.events = [*self.events, *events][-MAX_EVENTS:]
        if worst.action == "raise":
            raise FloatingPointError(self._explain(events[faults.index(worst)]))

    def _explain(self, event: Event) -> str:
        """Return the reason for stopping the run at ``event``, and advice."""
        escalation, counts = self.escalation, self.escalation.scalars()
        return (
            f"NonFiniteGuard(policy={escalation.policy!r}) stopped the run: {describe(event)}. "
            f"Faults in a row: {counts['guard/consecutive']:.0f} (max_consecutive="
            f"{escalation.max_consecutive}); steps skipped: {counts['guard/skipped']:.0f} of "
            f"{self._steps}; rollbacks: {escalation.rollbacks}. {KINDS[event['kind']][1]}"
        )

    def _tensors(self, pl_module: pl.LightningModule) -> dict[str, Tensor]:
        """Return all parameters of the optimizers and all buffers, by name."""
        return {name: p for p, name in self.names.items()} | dict(pl_module.named_buffers())

    def _find_damage(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> list[str]:
        return self._damage.find(self._tensors(pl_module), pl_module, step_groups(trainer))

    def diagnose(self) -> list[Verdict]:
        """Return whether faults were found."""
        if not self._steps:
            finding = "NonFiniteGuard has not seen a step yet."
            return [Verdict("stability", "unknown", finding, "Call doctor() after training.")]
        if not self.events:
            finding = f"NonFiniteGuard found no faults in {self._steps} steps."
            return [Verdict("stability", "ok", finding)]
        newest, skipped = self.events[-1], self.escalation.scalars()["guard/skipped"]
        finding = (
            f"NonFiniteGuard skipped {skipped:.0f} of {self._steps} steps. The newest fault is "
            f"{newest['kind']} at step {newest['step']}."
        )
        share = min(1.0, skipped / self._steps)
        return [Verdict("stability", "look", finding, KINDS[newest["kind"]][1], gain=share)]

    def report(self) -> Report:
        """Return a table of the newest 20 events, and the run's counts as a note."""
        scalars = self.escalation.scalars()
        counts = ", ".join(f"{key[6:]} {value:g}" for key, value in scalars.items())
        title = f"NonFiniteGuard(policy={self.escalation.policy!r})"
        rows = [{**e, "parameters": ", ".join(e["parameters"][:2])} for e in self.events[-20:]]
        return Report(title, rows, [f"After {self._steps} steps: {counts}."])

    def release(self, trainer: pl.Trainer) -> None:
        """Undo all changes to the optimizers and drop references to the model."""
        super().release(trainer)
        self._patch_optimizers([])
        self._reset_run(None)

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Count the last steps on all ranks: Lightning may call ``state_dict`` on one rank only."""
        self._count_delayed(self._delayed.flush())
        checkpoint["callbacks"][self.state_key] = self.state_dict()

    def state_dict(self) -> dict[str, Any]:
        """Return counts, learning rate scales, histories and events, as plain types."""
        return {
            "escalation": self.escalation.state_dict(),
            "steps": self._steps,
            "events": [dict(event) for event in self.events],
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the result of :meth:`state_dict`."""
        self.escalation.load_state_dict(state_dict["escalation"])
        self._steps = state_dict["steps"]
        self.events = [dict(event) for event in state_dict["events"]]
