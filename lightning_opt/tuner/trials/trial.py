"""What came of one configuration."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from lightning_opt.tuner.search.space import Switches

FAILURES = ("out of memory", "error", "died", "timeout", "setup")
"""Verdicts of trials that did not run to their end."""


@dataclass
class Trial:
    """One configuration that was tried.

    Attributes:
        switches: What was switched on; empty for the baseline.
        verdict: ``"baseline"``, ``"accepted"``, ``"too slow"`` (stopped early, so that its losses
            were not compared), ``"rejected"`` (it changes the result), or how it failed: ``"out of
            memory"``, ``"error"``, ``"died"``, ``"timeout"``, ``"setup"``.
        why: A sentence on the verdict; may be empty.
        ratio: Time of a step as a share of the baseline's, from blocks of steps in turn.
        low: Lower end of the ratio's interval at 90%.
        high: Upper end.
        seconds: Of a step, median.
        peak: Bytes: of the device, or of the process above what it had before the model.
        peak_ratio: Peak as a share of the baseline's.
        losses: Of the first steps.
        difference: Largest difference of a window's mean loss from the baseline's.
        tolerance: What was allowed for it.
        steps_ratio: Steps until the target loss as a share of the baseline's; only where the
            objective is ``"time_to_loss"``.
        startup: Seconds of the first step less those of a later one: compilation above all.
        cost: Seconds that the trial took.
        details: Traceback or output of a failure.
    """

    switches: Switches
    verdict: str = "accepted"
    why: str = ""
    ratio: float | None = None
    low: float | None = None
    high: float | None = None
    seconds: float | None = None
    peak: int | None = None
    peak_ratio: float | None = None
    losses: list[float] = field(default_factory=list)
    difference: float | None = None
    tolerance: float | None = None
    steps_ratio: float | None = None
    startup: float | None = None
    cost: float = 0.0
    details: str = ""

    @property
    def name(self) -> str:
        """The switches in words."""
        return " + ".join(self.switches) or "baseline"

    @property
    def failed(self) -> bool:
        """Whether it did not run to its end."""
        return self.verdict in FAILURES

    def to_dict(self) -> dict[str, Any]:
        """Return plain values; numbers that are not finite as strings, which JSON can hold."""
        return {name: _written(value) for name, value in asdict(self).items()}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Trial:
        """Return the trial that :meth:`to_dict` wrote; unknown names are ignored."""
        known = {name.name for name in fields(cls)}
        read = {name: _read(value) for name, value in values.items() if name in known}
        texts = ("verdict", "why", "details")
        read.update({name: values[name] for name in texts if name in values})
        return cls(**{**read, "switches": tuple(values["switches"])})


def _written(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return [_written(item) for item in value] if isinstance(value, (list, tuple)) else value


def _read(value: Any) -> Any:
    if isinstance(value, list):
        return [_read(item) for item in value]
    return float(value) if value in ("nan", "inf", "-inf") else value
