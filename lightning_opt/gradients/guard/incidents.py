"""A fault of one step: what the host knew when it happened, and how it is recorded."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
import torch.distributed as dist
from lightning.fabric.utilities import move_data_to_device
from torch import Tensor

from lightning_opt.core.modules.sharding import ranks_of_a_step
from lightning_opt.core.numerics.norms import GradientNorms
from lightning_opt.core.output.report import Report
from lightning_opt.gradients.guard.damage import gather
from lightning_opt.gradients.guard.detector import LARGEST_NORM, Kind
from lightning_opt.gradients.guard.ladder import Action

if TYPE_CHECKING:
    import lightning.pytorch as pl

_logger = logging.getLogger(__name__)

Event: TypeAlias = dict[str, Any]

KEPT_EVENTS = 1000
"""Events kept in memory and in checkpoints."""

SAVED_BATCHES = 5
"""Batches written to disk by each rank, so that a lasting fault does not fill it."""

DONE: dict[Action, str] = {
    "skip": "the step is skipped (further skips are not announced)",
    "backoff": "the learning rate is scaled down",
    "rollback": "the snapshot is restored",
    "raise": "the run is stopped",
}
"""What is said of each answer to a fault, from mild to severe."""

NAMED_PARAMETERS = 10
"""Parameters that an event names; it counts the rest."""

KINDS: dict[Kind, tuple[str, str]] = {
    "nonfinite_loss": (
        "the loss is {loss}",
        "Look at that batch (save_batch=True writes it to disk) for NaN, wrong labels or an "
        "extreme scale, and at the loss for a log, a division or a root of 0. In 16-mixed, "
        "bf16-mixed has the range that activations need.",
    ),
    "nonfinite_gradient": (
        "the gradient norm is {norm:.4g}",
        "The loss is finite but its derivative is not: look for a root, a norm or a power at 0, "
        "and for torch.where around an undefined branch, at the parameters named.",
    ),
    "loss_spike": (
        "the loss of {loss:.4g} is a spike",
        "Lower the learning rate, or raise spike if such losses are normal here.",
    ),
    "gradient_spike": (
        "the gradient norm of {norm:.4g} is a spike",
        "Lower the learning rate, clip, or raise spike if it is normal here.",
    ),
    "nonfinite_weight": (
        "weights or buffers are NaN or infinite",
        "The model itself is damaged, so no batch can be right. Resume from the last good "
        "checkpoint, with a lower learning rate if it is the update that overflowed. "
        "With policy='rollback' the guard returns to a snapshot, three times in a row at most.",
    ),
}
"""What each fault is, to be formatted with its event, and what to do about it."""


@dataclass(slots=True)
class Incident:
    """A step as it was when its update was decided on, for a host that may look later.

    It holds no gradient, so that none lives longer than it would without the guard.

    Attributes:
        step: ``trainer.global_step`` before the update.
        epoch: ``trainer.current_epoch``.
        optimizer: Its index; None where weights were found bad apart from any step.
        losses: One a backward pass, on their device.
        batches: Index and, if they are to be saved, contents of the batches since the last step.
        parameters: Those that have a gradient.
        norms: Of their gradients.
        kind: What was wrong, as it turned out.
        action: What is done about it.
        loss: Loss of the step, the mean over ranks.
        norm: Total norm of its gradient.
    """

    step: int
    epoch: int
    optimizer: int | None = None
    losses: list[Tensor] = field(default_factory=list)
    batches: list[tuple[int, Any]] = field(default_factory=list)
    parameters: list[Tensor] = field(default_factory=list)
    norms: GradientNorms | None = None
    kind: Kind = "nonfinite_weight"
    action: Action = "skip"
    loss: float | None = None
    norm: float | None = None

    def bad_place(self) -> int | None:
        """Return the place of the first loss of this rank that is not finite. Reads the losses."""
        bad = (place for place, loss in enumerate(self.losses) if not math.isfinite(loss.item()))
        return next(bad, None)

    def batch(self) -> tuple[int | None, Any]:
        """Return index and contents of the batch with the bad loss, or of the last batch."""
        if not self.batches:
            return None, None
        place = self.bad_place() if len(self.losses) == len(self.batches) else None
        return self.batches[-1 if place is None else place]

    def bad_parameters(self, names: Mapping[Tensor, str]) -> list[str]:
        """Return the parameters whose gradients are bad; for a spike the three largest ones."""
        norms = [] if self.norms is None else self.norms.per_tensor
        values = norms.tolist() if isinstance(norms, Tensor) else norms
        named = [names.get(parameter, "?") for parameter in self.parameters]
        if self.kind in ("loss_spike", "gradient_spike"):
            largest = sorted(zip(values, named, strict=True), reverse=True)
            return [name for _, name in largest[:3]]
        return [n for n, value in zip(named, values, strict=True) if not value <= LARGEST_NORM]

    def event(self, names: Mapping[Tensor, str], damaged: list[str], rank: int) -> Event:
        """Return the fault as plain types, as this rank sees it.

        Args:
            names: Of the parameters.
            damaged: Weights and buffers that are not finite.
            rank: Of this process.
        """
        bad = damaged if self.kind == "nonfinite_weight" else self.bad_parameters(names)
        return {
            "step": self.step,
            "epoch": self.epoch,
            "batch_idx": self.batch()[0],
            "optimizer": self.optimizer,
            "kind": self.kind,
            "action": self.action,
            "loss": self.loss,
            "norm": self.norm,
            "ranks": [] if self.bad_place() is None else [rank],
            "parameters": bad[:NAMED_PARAMETERS],
            "parameters_total": len(bad),
        }


class EventLog:
    """The events of a run, the newest :data:`KEPT_EVENTS` of them.

    Args:
        save_batch: Whether to save batches with a fault, up to :data:`SAVED_BATCHES` a rank.

    Attributes:
        folder: Where to.
    """

    folder = Path("guard")

    def __init__(self, save_batch: bool) -> None:
        self.clear()
        self.save_batch = save_batch

    def clear(self) -> None:
        """Forget all events."""
        self.events: list[Event] = []
        self.count = self._saved = 0

    def record(
        self,
        trainer: pl.Trainer,
        incidents: Sequence[Incident],
        names: Mapping[Tensor, str],
        damaged: list[str],
    ) -> list[Event]:
        """Enter faults as events, which are the same on every rank but for a saved batch's file.

        A collective, if there is more than one rank.

        Args:
            trainer: Whose they are.
            incidents: The same number on each rank.
            names: Of the parameters.
            damaged: Weights and buffers that are not finite.
        """
        rank, groups = trainer.global_rank, ranks_of_a_step(trainer)
        own = [incident.event(names, damaged, rank) for incident in incidents]
        everyone = gather(own, groups)
        events = [merge_events(of_ranks) for of_ranks in zip(*everyone, strict=True)]
        for event, incident in zip(events, incidents, strict=True):
            mine = not event["ranks"] or rank in event["ranks"]
            if self.save_batch and incident.batches and mine and self._saved < SAVED_BATCHES:
                self._saved += 1
                batch = move_data_to_device(incident.batch()[1], torch.device("cpu"))
                self.folder.mkdir(parents=True, exist_ok=True)
                path = self.folder / f"step{event['step']}_rank{rank}.pt"
                torch.save({"event": event, "batch": batch}, path)
                event["batch_file"] = str(path)
            self.events.append(event)
            self.count += 1
            leads = not groups or dist.get_rank(groups[0]) == 0
            if leads and (self.count == 1 or event["action"] != "skip"):
                done = DONE[event["action"]]
                _logger.warning("NonFiniteGuard: %s; %s.", describe(event), done)
        del self.events[:-KEPT_EVENTS]
        return events

    def report(self, title: str, notes: list[str], rows: int = 20) -> Report:
        """Return the newest events as a table."""
        shown = self.events[-rows:]
        if self.count > len(shown):
            notes = [f"The newest {len(shown)} of {self.count} events.", *notes]
        table = [{**event, "parameters": shorten(event["parameters"], 2)} for event in shown]
        return Report(title, table, notes)

    def state_dict(self) -> dict[str, Any]:
        """Return the events kept, as plain types."""
        return {"events": [dict(event) for event in self.events], "count": self.count}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned."""
        self.events = [dict(event) for event in state_dict["events"]]
        self.count = state_dict["count"]


def merge_events(of_ranks: Sequence[Event]) -> Event:
    """Return what all ranks saw of one fault; the batch is that of the first with a bad loss."""
    merged = dict(next((event for event in of_ranks if event["ranks"]), of_ranks[0]))
    merged["ranks"] = [rank for event in of_ranks for rank in event["ranks"]]
    return merged


def describe(event: Event) -> str:
    """Return one sentence about an event."""
    where = f"at step {event['step']} (epoch {event['epoch']}, batch {event['batch_idx']}"
    where += f", rank {', '.join(map(str, event['ranks']))})" if event["ranks"] else ")"
    names = shorten(event["parameters"], 3)
    what = KINDS[event["kind"]][0].format(**event)
    return f"{where} {what}" + (f" ({names})" if names else "")


def shorten(names: list[str], limit: int) -> str:
    """Return the first ``limit`` names, and how many more there are."""
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more
