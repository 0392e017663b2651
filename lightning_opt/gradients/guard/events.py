"""Records of steps, and the events of faulty ones."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

import torch.distributed as dist
from torch import Tensor, nn

from lightning_opt.core.modules.sharding import Groups, gather_objects, step_groups
from lightning_opt.core.numerics.norms import GradientNorms, nonfinite_names
from lightning_opt.gradients.guard.detector import LARGEST_NORM, SPIKES, Kind
from lightning_opt.gradients.guard.escalation import Action

if TYPE_CHECKING:
    import lightning.pytorch as pl

_logger = logging.getLogger(__name__)

Event: TypeAlias = dict[str, Any]

MAX_EVENTS = 1000
"""Number of events to keep in memory and in checkpoints."""

MAX_NAMES = 10
"""Maximum parameter names in an event."""

RESPONSES: dict[Action, str] = {
    "skip": "the step is skipped (further skips are not logged)",
    "backoff": "the learning rate is reduced",
    "rollback": "the snapshot is restored",
    "raise": "the run is stopped",
}
"""The log message of each response, from mild to severe."""

KINDS: dict[Kind, tuple[str, str]] = {
    "nonfinite_loss": (
        "the loss is {loss}",
        "Check that batch for NaN, wrong labels or an extreme scale, and the loss for a log, a "
        "division or a root of 0. In 16-mixed, activations may overflow: use "
        "bf16-mixed.",
    ),
    "nonfinite_gradient": (
        "the gradient norm is {norm:.4g}",
        "The loss is finite but its derivative is not: check the named parameters for a root, a "
        "norm or a power at 0, and for torch.where around an undefined branch.",
    ),
    "loss_spike": (
        "the loss of {loss:.4g} is a spike",
        "Check that batch's labels and its scale. Else lower the learning rate, or increase spike "
        "if such losses are normal.",
    ),
    "gradient_spike": (
        "the gradient norm of {norm:.4g} is a spike",
        "Lower the learning rate, clip, or increase spike if such norms are normal.",
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

        All ranks must call this, for the first time before the first step. It waits for the device.

        Args:
            tensors: Weights and buffers by name.
            module: The model, whose buffers are among them.
            groups: The ranks that train together.
        """
        bad, buffers = nonfinite_names(tensors), {name for name, _ in module.named_buffers()}
        self._intended |= set(bad) & (buffers - self._checked)
        self._checked.update(buffers)
        per_rank = gather_objects([name for name in bad if name not in self._intended], groups)
        return list(dict.fromkeys(name for names in per_rank for name in names))


@dataclass(slots=True)
class StepRecord:
    """One step of one optimizer, kept until its fault code is on the host.

    It holds no references to gradients, so they can be freed.

    Attributes:
        step: ``trainer.global_step`` before the update.
        epoch: ``trainer.current_epoch``.
        optimizer: The optimizer's index; None if bad weights were found between steps.
        losses: Batch index and loss of each backward pass. The losses are on their device.
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
    losses: list[tuple[int | None, Tensor]] = field(default_factory=list)
    parameters: list[Tensor] = field(default_factory=list)
    norms: GradientNorms | None = None
    kind: Kind = "nonfinite_weight"
    action: Action = "skip"
    loss: float | None = None
    norm: float | None = None

    def bad_batch(self) -> int | None:
        """Return the index of this rank's first batch with a non-finite loss, or None.

        Waits for the device.
        """
        bad = (index for index, loss in self.losses if not math.isfinite(loss.item()))
        return next(bad, None)

    def bad_parameters(self, names: Mapping[Tensor, str]) -> list[str]:
        """Return the names of parameters with bad gradients; for a spike the three largest."""
        norms = [] if self.norms is None else self.norms.per_tensor
        values = norms.tolist() if isinstance(norms, Tensor) else norms
        named = [names.get(parameter, "?") for parameter in self.parameters]
        if self.kind in SPIKES:
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
        bad_batch = self.bad_batch()
        last_batch = self.losses[-1][0] if self.losses else None
        return {
            "step": self.step,
            "epoch": self.epoch,
            "batch_idx": last_batch if bad_batch is None else bad_batch,
            "optimizer": self.optimizer,
            "kind": self.kind,
            "action": self.action,
            "loss": self.loss,
            "norm": self.norm,
            "ranks": [] if bad_batch is None else [rank],
            "parameters": bad[:MAX_NAMES],
            "parameters_total": len(bad),
        }


def record_events(
    trainer: pl.Trainer,
    faults: Sequence[StepRecord],
    names: Mapping[Tensor, str],
    damaged: list[str],
    *,
    is_first: bool,
) -> list[Event]:
    """Log the faults of all ranks, and return them as events, the same on every rank.

    All ranks must call this.

    Args:
        trainer: The Trainer.
        faults: The faults of this rank. Each rank must pass the same number.
        names: Names of the parameters.
        damaged: Weights and buffers that are not finite.
        is_first: Whether these are the first faults of the run. Later skips are not logged.
    """
    groups = step_groups(trainer)
    own = [fault.event(names, damaged, trainer.global_rank) for fault in faults]
    events = [_merge(per_rank) for per_rank in zip(*gather_objects(own, groups), strict=True)]
    if not groups or dist.get_rank(groups[0]) == 0:
        for event in events:
            if is_first or event["action"] != "skip":
                response = RESPONSES[event["action"]]
                _logger.warning("NonFiniteGuard: %s; %s.", describe(event), response)
            is_first = False
    return events


def _merge(per_rank: Sequence[Event]) -> Event:
    """Merge the ranks' copies of an event. The batch comes from the first rank with a bad loss."""
    merged = dict(next((event for event in per_rank if event["ranks"]), per_rank[0]))
    merged["ranks"] = [rank for event in per_rank for rank in event["ranks"]]
    return merged


def describe(event: Event) -> str:
    """Return one sentence about an event."""
    where = f"at step {event['step']} (epoch {event['epoch']}, batch {event['batch_idx']}"
    where += f", rank {', '.join(map(str, event['ranks']))})" if event["ranks"] else ")"
    names, more = ", ".join(event["parameters"][:3]), event["parameters_total"] - 3
    if more > 0:
        names += f" and {more} more"
    fault = KINDS[event["kind"]][0].format(**event)
    return f"{where} {fault}" + (f" ({names})" if names else "")
