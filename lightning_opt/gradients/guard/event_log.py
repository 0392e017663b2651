"""What a guard saw: plain records, in memory and with the batches that caused them."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from lightning.fabric.utilities import move_data_to_device
from torch import Tensor

from lightning_opt.core.report import Report
from lightning_opt.gradients.guard.damage import gather
from lightning_opt.gradients.guard.incident import (
    Event,
    Incident,
    describe,
    merge_events,
    shorten,
)

if TYPE_CHECKING:
    import lightning.pytorch as pl

_logger = logging.getLogger(__name__)

KEPT_EVENTS = 1000
"""Events kept in memory and in checkpoints."""

SAVED_BATCHES = 5
"""Batches written to disk by each rank, so that a lasting fault does not fill it."""

DONE = {
    "skip": "the step is skipped (further skips are not announced)",
    "backoff": "the learning rate is scaled down",
    "rollback": "the snapshot is restored",
    "raise": "the run is stopped",
}


class EventLog:
    """The events of a run, the newest :data:`KEPT_EVENTS` of them.

    Args:
        save_batch: Whether to save batches with a fault, up to :data:`SAVED_BATCHES` a rank.
    """

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
        own = [incident.event(names, damaged) for incident in incidents]
        events = [merge_events(of_ranks) for of_ranks in zip(*gather(own), strict=True)]
        folder = Path(trainer.log_dir or trainer.default_root_dir) / "guard"  # on every rank
        for event, incident in zip(events, incidents, strict=True):
            mine = not event["ranks"] or trainer.global_rank in event["ranks"]
            if self.save_batch and incident.batches and mine and self._saved < SAVED_BATCHES:
                self._saved += 1
                batch = move_data_to_device(incident.batch()[1], torch.device("cpu"))
                folder.mkdir(parents=True, exist_ok=True)
                path = folder / f"step{event['step']}_rank{trainer.global_rank}.pt"
                torch.save({"event": event, "batch": batch}, path)
                event["batch_file"] = str(path)
            self.events.append(event)
            self.count += 1
            if trainer.is_global_zero and (self.count == 1 or event["action"] != "skip"):
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
