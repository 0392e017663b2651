"""Keeps a run alive through NaN, infinities and spikes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.optim import Optimizer

from lightning_opt.core.arguments import at_least, positive
from lightning_opt.core.measure.reading import DelayedReads, Schedule
from lightning_opt.core.modules.sharding import ranks_of_a_step
from lightning_opt.core.output.loggers import log_scalars
from lightning_opt.core.output.report import Report
from lightning_opt.core.output.verdicts import Verdict
from lightning_opt.gradients.gradient_callback import GradientCallback, loss_scale
from lightning_opt.gradients.guard.buffers import BufferKeeper
from lightning_opt.gradients.guard.damage import DamageWatch
from lightning_opt.gradients.guard.detector import Symptoms
from lightning_opt.gradients.guard.incidents import DONE, KINDS, Event, EventLog, Incident, describe
from lightning_opt.gradients.guard.ladder import Judge, Ladder, Policy
from lightning_opt.gradients.guard.losses import LossLedger, mean_loss
from lightning_opt.gradients.guard.snapshot import Snapshot
from lightning_opt.gradients.guard.update_control import UpdateControl, skips_on_device
from lightning_opt.trainer.run_callback import RunCallback

if TYPE_CHECKING:
    import lightning.pytorch as pl

RESTORES_OF_A_SNAPSHOT = 3
"""A run that fails so often before it has earned a new snapshot is getting nowhere."""


class NonFiniteGuard(GradientCallback):
    """Skips steps that would ruin the run; backs off, rolls back or stops if they persist.

    It skips a step if the loss of one of its batches, on any rank, or the gradient is NaN or
    infinite or, with ``spike``, far above the usual. Weights, optimizer state (momentum, step
    counts) and small buffers (BatchNorm) stay exactly as before the step. ``global_step`` and
    learning-rate schedulers advance, as they do when Lightning skips a step in fp16.

    What happens at consecutive faults, counted for each optimizer:

    1. The step is skipped.
    2. At ``backoff_after``, ``lr_backoff`` scales the learning rate, only during each update, so
       that schedulers and loggers do not see it. It recovers over ``lr_recovery_steps``.
    3. At ``rollback_after``, with ``policy="rollback"``, model, optimizers, schedulers and loss
       scaler return to the snapshot in host memory, and the learning rate is reduced again. The
       data continues, so the batches that led here are not repeated.
    4. At ``max_consecutive`` the run stops with an error that explains what happened.

    A NaN in a weight cannot be skipped: it leads to 3 at once, or to 4 without a snapshot. Spikes
    alone never stop a run: if they persist after 3, their level becomes the new normal.

    All ranks decide together, with one all-gather of two numbers per step; each replica of
    ``DiLoCoStrategy`` by itself, taking the shared weights when it rolls back. With fused Adam,
    AdamW, SGD or Adagrad on an accelerator the host never waits: the device itself skips the step,
    and the host learns of it two steps later, for 2 to 4. With other optimizers it reads one small
    tensor per step. On a CPU reading is free.

    Under the fp16 loss scaler, a non-finite gradient with a finite loss counts as an overflow,
    which is the scaler's job, unless the loss scale is already below 1.

    Put it before :class:`AdaptiveClipping`, which then ignores skipped steps. The gradients of
    such a step stay readable for hooks and other callbacks.

    Logged at faults and every ``every_n_steps`` optimizer steps:

    ===================== ======================================================================
    ``guard/skipped``     steps skipped so far because of faults
    ``guard/consecutive`` current consecutive faults; the maximum over optimizers
    ``guard/overflows``   overflows under the loss scaler so far
    ``guard/lr_scale``    factor on the learning rates; the minimum over optimizers
    ``guard/rollbacks``   snapshots restored so far
    ===================== ======================================================================

    Args:
        policy: ``"skip"`` does 1, 2 and 4; ``"rollback"`` does all; ``"raise"`` skips the step and
            stops at the first fault.
        max_consecutive: Consecutive faults at which the run stops, at least 1.
        spike: Deviations above the usual level, in the logarithm, at which a loss or a gradient
            norm is a spike; None for no spikes. 6 is a conservative choice. See :class:`Robust`.
            Losses of 0 and below have no logarithm and are never spikes.
        lr_backoff: Factor in (0, 1]; 1 leaves the learning rate alone.
        snapshot_every_n_steps: Good batches from one snapshot to the next, at least 1. Only for
            ``policy="rollback"``.
        backoff_after: Consecutive faults at which the learning rate is reduced.
        rollback_after: Consecutive faults at which the snapshot is restored, below
            ``max_consecutive``.
        lr_recovery_steps: Good steps after which one reduction is undone.
        every_n_steps: Steps between logged values, at least 1.
        save_batch: Whether to save up to five faulty batches per rank, as ``guard/*.pt`` in the
            Trainer's log folder.

    Raises:
        ValueError: In ``__init__`` for arguments out of range; in ``setup`` under DeepSpeed, or if
            it comes after ``AdaptiveClipping``; in ``on_fit_start`` for LBFGS.
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
        lr_recovery_steps: int = 100,
        every_n_steps: int = 50,
        save_batch: bool = False,
    ) -> None:
        super().__init__()
        self.ladder = Ladder(
            policy, backoff_after, rollback_after, max_consecutive, lr_backoff, lr_recovery_steps
        )
        self.spike = None if spike is None else positive("spike", spike)
        self.snapshot_every_n_steps = at_least("snapshot_every_n_steps", snapshot_every_n_steps, 1)
        self._schedule = Schedule(every_n_steps)
        self._judge = Judge(self.ladder, self.spike)
        self._log = EventLog(save_batch)
        self._steps = 0
        self._controls: list[UpdateControl] = []
        self._start_run(None, [])

    def _start_run(self, buffers: BufferKeeper | None, optimizers: list[Optimizer]) -> None:
        """Forget what belongs to a run."""
        self._losses = LossLedger(optimizers)
        self._batches: list[tuple[int, Any]] = []
        self._faults: list[Incident] = []
        self._delayed: DelayedReads[tuple[Symptoms, Incident]] = DelayedReads()
        self._stepped = self._log_due = False
        self._good_batches = self._restores = 0
        self._damage, self._snapshot, self._buffers = DamageWatch(), Snapshot(), buffers

    @property
    def events(self) -> list[Event]:
        """The newest 1000 faults, oldest first, each a plain ``dict``.

        ``step`` is ``trainer.global_step`` before the update that was left out; ``batch_idx`` that
        of the batch with the bad loss, else of the step's last; ``ranks`` those whose own loss is
        not finite; ``parameters`` those whose gradients are not (ten of ``parameters_total``; for a
        spike the largest), or for ``nonfinite_weight`` those that are not finite themselves.
        """
        return self._log.events

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Check what can be checked before the model is wrapped."""
        super().setup(trainer, pl_module, stage)
        clipping = [
            other
            for other in self.in_front(trainer)
            if isinstance(other, RunCallback) and other.rescales_gradients
        ]
        if clipping and stage == "fit":
            raise ValueError(
                f"NonFiniteGuard must come before {type(clipping[0]).__name__} in "
                "Trainer(callbacks=[...]): after it, it would see spikes only after they have "
                "been clipped."
            )

    def reset_for_model(self, pl_module: pl.LightningModule) -> None:
        """Forget what happened to another model."""
        self._judge, self._steps = Judge(self.ladder, self.spike), 0
        self._log.clear()

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Learn the parameters, and take hold of the optimizers' updates."""
        super().on_fit_start(trainer, pl_module)
        self._controls = [UpdateControl(optimizer) for optimizer in trainer.optimizers]

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Copy the buffers, and take the first snapshot, now that any checkpoint is loaded."""
        self._start_run(BufferKeeper(pl_module), trainer.optimizers)
        # Lightning asks all ranks, and not all may meet the same faults.
        self._log.folder = Path(trainer.log_dir or trainer.default_root_dir) / "guard"
        damaged = self._damaged(trainer, pl_module)
        if self.ladder.policy == "rollback":
            self._respond(trainer, pl_module, damaged)

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Remember which batch it is."""
        self._batches.append((batch_idx, batch if self._log.save_batch else None))

    def on_before_backward(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, loss: Tensor
    ) -> None:
        """Remember the loss, unread; every micro-batch of an accumulation window counts."""
        self._losses.before_backward(loss)

    def on_after_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Note whose gradients came from it."""
        self._losses.after_backward()

    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Optimizer
    ) -> None:
        """Decide whether this update happens."""
        index, step = self.measure(trainer, optimizer)
        losses = self._losses.take(index)
        batches, self._batches = self._batches, self._batches[-1:]
        groups = ranks_of_a_step(trainer)
        if not losses and not step.gradients.tensors and not groups:
            return  # `training_step` returned None: there is nothing to judge
        standing = self._judge.standing(index)
        on_host = step.gradients.on_host
        scale = loss_scale(trainer)
        known_scale = scale.item() if on_host and scale is not None else scale  # on a CPU
        symptoms = self._judge.detector.examine(
            mean_loss(trainer, losses, known_scale, read=on_host),
            step.norms.total,
            standing["usual"],
            loss_scale=known_scale,
            reduce_on=trainer.strategy.root_device,
            groups=groups,
        )
        deferred = not on_host and skips_on_device(optimizer)
        if not deferred:
            symptoms = symptoms.known(float(symptoms.verdict))
        skip = symptoms.skip
        incident = Incident(
            trainer.global_step,
            trainer.current_epoch,
            index,
            losses,
            batches,
            step.gradients.parameters,
            step.norms,
        )
        if deferred:
            assert isinstance(symptoms.verdict, Tensor)
            self.barriers[index] = symptoms.barrier
            self._delayed.push(symptoms.verdict[None], (symptoms, incident))
            self._hear(self._delayed.due())
        else:
            self._note(symptoms, incident)
            (self.withheld.add if skip else self.withheld.discard)(index)
        if self._buffers is not None:
            self._buffers.settle(symptoms.fault)
        self._controls[index].hold(skip, standing["lr_scale"])
        self._steps += 1
        self._stepped = True
        self._log_due = self._log_due or self._schedule.is_due(self._steps)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any, **kwargs: Any
    ) -> None:
        """Answer the faults or take a snapshot, now that optimizers and schedulers have stepped."""
        if not self._stepped:
            return
        self._stepped = False
        log_due, self._log_due = self._log_due, False
        self._batches = []
        self.withheld.clear()
        self.barriers.clear()
        for control in self._controls:
            control.forget()
        if self._faults:
            self._respond(trainer, pl_module, self._damaged(trainer, pl_module))
            return
        self._good_batches += 1
        if self.ladder.policy == "rollback" and self._good_batches >= self.snapshot_every_n_steps:
            self._hear(self._delayed.flush())
            self._good_batches -= len(self._faults)  # they were not, as it turns out
            self._respond(trainer, pl_module, self._damaged(trainer, pl_module))
        if log_due:
            log_scalars(trainer, self._judge.scalars())

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Answer what the device has not told yet."""
        self._hear(self._delayed.flush())
        if self._faults:
            self._respond(trainer, pl_module, self._damaged(trainer, pl_module))

    def _note(self, symptoms: Symptoms, incident: Incident) -> None:
        """Take note of a step whose symptoms are known."""
        assert incident.optimizer is not None
        verdict = self._judge.judge(incident.optimizer, symptoms)
        if verdict is not None:
            incident.kind, incident.action = verdict
            incident.loss, incident.norm = float(symptoms.loss), float(symptoms.norm)
            self._faults.append(incident)

    def _hear(self, reads: Iterator[tuple[list[float], tuple[Symptoms, Incident]]]) -> None:
        """Take note of earlier steps, whose verdict comes from the device only now."""
        for (verdict,), (symptoms, incident) in reads:
            self._note(symptoms.known(verdict), incident)

    def _respond(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, damaged: list[str]
    ) -> None:
        """Do what the gravest of the faults demands, or take a snapshot if there is none.

        All ranks come here at the same step.
        """
        faults, self._faults = self._faults, []
        if not faults and not damaged:
            self._snapshot.take(trainer, self._tensors(pl_module))
            self._restores = self._good_batches = 0
            return
        if damaged:
            # No skip cures that. It may have come from a fault of the model or from anywhere else.
            faults = faults or [Incident(trainer.global_step, trainer.current_epoch)]
            faults[-1].kind, faults[-1].action = "nonfinite_weight", "rollback"
        gravest = max(faults, key=lambda fault: list(DONE).index(fault.action))
        if gravest.action == "rollback" and (
            not self._snapshot or self._restores >= RESTORES_OF_A_SNAPSHOT
        ):
            gravest.action = "raise"
        if gravest.action == "rollback":
            self._snapshot.restore(trainer, self._tensors(pl_module))
            self._judge.back_off()
            self._restores += 1
            self._good_batches = 0
            self._delayed.clear()  # what was under way concerned weights that are gone
            self._buffers = BufferKeeper(pl_module)
        log_scalars(trainer, self._judge.scalars())
        events = self._log.record(trainer, faults, self.names, damaged)
        if gravest.action == "raise":
            raise FloatingPointError(self._explain(events[faults.index(gravest)]))

    def _explain(self, event: Event) -> str:
        """Return why the run is stopped at ``event``, and what to do about it."""
        counts, ladder = self._judge.scalars(), self.ladder
        return (
            f"NonFiniteGuard(policy={ladder.policy!r}) stopped the run: {describe(event)}. Faults "
            f"in a row: {counts['guard/consecutive']:.0f} (max_consecutive="
            f"{ladder.max_consecutive}); steps skipped: {counts['guard/skipped']:.0f} of "
            f"{self._steps}; rollbacks: {self._judge.rollbacks}. {KINDS[event['kind']][1]}"
        )

    def _tensors(self, pl_module: pl.LightningModule) -> dict[str, Tensor]:
        """Return all parameters, as the optimizers hold them, and all buffers, by name."""
        weights = {name: parameter for parameter, name in self.names.items()}
        return {**weights, **dict(pl_module.named_buffers())}

    def _damaged(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> list[str]:
        buffers = [name for name, _ in pl_module.named_buffers()]
        return self._damage.find(self._tensors(pl_module), buffers, ranks_of_a_step(trainer))

    def diagnose(self) -> list[Verdict]:
        """Return whether steps were left out."""
        if not self._steps:
            finding = "NonFiniteGuard has seen no step yet."
            return [Verdict("stability", "unknown", finding, "Ask again after fit.")]
        if not self.events:
            finding = f"NonFiniteGuard has found nothing in {self._steps} steps."
            return [Verdict("stability", "ok", finding)]
        newest = self.events[-1]
        finding = (
            f"NonFiniteGuard met {self._log.count} faults in {self._steps} steps, the newest "
            f"{newest['kind']} at step {newest['step']}."
        )
        advice = "Look at its report(): batches, ranks and parameters are named there."
        return [Verdict("stability", "look", finding, advice)]

    def report(self) -> Report:
        """Return the newest events, one a row, with the counts of the run below."""
        counts = ", ".join(f"{key[6:]} {value:g}" for key, value in self._judge.scalars().items())
        title = f"NonFiniteGuard(policy={self.ladder.policy!r})"
        return self._log.report(title, [f"After {self._steps} steps: {counts}."])

    def release(self, trainer: pl.Trainer) -> None:
        """Undo everything."""
        super().release(trainer)
        for control in self._controls:
            control.release()
        self._controls = []
        self._start_run(None, [])

    def state_dict(self) -> dict[str, Any]:
        """Return counts, back-off, history of losses and norms, and events, as plain types."""
        self._hear(self._delayed.flush())
        return {
            "judge": self._judge.state_dict(),
            "steps": self._steps,
            "log": self._log.state_dict(),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned."""
        self._judge.load_state_dict(state_dict["judge"])
        self._steps = state_dict["steps"]
        self._log.load_state_dict(state_dict["log"])
