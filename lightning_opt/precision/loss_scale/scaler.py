"""torch's loss scaler with a floor, and with counts that stay on the device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lightning_opt.core.modules.sharding import reads_are_free
from lightning_opt.core.numerics.scalars import Condition, Scalar, move, to_plain

COUNTS = ("skipped", "overflows", "stuck")
"""Counts over a whole run."""


class CountingScaler(torch.amp.GradScaler):
    """A ``GradScaler`` with a minimum scale that counts skipped updates.

    Counts are numbers on a CPU and tensors on a device.

    Args:
        device: Type of the device.
        min_scale: Minimum of the scale.
        **settings: Those of torch's scaler.

    Attributes:
        skipped: Skipped updates so far.
        overflows: Skipped updates with a finite loss.
        stuck: Consecutive skipped updates at ``min_scale``.
        newest: Whether the newest update was skipped.
        updates: Updates so far in this process, including skipped ones.
    """

    def __init__(self, device: str, min_scale: float, **settings: Any) -> None:
        super().__init__(device, **settings)
        self.min_scale = min_scale
        self.skipped: Scalar = 0
        self.overflows: Scalar = 0
        self.stuck: Scalar = 0
        self.newest: Condition = False
        self.updates = 0
        self._finite: Condition = True

    def record_loss(self, loss: Tensor) -> None:
        """Record whether the loss of a batch is finite, before its backward pass."""
        finite = torch.isfinite(loss.detach()).all()
        known = bool(finite.item()) if reads_are_free(loss.device) else finite  # on a CPU
        self._finite = self._finite & known

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Adapt the scale, and count."""
        states = self._per_optimizer_states.values()
        found = [flags for state in states if (flags := state["found_inf_per_device"])]
        scale = self._scale
        if new_scale is not None or scale is None or not found:
            super().update(new_scale)
            return
        for flags in found:  # torch would not wait for a copy to the host
            flags.update({device: move(flag, scale.device) for device, flag in flags.items()})
        overflow: Condition = sum(flag for flags in found for flag in flags.values()) > 0
        at_floor: Condition = scale <= self.min_scale
        if reads_are_free(scale.device):
            overflow, at_floor = bool(overflow), bool(at_floor)
        super().update()
        scale.clamp_(min=self.min_scale)
        self.newest = overflow
        self.updates += 1
        self.skipped = self.skipped + overflow
        self.overflows = self.overflows + (overflow & self._finite)
        self.stuck = (self.stuck + 1) * (overflow & at_floor)
        self._finite = True

    def state_dict(self) -> dict[str, Any]:
        """Return scale and counts as plain numbers. Waits for the device."""
        return {
            "scale": self.get_scale(),
            "_growth_tracker": self._get_growth_tracker(),
            **to_plain({name: getattr(self, name) for name in COUNTS}),
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore the result of :meth:`state_dict` or of torch's scaler, except settings."""
        self._init_scale = max(state_dict["scale"], self.min_scale)
        self._init_growth_tracker = state_dict["_growth_tracker"]
        if self._scale is not None:
            self._scale.fill_(self._init_scale)
        if self._growth_tracker is not None:
            self._growth_tracker.fill_(self._init_growth_tracker)
        for name in COUNTS:
            setattr(self, name, state_dict.get(name, 0))

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__()
        return {**state, **to_plain({name: state[name] for name in COUNTS})}
