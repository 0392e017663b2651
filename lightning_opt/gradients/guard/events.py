"""The record of each step, and the log of faults."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_opt.core.modules.sharding import Groups, local_part, step_groups
from lightning_opt.core.numerics.norms import GradientNorms, as_real
from lightning_opt.core.output.report import Report
from lightning_opt.gradients.guard.detector import LARGEST_NORM, Kind
from lightning_opt.gradients.guard.escalation import Action
from lightning_opt.trainer.lightning import move_data_to_device

if TYPE_CHECKING:
    import lightning.pytorch as pl

_logger = logging.getLogger(__name__)

Event: TypeAlias = dict[str, Any]

MAX_EVENTS = 1000
"""Number of events to keep in memory and in checkpoints."""

MAX_SAVED_BATCHES = 5
"""Most batches that a rank writes to disk."""

MAX_NAMES = 10
"""Most parameter names in an event."""

RESPONSES: dict[Action, str] = {
    "skip": "the step is skipped (further skips are not reported)",
    "backoff": "the learning rate is reduced",
    "rollback": "the snapshot is restored",
    "raise": "the run is stopped",
}
"""The log message of each response, from mild to severe."""

KINDS: dict[Kind, tuple[str, str]] = {
    "nonfinite_loss": (
        "the loss is {loss}",
        "NonFiniteGuard(save_batch=True) writes that batch to disk: check it for NaN, wrong labels "
        "or an extreme scale, and the loss for a log, a division or a root of 0. In 16-mixed, "
        "activations may overflow: bf16-mixed has their range.",
    ),
    "nonfinite_gradient": (
        "the gradient norm is {norm:.4g}",
        "The loss is finite but its derivative is not: check the named parameters for a root, a "
        "norm or a power at 0, and for torch.where around an undefined branch.",
    ),
    "loss_spike": (
        "the loss of {loss:.4g} is a spike",
        "NonFiniteGuard(save_batch=True) writes that batch to disk: check its labels and "
        "its scale. Else lower the learning rate, or raise spike if such losses are normal here.",
    ),
    "gradient_spike": (
        "the gradient norm of {norm:.4g} is a spike",
        "Lower the learning rate, clip, or raise spike if it is normal here.",
    ),
    "nonfinite_weight": (
        "weights or buffers are NaN or infinite",
        "Skipping batches cannot repair the model. Resume from the last good checkpoint, with a "
        "lower learning rate if an update overflowed. With policy='rollback' the guard restores a "
        "snapshot, at most three times in a row.",
    ),
}
"""Description and advice for each fault. The description is a template for the event's values."""


class DamageDetector:
    """Finds weights and buffers that became NaN or infinite.

    A buffer that is not finite at the first check (such as a mask of minus infinity) is not damage.
    """

    def __init__(self) -> None:
        self._checked: set[str] = set()
        self._intended: set[str] = set()

    def find(self, tensors: Mapping[str, Tensor], module: nn.Module, groups: Groups) -> list[str]:
        """Return the names of tensors that are damaged on at least one rank.

        All ranks must call this. It waits for the device.

        The first call must come before the first step.

        Args:
            tensors: Weights and buffers by name.
            module: The model, whose buffers are among them.
            groups: The ranks that train together.
        """
        bad, buffers = nonfinite_names(tensors), {name for name, _ in module.named_buffers()}
        self._intended |= set(bad) & (buffers - self._checked)
        self._checked.update(buffers)
        of_ranks = _gather([name for name in bad if name not in self._intended], groups)
        return list(dict.fromkeys(name for names in of_ranks for name in names))


def nonfinite_names(tensors: Mapping[str, Tensor]) -> list[str]:
    """Return the names of tensors with a NaN or an infinity on this rank. Waits for the device."""
    parts = {name: as_real(local_part(tensor.detach())) for name, tensor in tensors.items()}
    floating = {n: t for n, t in parts.items() if t.is_floating_point() and t.numel()}
    if not floating:
        return []
    # A maximum propagates NaN. Unlike a sum of squares it cannot overflow.
    largest = [torch.linalg.vector_norm(tensor, math.inf) for tensor in floating.values()]
    flags = torch.stack([torch.isfinite(value).to(largest[0].device) for value in largest])
    return [name for name, finite in zip(floating, flags.tolist(), strict=True) if not finite]


def _gather(value: Any, groups: Groups) -> list[Any]:
    """Return the value of every rank, in order. A collective if there are several ranks."""
    if not groups:
        return [value]
    values: list[Any] = [None] * dist.get_world_size(groups[0])
    dist.all_gather_object(values, value, group=groups[0])
    return values


@dataclass(slots=True)
class StepRecord:
    """One step of one optimizer, kept until its fault code is on the host.

    It holds no references to gradients, so they can be freed.

    Attributes:
        step: ``trainer.global_step`` before the update.
        epoch: ``trainer.current_epoch``.
        optimizer: The optimizer's index; None for bad weights that were found between steps.
        losses: One per backward pass, on their device.
        batches: Index and contents of each batch since the last step. The contents are None unless
            batches are saved.
        parameters: The parameters with a gradient.
        norms: The norms of their gradients.
        kind: The fault, if there is one.
        action: The response.
        loss: Mean loss of the step over ranks.
        norm: Total gradient norm of the step.
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

    def bad_loss_index(self) -> int | None:
        """Return the index of this rank's first non-finite loss, or None. Waits for the device."""
        bad = (index for index, loss in enumerate(self.losses) if not math.isfinite(loss.item()))
        return next(bad, None)

    def batch(self) -> tuple[int | None, Any]:
        """Return index and contents of the batch with the first bad loss, else of the last one."""
        if not self.batches:
            return None, None
        bad = self.bad_loss_index() if len(self.losses) == len(self.batches) else None
        return self.batches[-1 if bad is None else bad]

    def bad_parameters(self, names: Mapping[Tensor, str]) -> list[str]:
        """Return the names of parameters with bad gradients; for a spike the three largest."""
        norms = [] if self.norms is None else self.norms.per_tensor
        values = norms.tolist() if isinstance(norms, Tensor) else norms
        named = [names.get(parameter, "?") for parameter in self.parameters]
        if self.kind in ("loss_spike", "gradient_spike"):
            largest = sorted(zip(values, named, strict=True), reverse=True)
            return [name for _, name in largest[:3]]
        return [n for n, value in zip(named, values, strict=True) if not value <= LARGEST_NORM]

    def event(self, names: Mapping[Tensor, str], damaged: list[str], rank: int) -> Event:
        """Return the fault on this rank as plain types.

        Args:
            names: Names of the parameters.
            damaged: Weights and buffers that are not finite.
            rank: The rank of this process.
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
            "ranks": [] if self.bad_loss_index() is None else [rank],
            "parameters": bad[:MAX_NAMES],
            "parameters_total": len(bad),
        }


class EventLog:
    """The newest :data:`MAX_EVENTS` events of a run.

    Args:
        save_batch: Whether to save faulty batches, at most :data:`MAX_SAVED_BATCHES` per rank.

    Attributes:
        folder: The folder for saved batches.
    """

    folder = Path("guard")

    def __init__(self, save_batch: bool) -> None:
        self.reset()
        self.save_batch = save_batch

    def reset(self) -> None:
        """Remove all events."""
        self.events: list[Event] = []
        self.count = self._saved = 0

    def record(
        self,
        trainer: pl.Trainer,
        faults: Sequence[StepRecord],
        names: Mapping[Tensor, str],
        damaged: list[str],
    ) -> list[Event]:
        """Add faults as events, and return them. All ranks must call this.

        All ranks get the same events, except for the file name of a saved batch.

        Args:
            trainer: The Trainer.
            faults: The faults of this rank. Each rank must pass the same number.
            names: Names of the parameters.
            damaged: Weights and buffers that are not finite.
        """
        rank, groups = trainer.global_rank, step_groups(trainer)
        own = [fault.event(names, damaged, rank) for fault in faults]
        events = [_merge(of_ranks) for of_ranks in zip(*_gather(own, groups), strict=True)]
        for event, fault in zip(events, faults, strict=True):
            involved = not event["ranks"] or rank in event["ranks"]
            room = self._saved < MAX_SAVED_BATCHES
            if self.save_batch and fault.batches and involved and room:
                self._saved += 1
                batch = move_data_to_device(fault.batch()[1], torch.device("cpu"))
                self.folder.mkdir(parents=True, exist_ok=True)
                path = self.folder / f"step{event['step']}_rank{rank}.pt"
                torch.save({"event": event, "batch": batch}, path)
                event["batch_file"] = str(path)
            self.events.append(event)
            self.count += 1
            is_first_rank = not groups or dist.get_rank(groups[0]) == 0
            if is_first_rank and (self.count == 1 or event["action"] != "skip"):
                response = RESPONSES[event["action"]]
                _logger.warning("NonFiniteGuard: %s; %s.", describe(event), response)
        del self.events[:-MAX_EVENTS]
        return events

    def report(self, title: str, notes: list[str], rows: int = 20) -> Report:
        """Return the newest events as a table."""
        shown = self.events[-rows:]
        if self.count > len(shown):
            notes = [f"The newest {len(shown)} of {self.count} events.", *notes]
        table = [{**event, "parameters": _shorten(event["parameters"], 2)} for event in shown]
        return Report(title, table, notes)

    def state_dict(self) -> dict[str, Any]:
        """Return the events, as plain types."""
        return {"events": [dict(event) for event in self.events], "count": self.count}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the result of :meth:`state_dict`."""
        self.events = [dict(event) for event in state_dict["events"]]
        self.count = state_dict["count"]


def _merge(of_ranks: Sequence[Event]) -> Event:
    """Merge one event of all ranks. The batch comes from the first rank with a bad loss."""
    merged = dict(next((event for event in of_ranks if event["ranks"]), of_ranks[0]))
    merged["ranks"] = [rank for event in of_ranks for rank in event["ranks"]]
    return merged


def describe(event: Event) -> str:
    """Return one sentence about an event."""
    where = f"at step {event['step']} (epoch {event['epoch']}, batch {event['batch_idx']}"
    where += f", rank {', '.join(map(str, event['ranks']))})" if event["ranks"] else ")"
    names = _shorten(event["parameters"], 3)
    fault = KINDS[event["kind"]][0].format(**event)
    return f"{where} {fault}" + (f" ({names})" if names else "")


def _shorten(names: list[str], limit: int) -> str:
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more
