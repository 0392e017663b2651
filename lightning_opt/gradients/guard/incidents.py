"""A fault of one step: what the host knew when it happened, and how it reads afterwards."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import Tensor

from lightning_opt.core.norms import GradientNorms
from lightning_opt.gradients.guard.events import Event, EventLog, shorten
from lightning_opt.gradients.guard.faults import LARGEST_NORM, Kind
from lightning_opt.gradients.guard.judge import Judge
from lightning_opt.gradients.guard.ladder import Action, Policy

if TYPE_CHECKING:
    import lightning.pytorch as pl

_logger = logging.getLogger(__name__)

DONE = {
    "skip": "the step is skipped (further skips are not announced)",
    "backoff": "the learning rate is scaled down",
    "rollback": "the snapshot is restored",
    "raise": "the run is stopped",
}

NAMED_PARAMETERS = 10
"""Parameters that an event names; it counts the rest."""


@dataclass(slots=True)
class Sighting:
    """A step as it was when its update was decided on, for a host that may look later.

    It holds no gradient, so that none lives longer than it would without the guard.

    Attributes:
        step: ``trainer.global_step`` before the update.
        epoch: ``trainer.current_epoch``.
        losses: One a backward pass, on their device.
        batches: Index and, if they are to be saved, contents of the batches since the last step.
        parameters: Those that have a gradient.
        norms: Of their gradients.
    """

    step: int
    epoch: int
    losses: list[Tensor]
    batches: list[tuple[int, Any]]
    parameters: list[Tensor]
    norms: GradientNorms

    def bad_place(self) -> int | None:
        """Return the place of the first loss of this rank that is not finite. Reads the losses."""
        for place, loss in enumerate(self.losses):
            if not math.isfinite(loss.item()):
                return place
        return None

    def batch_at(self, place: int | None) -> tuple[int | None, Any]:
        """Return index and contents of the batch of that loss, or of the last batch."""
        if not self.batches:
            return None, None
        one_each = len(self.losses) == len(self.batches)
        return self.batches[place if one_each and place is not None else -1]

    def parameters_of(self, kind: Kind, names: Mapping[Tensor, str]) -> list[str]:
        """Return the parameters whose gradients are bad; for a spike the three largest ones."""
        norms = self.norms.per_tensor
        values = norms.tolist() if isinstance(norms, Tensor) else norms
        named = [names.get(parameter, "?") for parameter in self.parameters]
        if kind in ("loss_spike", "gradient_spike"):
            largest = sorted(zip(values, named, strict=True), reverse=True)
            return [name for _, name in largest[:3]]
        return [n for n, value in zip(named, values, strict=True) if not value <= LARGEST_NORM]


@dataclass(slots=True)
class Fault:
    """A step that was left out for ``kind``, and the answer to it.

    Attributes:
        kind: What was wrong.
        action: What is done about it.
        optimizer: Its index.
        loss: Loss of the step, the mean over ranks.
        norm: Total norm of its gradient.
        sighting: The step; None where weights were found bad apart from any step.
    """

    kind: Kind
    action: Action
    optimizer: int | None = None
    loss: float | None = None
    norm: float | None = None
    sighting: Sighting | None = None

    def event(self, step: int, epoch: int, names: Mapping[Tensor, str]) -> Event:
        """Return the fault as plain types, as this rank sees it.

        Args:
            step: To name where there was no step.
            epoch: The same.
            names: Of the parameters.
        """
        seen = self.sighting
        place = seen.bad_place() if seen else None
        bad = seen.parameters_of(self.kind, names) if seen else []
        return {
            "step": seen.step if seen else step,
            "epoch": seen.epoch if seen else epoch,
            "batch_idx": seen.batch_at(place)[0] if seen else None,
            "optimizer": self.optimizer,
            "kind": self.kind,
            "action": self.action,
            "loss": self.loss,
            "norm": self.norm,
            "ranks": [] if place is None else [_rank()],
            "parameters": bad[:NAMED_PARAMETERS],
            "parameters_total": len(bad),
        }


def record_faults(
    log: EventLog,
    trainer: pl.Trainer,
    faults: Sequence[Fault],
    weights: list[str],
    names: Mapping[Tensor, str],
) -> list[Event]:
    """Log faults as events, which are the same on every rank but for the file of a saved batch.

    Args:
        log: Where they go.
        trainer: The Trainer. A collective, if it has more than one rank.
        faults: The same number on each rank.
        weights: Names of weights and buffers that are not finite.
        names: Of the parameters.
    """
    own = [fault.event(trainer.global_step, trainer.current_epoch, names) for fault in faults]
    events = [merge_events(of_ranks) for of_ranks in zip(*gather(own), strict=True)]
    for event, fault in zip(events, faults, strict=True):
        if fault.kind == "nonfinite_weight":
            event["parameters"] = weights[:NAMED_PARAMETERS]
            event["parameters_total"] = len(weights)
        seen = fault.sighting
        concerns = not event["ranks"] or trainer.global_rank in event["ranks"]
        if log.save_batch and seen is not None and concerns:
            log.save(trainer, event, seen.batch_at(seen.bad_place())[1])
        log.add(trainer, event)
        if trainer.is_global_zero and (log.count == 1 or fault.action != "skip"):
            _logger.warning("NonFiniteGuard: %s; %s.", describe(event), DONE[fault.action])
    return events


def merge_events(of_ranks: Sequence[Event]) -> Event:
    """Return what all ranks saw of one fault; the batch is that of the first with a bad loss."""
    merged = dict(next((event for event in of_ranks if event["ranks"]), of_ranks[0]))
    merged["ranks"] = [rank for event in of_ranks for rank in event["ranks"]]
    return merged


def gather(value: Any) -> list[Any]:
    """Return the value of every rank, in order. A collective, if there is more than one."""
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def describe(event: Event) -> str:
    """Return one sentence about an event."""
    what = {
        "nonfinite_loss": "the loss is {loss}",
        "nonfinite_gradient": "the gradient norm is {norm:.4g}",
        "loss_spike": "the loss of {loss:.4g} is a spike",
        "gradient_spike": "the gradient norm of {norm:.4g} is a spike",
        "nonfinite_weight": "weights or buffers are NaN or infinite",
    }[event["kind"]].format(**event)
    where = f"at step {event['step']} (epoch {event['epoch']}, batch {event['batch_idx']}"
    where += f", rank {', '.join(map(str, event['ranks']))})" if event["ranks"] else ")"
    names = shorten(event["parameters"], 3)
    return f"{where} {what}" + (f" ({names})" if names else "")


def explain(event: Event, judge: Judge, steps: int) -> str:
    """Return why a run was stopped at ``event``, and what to do about it."""
    counts, ladder = judge.scalars(), judge.ladder
    return (
        f"NonFiniteGuard(policy={ladder.policy!r}) stopped the run: {describe(event)}. Faults in a "
        f"row: {counts['guard/consecutive']:.0f} (max_consecutive={ladder.max_consecutive}); steps "
        f"skipped: {counts['guard/skipped']:.0f} of {steps}; rollbacks: {judge.rollbacks}. "
        f"{_advise(event, ladder.policy)}"
    )


def _advise(event: Event, policy: Policy) -> str:
    steps = {
        "nonfinite_loss": (
            "Look at that batch (save_batch=True writes it to disk) for NaN, wrong labels or an "
            "extreme scale, and at the loss for a log, a division or a root of 0. In 16-mixed, "
            "bf16-mixed has the range that activations need."
        ),
        "nonfinite_gradient": (
            "The loss is finite but its derivative is not: look for a root, a norm or a power at "
            "0, and for torch.where around an undefined branch, at the parameters named."
        ),
        "nonfinite_weight": (
            "The model itself is damaged, so no batch can be right. Resume from the last good "
            "checkpoint, with a lower learning rate if it is the update that overflowed."
        ),
        "loss_spike": "Lower the learning rate, or raise spike if such losses are normal here.",
        "gradient_spike": "Lower the learning rate, clip, or raise spike if it is normal here.",
    }[event["kind"]]
    if event["kind"] == "nonfinite_weight" and policy != "rollback":
        steps += " NonFiniteGuard(policy='rollback') keeps a snapshot to return to."
    return steps


def _rank() -> int:
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
