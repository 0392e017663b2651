"""What a guard saw: plain records, in memory, in a file and with the batches that caused them."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from lightning.fabric.utilities import move_data_to_device

from lightning_opt.core.report import Report

if TYPE_CHECKING:
    import lightning.pytorch as pl

Event = dict[str, Any]

KEPT_EVENTS = 1000
"""Events kept in memory and in checkpoints; the file has all of them."""

SAVED_BATCHES = 5
"""Batches written to disk by each rank, so that a lasting fault does not fill it."""


class EventLog:
    """The events of a run, the newest :data:`KEPT_EVENTS` of them.

    Args:
        events_file: A JSON-lines file that the first rank appends each event to; None for none.
        save_batch: Whether to save batches with a fault, up to :data:`SAVED_BATCHES` a rank.
    """

    def __init__(self, events_file: str | Path | None, save_batch: bool) -> None:
        self.clear()
        self.save_batch = save_batch
        self._file = None if events_file is None else Path(events_file)
        self._folder: Path | None = None

    def start(self, trainer: pl.Trainer) -> None:
        """Find the folder for batches. Call it on every rank: the log folder is agreed upon."""
        folder = trainer.log_dir
        self._folder = Path(folder or trainer.default_root_dir) / "guard"

    def clear(self) -> None:
        """Forget all events."""
        self.events: list[Event] = []
        self.count = self._saved = 0

    def add(self, trainer: pl.Trainer, event: Event) -> None:
        """Keep ``event`` and append it to the file."""
        self.events.append(event)
        del self.events[:-KEPT_EVENTS]
        self.count += 1
        if self._file is not None and trainer.is_global_zero:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            with self._file.open("a") as file:
                file.write(to_json_line(event) + "\n")

    def save(self, trainer: pl.Trainer, event: Event, batch: Any) -> None:
        """Write the batch with its event, for ``torch.load(path, weights_only=False)``."""
        if self._folder is None or self._saved >= SAVED_BATCHES:
            return
        self._saved += 1
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / f"step{event['step']}_rank{trainer.global_rank}.pt"
        torch.save({"event": event, "batch": move_data_to_device(batch, torch.device("cpu"))}, path)
        event["batch_file"] = str(path)

    def report(self, title: str, notes: list[str], rows: int = 20) -> Report:
        """Return the newest events as a table."""
        shown = self.events[-rows:]
        if self.count > len(shown):
            notes = [f"The newest {len(shown)} of {self.count} events.", *notes]
        return Report(
            title,
            [{**event, "parameters": shorten(event["parameters"], 2)} for event in shown],
            notes,
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the events kept, as plain types."""
        return {"events": [dict(event) for event in self.events], "count": self.count}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned."""
        self.events = [dict(event) for event in state_dict["events"]]
        self.count = state_dict["count"]


def to_json_line(event: Event) -> str:
    """Return an event as one line of strict JSON, in which NaN and infinities are strings."""
    plain = {
        key: str(value) if isinstance(value, float) and not math.isfinite(value) else value
        for key, value in event.items()
    }
    return json.dumps(plain, allow_nan=False)


def shorten(names: list[str], limit: int) -> str:
    """Return the first ``limit`` names, and how many more there are."""
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more
